"""Charts as SVG and PNG files, drawn in a separate process, whose crash is tolerated."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from nufed.errors import ReportWarning, RunError, visible
from nufed.lab.files import cache_directory, read_sealed, write_sealed

SCRIPT = Path(__file__).with_name("draw.py")
TIMEOUT = 300.0  # seconds for all charts of a report

Chart: TypeAlias = tuple[str, str, Any]  # name of its files, caption, altair chart

# properties of every JavaScript object: Vega drops values with these names
_OBJECT_KEYS = (
    *("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString"),
    *("toString", "valueOf", "__proto__", "__defineGetter__", "__defineSetter__"),
    *("__lookupGetter__", "__lookupSetter__"),
)


@dataclass(frozen=True)
class Figure:
    """A chart as SVG and PNG."""

    svg: str
    png: bytes

    def save(self, folder: Path, name: str) -> Path:
        """Write both files; return the path of the PNG."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text(self.svg, "utf-8")
        (folder / f"{name}.png").write_bytes(self.png)
        return folder / f"{name}.png"


@dataclass
class Drawn:
    """The charts that could be drawn, and why others could not."""

    figures: dict[str, Figure] = field(default_factory=dict)
    javascript: str | None = None  # Vega with its dependencies
    failure: str | None = None

    def warn(self, consequence: str) -> None:
        """Issue a warning if something is missing."""
        if self.failure:
            warnings.warn(ReportWarning(f"{self.failure}: {consequence}"), stacklevel=2)


def draw(specs: Mapping[str, Any], *, javascript: bool = False) -> Drawn:
    """Draw charts from Vega-Lite specifications and, on request, get the page's JavaScript.

    Both take about a second, and are done at the same time by a process each; the JavaScript is
    cached. If a process dies, the charts drawn so far are returned with the reason.
    """
    drawn = Drawn(javascript=_cached_javascript() if javascript else None)
    requests = [{"javascript": True, "specs": {}}] if javascript and not drawn.javascript else []
    requests += [{"javascript": False, "specs": dict(specs)}] if specs else []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for output, failure in pool.map(_run, [json.dumps(each).encode() for each in requests]):
            drawn.failure = drawn.failure or failure
            for line in output.splitlines(keepends=True):
                if line.endswith(b"\n"):  # complete
                    _add(json.loads(line), drawn)
    return drawn


def _javascript_file() -> Path:
    """The cached file of this version of vl-convert, in the user's cache directory."""
    return cache_directory() / f"vega-{version('vl-convert-python')}.json"


def _cached_javascript() -> str | None:
    with suppress(RunError, KeyError):  # there is none yet, or it is damaged
        return str(read_sealed(_javascript_file()).about["javascript"])
    return None


def spec_of(chart: Any) -> dict[str, Any]:
    """A chart's Vega-Lite specification; characters that can't be drawn are escaped."""
    spec: dict[str, Any] = _drawable(json.loads(chart.to_json(validate=False)))  # valid as built
    return spec


def _drawable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drawable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_drawable(inner) for inner in value]
    if isinstance(value, str):
        return f"“{value}”" if value in _OBJECT_KEYS else visible(value)
    return value


def save_figures(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write charts as SVG and PNG; return the paths of the PNGs. Warns if any is missing."""
    drawn = draw({name: spec_of(chart) for name, _, chart in charts})
    paths = [figure.save(folder, name) for name, figure in drawn.figures.items()]
    drawn.warn("the numbers are saved without charts")
    return paths


def save_chart(chart: Any, path: Path) -> None:
    """Write a chart as SVG, PNG or HTML, by the file's extension."""
    spec = spec_of(chart)
    if path.suffix == ".html":
        type(chart).from_dict(spec).save(path)
        return
    drawn = draw({"chart": spec})
    if drawn.failure:
        raise RunError(f"{path} was not written: {drawn.failure}")
    figure = drawn.figures["chart"]
    path.write_bytes(figure.png if path.suffix == ".png" else figure.svg.encode())


def _add(result: dict[str, str], drawn: Drawn) -> None:
    if "javascript" in result:
        drawn.javascript = result["javascript"]
        with suppress(OSError, RunError):  # a cache that can't be written is none
            _javascript_file().parent.mkdir(parents=True, exist_ok=True)
            write_sealed(_javascript_file(), result)
    else:
        drawn.figures[result["name"]] = Figure(result["svg"], base64.b64decode(result["png"]))


def _run(request: bytes) -> tuple[bytes, str | None]:
    """The output of the drawing process, and why it failed, if it did."""
    command = [sys.executable, "-P", str(SCRIPT)]  # -P: its directory is not on the import path
    try:
        ended = subprocess.run(command, input=request, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as late:
        return late.stdout or b"", f"charts could not be drawn within {TIMEOUT:.0f} seconds"
    except OSError as error:
        return b"", f"charts could not be drawn (no process can be started: {error.strerror})"
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        return ended.stdout, (
            f"charts could not be drawn (the drawing process was killed by {name}; it needs 80 GB "
            "of address space, which `ulimit -v` must allow)"
        )
    if ended.returncode:
        lines = ended.stderr.decode("utf-8", "replace").splitlines()
        reasons = [line for line in lines if line and not line[0].isspace()]  # without traceback
        reason = reasons[-1] if reasons else "no reason given"
        return ended.stdout, f"charts could not be drawn ({reason})"
    return ended.stdout, None
