"""The commands ``nufed data …``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nufed.errors import InputError, visible
from nufed.lab.cli.catalogue import complete_data_set
from nufed.lab.cli.options import AsJson, Overrides, Source
from nufed.lab.cli.terminal import console, say

if TYPE_CHECKING:
    from nufed.lab.readers.sources import Stored

data_app = typer.Typer(
    help="Get data sets, and inspect how they are split among agents.", no_args_is_help=True
)

OWN_FILE = "file"  # the source of users' own files


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """Show which data sets are present, where nufed looks for them, and how to get the others."""
    from nufed.lab.readers.sources import SOURCES, STORED, data_directory

    origin = "NUFED_DATA" if os.environ.get("NUFED_DATA") else "the cache directory"
    contents = {name: _state(STORED.get(name)) for name in SOURCES if name != OWN_FILE}
    if as_json:
        print(json.dumps({"directory": str(data_directory()), "from": origin, "data": contents}))
        return
    hint = "" if origin == "NUFED_DATA" else "; set NUFED_DATA to use another"
    say(f"data directory: {data_directory()} (from {origin}{hint})")
    for name, state in contents.items():
        say(f"{name:<15}{state['state']:<12}{state['where']}")
        if state["command"]:
            note = "" if STORED[name].url else " (docs/data.md says how to make it)"
            say(f"{'':<15}get it with: {state['command']}{note}")


@data_app.command("get")
def data_get(
    name: Annotated[
        str,
        typer.Argument(
            help="A data set (see `nufed data list`).", autocompletion=complete_data_set
        ),
    ],
    url: Annotated[str | None, typer.Option(help="Download the archive from here.")] = None,
    archive: Annotated[
        Path | None, typer.Option("--from", help="Use this local file instead of downloading.")
    ] = None,
) -> None:
    """Download a data set, verify it, and store it in the data directory."""
    from nufed.lab.cli.progress import show_download
    from nufed.lab.downloads import fetch
    from nufed.lab.readers.sources import SOURCES, STORED
    from nufed.registry import suggest

    if name == OWN_FILE:
        raise InputError(f"{name} is your own file: name it with data.args.path")
    if name not in SOURCES:
        known = f"; there are {', '.join(name for name in SOURCES if name != OWN_FILE)}"
        raise InputError(f"unknown data set {name!r}{suggest(name, SOURCES) or known}")
    if name not in STORED:
        say(f"{name} is shipped with nufed: nothing to download")
        return
    try:
        with show_download(console(stderr=True), name) as on_progress:
            fetched = fetch(STORED[name], url=url, archive=archive, on_progress=on_progress)
    except KeyboardInterrupt:
        say("stopped; run the same command again to resume", error=True)
        raise typer.Exit(130) from None
    where = _state(STORED[name])["where"]
    say(f"{name}: {where}" + ("" if fetched else " (already complete)"))


@data_app.command("show")
def data_show(
    source: Source = "quickstart",
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the split.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a chart: .svg, .png or .html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the number of samples per agent and class."""
    from nufed.lab.config import load_config
    from nufed.lab.config.problem import build_samples, build_shift, build_split
    from nufed.lab.report.charts import counts_chart
    from nufed.lab.report.figures import save_chart
    from nufed.lab.runs.directory import class_counts
    from nufed.lab.runs.records import LISTED

    config = load_config(source, overrides or ())
    samples = build_samples(config.data)
    split = build_split(config.data, samples, seed)
    samples = build_shift(config.data, samples, split, seed)
    names = split.names[:LISTED]
    counts = [class_counts(split, samples, agent) for agent in range(len(names))]
    classes = samples.classes or ("samples",)
    if out is not None:
        if out.suffix not in (".svg", ".png", ".html"):
            raise InputError(f"--out {out}: must end in .svg, .png or .html")
        try:
            save_chart(counts_chart(names, classes, counts), out)
        except OSError as error:
            raise InputError(f"--out {out}: can't be written ({error.strerror})") from error
    if as_json:
        held = dict(zip(names, counts, strict=True))
        print(json.dumps({"sha256": split.fingerprint, "classes": classes, "agents": held}))
        return
    _print_counts(names, split.unseen, classes, counts)
    first = f"the first {len(names)} of " if len(names) < len(split.names) else ""
    total = sum(map(sum, counts))
    say(f"{first}{len(split.names)} agents, {total} samples, {split.fingerprint[:12]}")


def _state(stored: Stored | None) -> dict[str, str]:
    """Whether a data set is present, its path, and how to get it if missing.

    Only checks that files exist; their content is verified when they are read.
    """
    from nufed.lab.readers.sources import data_directory

    if stored is None:
        return {"state": "present", "where": "shipped with nufed", "command": ""}
    place = data_directory() / os.path.commonpath(stored.files)
    where = str(place.parent if len(stored.files) == 1 and stored.url else place)
    missing = stored.missing()
    if not missing:
        return {"state": "present", "where": where, "command": ""}
    state = "missing" if len(missing) == len(stored.files) else "incomplete"
    return {"state": state, "where": where, "command": stored.command}


def _print_counts(names: Any, unseen: Any, classes: Any, counts: list[list[int]]) -> None:
    """A heat map in text: one row per agent, darker for more samples."""
    shades, names, classes = " ░▒▓█", [*map(visible, names)], [*map(visible, classes)]
    most = max(max(row) for row in counts)
    width = max(len(name) for name in classes)
    margin = max(len(name) for name in names)
    say(" ".join([" " * margin, *(name.rjust(width) for name in classes), " samples"]))
    for agent, (name, row) in enumerate(zip(names, counts, strict=True)):
        cells = (shades[-(-4 * n // most)] * width for n in row)
        note = " unseen in training" if agent in unseen else ""
        say(" ".join([name.rjust(margin), *cells, str(sum(row)).rjust(8) + note]))
