"""Writes docs/reference/ from the schema, the algorithms, the command line and pyproject.toml.

Run it from anywhere after a change of a key, a setting, a command or an extra:
`python docs/describe_reference.py`.
"""

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import typer.main
from pydantic.fields import FieldInfo

import nufed
from nufed.algorithms import ALGORITHMS, LocalTraining
from nufed.data import PARTITIONS, SHIFTS
from nufed.lab.cli.commands import app
from nufed.lab.cli.listing import choices_of, value_fields
from nufed.lab.config.describe import described
from nufed.lab.readers.sources import SOURCES
from nufed.lab.runs import directory
from nufed.models import MODELS
from nufed.simulation.faults import ATTACKS

DOCS = Path(__file__).parent
PAGES = DOCS / "reference"
FIRST = "0.1.0"
SINCE: dict[str, str] = {}  # keys that came after the first version
NAMED = {  # keys whose values are names
    "data.source": SOURCES,
    "data.partition": PARTITIONS,
    "data.shift": SHIFTS,
    "model.name": MODELS,
    "faults.attack": ATTACKS,
}
TABLES = {
    "": "The run",
    "data": "`[data]`: samples and agents",
    "data.prepare": "`[data.prepare]`: raw columns of a table",
    "model": "`[model]`: the network",
    "model.lora": "`[model.lora]`: adapters",
    "faults": "`[faults]`: simulated faults",
    "compression": "`[compression]`: what agents send",
    "federation": "`[federation]`: sites",
    "privacy": "`[privacy]`: clipping and noise",
    "tune": "`[tune]`: a search",
    "tuned": "`[tuned]`: written by `nufed tune`",
    "method": "`[method]` and `[methods.NAME]`: algorithms",
}
KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}
BOUNDS = {"gt": "> {:g}", "ge": "≥ {:g}", "lt": "< {:g}", "le": "≤ {:g}"}
HEAD = "| key | meaning | type and range | default | since |\n|---|---|---|---|---|"


def configuration() -> str:
    """Every key, by table."""
    rows: dict[str, list[str]] = {table: [] for table in TABLES}
    for key, field in value_fields().items():
        if key in TABLES:  # a table that may be absent
            continue
        table, _, name = key.rpartition(".")
        rows[table].append(row(name, allowed(key, field), default(field), meaning(field), key))
    parts = [
        "# Configuration keys",
        "A configuration is TOML; unknown keys are refused. The command line overrides the file "
        "(`nufed run FILE data.dirichlet=0.1 seeds=[0,1]`), which overrides the defaults here. "
        "`nufed list keys` prints them, too.",
    ]
    for table, title in TABLES.items():
        parts += [f"## {title}", "\n".join([HEAD, *rows[table]])]
    parts += [
        "`[method]` holds what all methods share; `[methods.NAME]` adds one method with settings "
        "of its own.",
        "### Of every algorithm with local steps",
        "\n".join([HEAD, *settings(LocalTraining)]),
        "### Of single algorithms",
        "\n".join([HEAD.replace("| meaning |", "| meaning, and whose |"), *own_settings()]),
    ]
    return "\n\n".join(parts) + "\n"


def row(name: str, kind: str, usual: str, about: str, key: str) -> str:
    cells = (f"`{name}`", about, kind, usual, SINCE.get(key, FIRST))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def settings(cls: type) -> list[str]:
    return [
        row(s.key, s.allowed, f"`{s.default}`", s.about, f"method.{s.key}") for s in described(cls)
    ]


def own_settings() -> list[str]:
    """Settings that not all algorithms have; equal ones of several in one row."""
    shared, found = described(LocalTraining), {}
    for name, cls in ALGORITHMS.working().items():
        for setting in described(cls):
            if setting not in shared:
                found.setdefault(setting, []).append(name)
    lines = []
    for setting, names in sorted(found.items()):
        whose = ", ".join(f"[{name}](../algorithms/{name}.md)" for name in names)
        about = f"{setting.about} ({whose})"
        key = f"method.{setting.key}"
        lines.append(row(setting.key, setting.allowed, f"`{setting.default}`", about, key))
    return lines


def allowed(key: str, field: FieldInfo) -> str:
    """The type of a key's values in words, with its bounds."""
    if key in NAMED:
        return "one of " + ", ".join(f"`{name}`" for name in NAMED[key]) + ", or code by name"
    bounds = [
        text.format(float(getattr(limit, bound)))
        for limit in (*field.metadata, *inner_limits(field.annotation))
        for bound, text in BOUNDS.items()
        if getattr(limit, bound, None) not in (None, float("inf"))
    ]
    kind, or_, other = kind_of(field.annotation).partition(" or ")
    return " ".join([kind, ", ".join(bounds)]).strip() + or_ + other


def inner_limits(annotation: Any) -> Iterator[Any]:
    """Bounds inside an annotation, but not those of a list's items."""
    if get_origin(annotation) is Annotated:
        for part in annotation.__metadata__:
            yield from part.metadata if isinstance(part, FieldInfo) else [part]
        yield from inner_limits(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for kind in get_args(annotation):
            yield from inner_limits(kind)


def kind_of(annotation: Any) -> str:
    if choices := choices_of(annotation):
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(inner[0])
    if origin in (Union, UnionType):
        kinds = [kind_of(kind).removeprefix("one of ") for kind in inner if kind is not NoneType]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list ({kind_of(inner[0])})"
    if origin is dict:
        return "table"
    return KINDS.get(annotation, "table of a prepared column")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else "empty"


def meaning(field: FieldInfo) -> str:
    if not field.description:
        raise ValueError(f"a key without a description: {field}")
    return field.description


def commands() -> str:
    """Every command, with its arguments and options."""
    parts = [
        "# Commands",
        "`nufed` and `python -m nufed` are the same. `--help` after any command shows what stands "
        "here. [Exit codes and environment variables](environment.md) are the same for all.",
    ]
    top = typer.main.get_command(app)
    for words, command in every_command(top, ["nufed"]):
        level = "##" if len(words) == 2 else "###"
        about = inspect.cleandoc(command.help or command.short_help or "").replace("\b\n", "")
        parts += [f"{level} {' '.join(words)}", as_text(about)]
        if not isinstance(command, click.Group):
            ctx = click.Context(command, info_name=" ".join(words))
            usage = " ".join(command.collect_usage_pieces(ctx))
            parts.append(f"```\n{' '.join(words)} {usage}\n```")
            rows = [described_parameter(parameter, ctx) for parameter in command.params]
            rows = [line for line in rows if line]
            if rows:
                parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def every_command(group: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        yield [*words, name], command
        if hasattr(command, "commands"):
            yield from every_command(command, [*words, name])


def described_parameter(parameter: Any, ctx: click.Context) -> str | None:
    record = parameter.get_help_record(ctx)
    if not record or "--help" in record[0]:
        return None
    name, about = (re.sub(r"\s+", " ", text).strip() for text in record)
    return f"| `{name.replace('|', '/')}` | {as_text(about)} |"


def as_text(text: str) -> str:
    """Help as Markdown: nothing in it is markup."""
    text = text.replace("\\[", "[")
    text = re.sub(r"([<>|*_\[\]])", r"\\\1", text)
    return re.sub(r"(`[^`]*`)", lambda code: code[1].replace("\\", ""), text)


def files() -> str:
    """The run directory, from the docstring of the module that writes it."""
    first, _, listing = inspect.cleandoc(directory.__doc__ or "").partition("::\n")
    return (
        "\n\n".join(
            [
                "# Files of a run",
                as_text(first.strip()),
                "```text\n"
                + inspect.cleandoc(listing).replace("sealed", "with its SHA-256")
                + "\n```",
                "A file with its SHA-256 holds it: a flipped bit is found when the file is read. "
                "`nufed report RUN` draws the page again from the others. A search writes `tuned.toml`, "
                "`tune.html` and `tune.json` ([tuning](../tuning.md)); a sweep `sweep.json` and a "
                "directory like this per run ([sweeps](../sweeps.md)). A bundle (`.nufed`) and an adapted "
                "model (`.safetensors`) are [safetensors files](../tutorial.md#what-is-in-a-bundle).",
            ]
        )
        + "\n"
    )


ENVIRONMENT = """# Exit codes, environment variables, extras, limits

## Exit codes
| code | meaning |
|---|---|
| 0 | done |
| 1 | done in part: a method diverged or failed, or `nufed doctor` found a problem |
| 2 | refused: one sentence on standard error says what was given, what is allowed and what to do |
| 130 | interrupted by Ctrl-C; the message names the command that resumes |
| 141 | the reader of a pipe has left |

## Environment variables
| variable | meaning | default |
|---|---|---|
| `NUFED_DATA` | the directory of downloaded data sets | `nufed` in the user's cache directory |
| `NUFED_DATA_LIMIT` | largest size of a data file's contents, in bytes | {limit:,} |
| `XDG_CACHE_HOME` | the cache directory | `~/.cache` |
| `NO_COLOR`, `TERM=dumb` | plain text on the terminal | |
| `HF_HUB_OFFLINE`, `HF_HOME` | of Hugging Face's packages: no network; their cache | |

It sets these itself where it starts the packages that read them, so that none of them calls home: {set_by_nufed}.

## Extras
`pip install "nufed[NAME]"`, from a checkout `pip install ".[NAME]"`; `all` is all of them but those for
development. Without an extra nufed trains and reports; what needs one says how to install it.

| extra | packages | for |
|---|---|---|
{extras}

## Limits
| what | limit |
|---|---|
| Python | 3.11 or newer |
| torch | 2.10 or newer; tested with {torch} on the CPU of Linux. CUDA, XPU and MPS run the same code, which was tried on a test device, not on theirs |
| systems | tested on Linux. macOS and Windows start worker processes in another way that is tested; a federation's server needs Linux |
| agents of a simulation | bound by time, not memory: a million take no more than a hundred ([phones](../phones.md)) |
| a model | one flat vector; its trained parameters must fit in memory a few times ([pretrained models](../pretrained.md) have few) |
| modules | trainable floating-point parameters of one dtype; BatchNorm only as you say (`model.running_stats`) |
| a data file | {limit:,} bytes of contents (`NUFED_DATA_LIMIT`) |
| secure aggregation | sites that are known before the run; uniform mean; at most one attempt per round and set of sites |
| Flower | {flower} exactly |
"""


def environment() -> str:
    from nufed.flower import SETTINGS
    from nufed.lab.readers.files import MOST_BYTES

    text = (DOCS.parent / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]
    pins = (DOCS.parent / "constraints.txt").read_text("utf-8")
    lines = []
    for name, packages in project["optional-dependencies"].items():
        why = re.search(rf"^{name} = .*#\s*(.*)$", text, re.MULTILINE)
        listed = ", ".join(f"`{package}`" for package in packages)
        about = EXTRAS.get(name) or (why[1] if why else "")
        lines.append(f"| `{name}` | {listed if name not in ('dev', 'all') else '…'} | {about} |")
    flower = next(p for p in project["optional-dependencies"]["flower"] if p.startswith("flwr"))
    return ENVIRONMENT.format(
        limit=MOST_BYTES,
        set_by_nufed=", ".join(f"`{name}={value}`" for name, value in SETTINGS.items()),
        extras="\n".join(lines),
        torch=re.search(r"^torch==(.*)$", pins, re.MULTILINE)[1],
        flower=flower.partition("==")[2],
    )


EXTRAS = {
    "flower": "federations on Flower",
    "tensorboard": "event files for TensorBoard",
    "mlflow": "a tracking store of MLflow",
    "wandb": "runs of Weights & Biases, offline",
    "onnx": "`nufed export --to onnx`",
    "docs": "this site",
    "dev": "development: all but Ray, and the tools of `make test`",
    "all": "everything that users need",
}


def python() -> str:
    """The public names, by what they are for; autodoc fills them in."""
    listed = {name for _, names in PYTHON for name in names.split()}
    if listed != set(nufed.__all__):
        raise ValueError(f"listed or public, not both: {sorted(listed ^ set(nufed.__all__))}")
    parts = [
        "# Python API",
        "What `import nufed` gives; everything else may change between versions "
        "([what is stable](../../CHANGELOG.md#what-is-stable)). Names are imported when they are first used.",
    ]
    for title, names in PYTHON:
        parts.append(f"## {title}")
        parts += [directive(name) for name in names.split()]
    return "\n\n".join(parts) + "\n"


PYTHON = [
    ("Runs", "run resume load_run Run Observer Event"),
    ("Sweeps and searches", "sweep resume_sweep load_sweep Sweep tune Tuning"),
    ("Data", "Samples Split Federation from_datasets"),
    ("Bundles", "load_bundle Bundle load_adapted make_bundle make_personal"),
    (
        "Building blocks",
        "Objective Batch adapt trajectory MetaBatch meta_gradient meta_gradient_with_rates Exact "
        "FirstOrder HessianFree",
    ),
    ("Algorithms", "gmeta per_fedavg fedavg GMeta"),
    ("Errors", "NufedError InputError NumericalWarning"),
]


def directive(name: str) -> str:
    thing = getattr(nufed, name)
    kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else "data"
    members = "\n   :members:" if kind == "class" and name != "Batch" else ""
    return f"### `nufed.{name}`\n```{{eval-rst}}\n.. auto{kind}:: nufed.{name}{members}\n```"


def pages() -> dict[str, str]:
    """The pages by name."""
    return {
        "configuration": configuration(),
        "commands": commands(),
        "python": python(),
        "files": files(),
        "environment": environment(),
    }


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / f"{name}.md").write_text(text, "utf-8")
