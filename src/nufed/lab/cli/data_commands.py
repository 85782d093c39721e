"""The commands ``nufed data …``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nufed.errors import InputError, visible
from nufed.lab.cli.catalogue import complete_data_set
from nufed.lab.cli.options import AsJson, Overrides, Source
from nufed.lab.cli.terminal import console, print_plain, print_table, say, table

if TYPE_CHECKING:
    from nufed.data import Samples, Split
    from nufed.lab.readers.sources import Stored

data_app = typer.Typer(
    help="Get data sets, and inspect how they are split among agents.", no_args_is_help=True
)

SHOWN_AGENTS = 8  # whose missing values are shown
OWN_FILES = ("file", "table", "text", "leaf", "hf")  # the sources of users' own files


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """Show which data sets are present, where nufed looks for them, and how to get the others."""
    from nufed.lab.readers.sources import ORIGINS, SOURCES, STORED, Origin, data_directory

    origin = "NUFED_DATA" if os.environ.get("NUFED_DATA") else "the cache directory"
    contents = {
        name: {**_state(STORED.get(name)), **asdict(ORIGINS.get(name, Origin("", "")))}
        for name in SOURCES
        if name not in OWN_FILES
    }
    if as_json:
        print(json.dumps({"directory": str(data_directory()), "from": origin, "data": contents}))
        return
    hint = "" if origin == "NUFED_DATA" else "; set NUFED_DATA to use another"
    say(f"data directory: {data_directory()} (from {origin}{hint})")
    for name, state in contents.items():
        say(f"{name:<15}{state['state']:<12}{state['where']}")
        if state["citation"]:
            say(f"{'':<15}{state['citation']}; licence: {state['licence']}")
        if state["command"]:
            note = "" if STORED[name].url else " (docs/data.md says how to make it)"
            say(f"{'':<15}get it with: {state['command']}{note}")


@data_app.command("get")
def data_get(
    name: Annotated[
        str,
        typer.Argument(
            help="A data set (see `nufed data list`), or hf:MODEL.",
            autocompletion=complete_data_set,
        ),
    ],
    url: Annotated[str | None, typer.Option(help="Download the archive from here.")] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Use this local file, or directory of files, instead of downloading."
        ),
    ] = None,
) -> None:
    """Download a data set, verify it, and store it in the data directory.

    hf:NAME is a pretrained model instead, stored in the cache of Hugging Face.
    """
    from nufed.lab.cli.progress import show_download
    from nufed.lab.downloads import fetch
    from nufed.lab.pretrained import PREFIX, download
    from nufed.lab.readers.sources import SOURCES, STORED
    from nufed.registry import suggest

    if name.startswith(PREFIX):
        say(f"{name}: {download(name.removeprefix(PREFIX))}")
        return
    if name in OWN_FILES:
        raise InputError(f"{name} is for your own files: name them with data.args.path")
    if name not in SOURCES:
        known = f"; there are {', '.join(name for name in SOURCES if name not in OWN_FILES)}"
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


@data_app.command("import")
def data_import(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help="leaf.")],
    folder: Annotated[Path, typer.Argument(help="The folder with LEAF's JSON files.")],
    out: Annotated[Path | None, typer.Option(help="The file to write, a .npz.")] = None,
) -> None:
    """Make one file of a folder of LEAF, and print how a configuration names it.

    The file is small and quickly read; its owners are LEAF's users. By default it is called like
    the folder, and written to the current directory.
    """
    from nufed.lab.readers.leaf import import_leaf

    if form != "leaf":
        raise InputError(f"{form!r}: must be leaf; tables and arrays are read as they are")
    out = Path(f"{folder.resolve().name}.npz") if out is None else out
    if out.suffix != ".npz":
        raise InputError(f"--out {out}: must end in .npz")
    if out.exists() or not out.parent.is_dir():
        wrong = "exists already" if out.exists() else f"there is no folder {out.parent}"
        raise InputError(f"--out {out}: {wrong}; name another file")
    samples = import_leaf(str(folder), out)
    assert samples.owners is not None
    unseen = f" ({len(samples.unseen_owners)} of them unseen)" if samples.unseen_owners else ""
    about = f"{len(samples)} samples of {len(set(samples.owners.tolist()))} users{unseen}"
    say(f"{out}: {about}; to train on them, write", error=True)
    source = json.dumps(f"leaf:{out}", ensure_ascii=False)  # TOML has the same escapes
    print_plain(f'[data]\nsource = {source}\npartition = "given"')


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
        unseen = [split.names[agent] for agent in split.unseen]
        about = {"sha256": split.fingerprint, "classes": classes, "agents": held, "unseen": unseen}
        print(json.dumps(about))
        return
    _print_counts(names, split.unseen, classes, counts)
    if samples.columns:
        _print_columns(samples, split)
    first = f"the first {len(names)} of " if len(names) < len(split.names) else ""
    total = sum(map(sum, counts))
    say(f"{first}{len(split.names)} agents, {total} samples, {split.fingerprint[:12]}")


Listed = Annotated[list[str] | None, typer.Option(help="A column; may be repeated.")]


@data_app.command("tally")
def data_tally(
    config: Annotated[Path, typer.Argument(help="The federation's configuration.")],
    data: Annotated[Path, typer.Argument(help="The site's table: a .csv or .parquet.")],
    site: Annotated[int, typer.Option(min=0, help="The site's number.")],
    out: Annotated[Path, typer.Option(help="The file to write, a .json.")],
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    categorical: Listed = None,
    leave_out: Listed = None,
) -> None:
    """Count and sum the columns of a site's training part, to prepare tables in a federation.

    The file holds counts and sums, no row: look at it before it leaves the site.
    """
    from nufed.lab.config import load_config
    from nufed.lab.config.tallies import site_tally, write_tally
    from nufed.lab.readers.tables import own_table

    loaded = load_config(config)
    if site >= loaded.data.agents:
        raise InputError(f"--site {site}: must be below {loaded.data.agents}, as data.agents says")
    samples = own_table(str(data), label, categorical=categorical or [], leave_out=leave_out or [])
    columns = site_tally(loaded.data, samples, site, loaded.seeds[0])
    write_tally(out, site, columns)
    rows = columns[0].present + columns[0].missing
    say(f"tally: {out}, of {rows} training rows and {len(columns)} columns")


@data_app.command("prepare")
def data_prepare(
    config: Annotated[Path, typer.Argument(help="The federation's configuration.")],
    tallies: Annotated[list[Path], typer.Argument(help="The sites' files of `nufed data tally`.")],
) -> None:
    """Print the preparation that the tallies of all sites give, to be added to the configuration.

    Needed is a tally of every site that takes part in training.
    """
    from nufed.data import choose_unseen
    from nufed.lab.config import load_config
    from nufed.lab.config.tallies import as_toml, prepare_columns

    loaded = load_config(config)
    agents = loaded.data.agents
    unseen = choose_unseen(agents, loaded.data.held_out, loaded.seeds[0])
    seen = [site for site in range(agents) if site not in unseen]
    preparation = prepare_columns(tallies, seen)
    print_plain(as_toml(preparation))
    say(f"{preparation}: add this to {config}, the same at the server and all sites", error=True)


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


def _print_columns(samples: Samples, split: Split) -> None:
    """The columns of a table, and the share of missing values at each of some agents."""
    from nufed.data import rows_by_agent
    from nufed.data.tables import raw_values

    absent = raw_values(samples).isnan()
    rows = rows_by_agent(split)[:SHOWN_AGENTS]
    shares = [absent[of_agent].double().mean(dim=0).tolist() for of_agent in rows]
    cells = [
        [
            visible(column.name),
            f"{len(column.words)} categories" if column.words else "numbers",
            *(f"{share[place]:.1%}" if share[place] else "" for share in shares),
        ]
        for place, column in enumerate(samples.columns)
    ]
    names = [visible(name) for name in split.names[: len(rows)]]
    print_table(table(cells, ["column", "missing at:", *names]))


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
