"""Writes what docs and `nufed list` say about algorithms from their docstrings, fields and tests.

The tables at the end of docs/algorithms.md, a page for each method in docs/algorithms/, the list in
README.md, and the table of names in src/nufed/lab/cli/catalogue.json. Run it from anywhere:
`python docs/describe_algorithms.py`.
"""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path

from nufed.algorithms import ALGORITHMS, Algorithm, LocalTraining
from nufed.algorithms.server_optimizer import Plain
from nufed.lab.cli.catalogue import write_catalogue
from nufed.lab.cli.listing import about
from nufed.lab.config.describe import described

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE = DOCS / "algorithms.md"
PAGES = DOCS / "algorithms"
RUNS_CHECKS = {"proof", "a_wrong_copy_is_rejected"}  # tests that run the checks
CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # between words of a name
HEADING = "## Those that are here\n"
README = ROOT / "README.md"
BEGIN, END = "<!-- begin: methods -->\n", "<!-- end: methods -->"


def tables() -> str:
    """What stands below the heading of docs/algorithms.md."""
    lines = ["| algorithm | what it is | a newcomer | agents keep |", "|---|---|---|---|"]
    for name in ALGORITHMS:
        title, facts = title_of(name)
        link = f"[`{name}`](algorithms/{name}.md)"
        lines.append(f"| {link} | {title} | {facts['a newcomer']} | {facts['agents keep']} |")
    lines += [
        "",
        "Settings of all algorithms with local steps; each page lists those of its own. *Tuned*: "
        "the range that [`nufed tune`](tuning.md) searches by default.",
        "",
    ]
    lines += ["| setting | meaning | allowed | default | tuned |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *rows_of(LocalTraining)]) + "\n"


def rows_of(cls: type[Algorithm], without: type[Algorithm] | None = None) -> list[str]:
    """The settings of a class as rows of a table, without those of another."""
    known = described(without) if without else []
    return [f"| {' | '.join((f'`{s.key}`', *s[1:]))} |" for s in described(cls) if s not in known]


def readme() -> str:
    """README.md with the names of all methods, as their docstrings write them."""
    names = [title_of(name)[0].partition(":") for name in ALGORITHMS]
    *others, last = [name for name, colon, _ in names if colon]
    text = textwrap.fill(f"{', '.join(others)} and {last}.", width=120, break_on_hyphens=False)
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{text}\n{END}{rest.partition(END)[2]}"


def title_of(name: str) -> tuple[str, dict[str, str]]:
    """The first line of an algorithm's docstring, and what `nufed list` says about it."""
    (title, facts), *_ = about(name).items()
    return title.removeprefix(f"{name}: "), facts


def pages() -> dict[str, str]:
    """The pages of all methods by name."""
    return {name: page_of(name) for name in ALGORITHMS}


def page_of(name: str) -> str:
    """Definition, what is kept where, settings, proofs and known mistakes of one method."""
    cls = ALGORITHMS[name]
    title, facts = title_of(name)
    source = Path(inspect.getfile(cls)).relative_to(ROOT)
    modules = [cls.__module__]
    if type(cls().server_optimizer) is not Plain:  # FedOpt: what it is is said there
        modules.append(Plain.__module__)
    texts = [plain(sys.modules[each].__doc__) for each in modules]
    parts = [text.partition("Known mistakes elsewhere:") for text in texts]
    definition = "\n\n".join(part[0].strip() for part in parts)
    mistakes = "\n\n".join(part[2].strip() for part in parts if part[2])
    lines = [f"# {name}", "", title, "", f"Code: [{source.name}](../../{source}).", ""]
    lines += ["## Definition", definition.strip(), "", "## At a glance", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += [
        "",
        "## Settings",
        "| key | meaning | allowed | default | tuned |",
        "|---|---|---|---|---|",
    ]
    lines += rows_of(cls, without=LocalTraining)
    if issubclass(cls, LocalTraining):
        lines += ["", "And the [settings of local steps and of the server](../algorithms.md)."]
    tests = tests_of(cls)
    lines += ["", "## Proofs", f"In [{tests.name}](../../{tests.relative_to(ROOT)}):", ""]
    lines += [f"- {proof}" for proof in proofs(tests)]
    if wrong := wrong_copies(tests, cls):
        lines += ["", f"Wrong copies that these reject: {', '.join(wrong)}."]
    lines += [
        "",
        "The [conformance suite](../../tests/conformance/test_algorithms.py) runs it on every "
        "engine, with one and two workers, resumed, with rejected updates, and on Flower.",
    ]
    if mistakes:
        lines += ["", "## Known mistakes elsewhere", mistakes.strip()]
    return "\n".join(lines) + "\n"


def tests_of(cls: type[Algorithm]) -> Path:
    """The file of an algorithm's proofs: named after its module, or that of a base."""
    names = [base.__module__.rpartition(".")[2] for base in cls.__mro__]
    files = [ROOT / "tests/algorithms" / f"test_{name}.py" for name in names]
    return next(path for path in files if path.exists())


def proofs(tests: Path) -> list[str]:
    """The checks of a file in words: their names, and the first line of their docstrings."""
    found = []
    for node in ast.parse(tests.read_text("utf-8")).body:
        kind, _, name = (
            node.name.partition("_") if isinstance(node, ast.FunctionDef) else ("", "", "")
        )
        if kind == "check" or (kind == "test" and name not in RUNS_CHECKS | set(ALGORITHMS)):
            first = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
            found.append(name.replace("_", " ") + (f": {first}" if first else ""))
    return found


def wrong_copies(tests: Path, cls: type[Algorithm]) -> list[str]:
    """The deliberately wrong copies of an algorithm that the checks of a file reject, in words."""
    body = ast.parse(tests.read_text("utf-8")).body
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for node in body
        if isinstance(node, ast.ClassDef)
    }
    others = {other.__name__ for other in ALGORITHMS.values()} - {c.__name__ for c in cls.__mro__}
    names: dict[str, None] = {}
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MUTANTS":
            assert isinstance(node.value, ast.Dict | ast.List)  # by copy, or pairs with a check
            listed = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            names |= dict.fromkeys(copy_in(entry) for entry in listed if entry)
    own = [name for name in names if not bases.get(name, set()) & others]
    return [CAPITALS.sub(" ", name).lower().replace("_", " ") for name in own]


def copy_in(entry: ast.expr) -> str:
    """The name of the wrong copy in an entry: itself, or the one beside the name of a check."""
    if isinstance(entry, ast.Tuple):
        first, second, *_ = entry.elts
        return copy_in(second if ast.unparse(first).startswith("check") else first)
    if isinstance(entry, ast.Call):  # of a function that makes one
        return " ".join([ast.unparse(entry.func), *(str(k.arg) for k in entry.keywords)])
    return ast.unparse(entry).strip("'")


def plain(docstring: str | None) -> str:
    """A docstring as Markdown: roles of Sphinx become code."""
    text = inspect.cleandoc(docstring or "").replace("``", "`")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index(HEADING)] + HEADING + tables(), "utf-8")
    README.write_text(readme(), "utf-8")
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (PAGES / f"{name}.md").write_text(text, "utf-8")
    write_catalogue()
