"""Charts as SVG and PNG files, drawn in a process of its own that may die without harm."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nufed.errors import ReportWarning
from nufed.text import visible

SCRIPT = Path(__file__).with_name("draw.py")
TIMEOUT = 300.0  # seconds for all charts of a report

# a plain object of JavaScript has these: Vega loses a name that is one of them
_OBJECT_KEYS = (
    *("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString"),
    *("toString", "valueOf", "__proto__", "__defineGetter__", "__defineSetter__"),
    *("__lookupGetter__", "__lookupSetter__"),
)

_javascript: list[str] = []  # obtained once per process, as it takes longest


@dataclass(frozen=True)
class Figure:
    """A chart as SVG and PNG."""

    svg: str
    png: bytes

    def save(self, folder: Path, name: str) -> Path:
        """Write both files; the path of the PNG."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text(self.svg, "utf-8")
        (folder / f"{name}.png").write_bytes(self.png)
        return folder / f"{name}.png"


@dataclass
class Drawn:
    """What could be drawn, and if that is not all, why."""

    figures: dict[str, Figure] = field(default_factory=dict)
    javascript: str | None = None  # Vega with everything it needs
    trouble: str | None = None

    def warn(self, consequence: str) -> None:
        """One warning if something is missing."""
        if self.trouble:
            warnings.warn(ReportWarning(f"{self.trouble}: {consequence}"), stacklevel=2)


def draw(specs: Mapping[str, Any], *, javascript: bool = False) -> Drawn:
    """Draw charts by their Vega-Lite specifications, and on request get the page's JavaScript.

    One process does it all. If it dies, what it has drawn until then is returned with the reason.
    """
    drawn = Drawn()
    asked = {"javascript": javascript and not _javascript, "specs": dict(specs)}
    if asked["javascript"] or specs:
        output, drawn.trouble = _run(json.dumps(asked).encode())
        for line in output.splitlines(keepends=True):
            if line.endswith(b"\n"):  # whole
                _take(json.loads(line), drawn)
    if javascript and _javascript:
        drawn.javascript = _javascript[0]
    return drawn


def spec_of(chart: Any) -> dict[str, Any]:
    """A chart as Vega-Lite takes it, with any names: what can't be drawn is written out."""
    spec: dict[str, Any] = _drawable(json.loads(chart.to_json()))
    return spec


def _drawable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drawable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_drawable(inner) for inner in value]
    if isinstance(value, str):
        return f"“{value}”" if value in _OBJECT_KEYS else visible(value)
    return value


def save_figures(charts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw charts and write them; the paths of the PNGs. A warning says what is missing."""
    drawn = draw({name: spec_of(chart) for name, chart in charts.items()})
    paths = [figure.save(folder, name) for name, figure in drawn.figures.items()]
    drawn.warn("the numbers are saved without charts")
    return paths


def _take(result: dict[str, str], drawn: Drawn) -> None:
    if "javascript" in result:
        _javascript.append(result["javascript"])
    else:
        drawn.figures[result["name"]] = Figure(result["svg"], base64.b64decode(result["png"]))


def _run(asked: bytes) -> tuple[bytes, str | None]:
    """What the process wrote, and why it ended badly, if it did."""
    command = [sys.executable, "-P", str(SCRIPT)]  # -P: its folder is not on the import path
    try:
        ended = subprocess.run(command, input=asked, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as late:
        return late.stdout or b"", f"charts could not be drawn within {TIMEOUT:.0f} seconds"
    except OSError as error:
        return b"", f"charts could not be drawn (no process can be started: {error.strerror})"
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        return ended.stdout, (
            f"charts could not be drawn (the process that draws was ended by {name}; it needs "
            "80 GB of address space, which `ulimit -v` must allow)"
        )
    if ended.returncode:
        lines = ended.stderr.decode("utf-8", "replace").splitlines()
        reasons = [line for line in lines if line and not line[0].isspace()]  # not its details
        reason = reasons[-1] if reasons else "no reason given"
        return ended.stdout, f"charts could not be drawn ({reason})"
    return ended.stdout, None
