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

sys.path.insert(0, str(Path(__file__).parent))
from formulas import with_formulas

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE = DOCS / "algorithms.md"
PAGES = DOCS / "algorithms"
RUNS_CHECKS = {"proof", "a_wrong_copy_is_rejected"}  # tests that run the checks
CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # between words of a name
HEADING = "## Those that are here\n"
README = ROOT / "README.md"
BEGIN, END = "<!-- begin: methods -->\n", "<!-- end: methods -->"
ARXIV = "https://arxiv.org/abs/"
SCALEFL = (
    "https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_"
    "Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html"
)
FAMILIES = {  # every method with the paper that it comes from
    "Meta-learning: a model that is meant to be fine-tuned": {
        "gmeta": "Jamali, Saber, Bae: A Generalized Meta Federated Learning Framework",
        "per_fedavg": "2002.07948",
        "anil": "1909.09157",
        "reptile": "1803.02999",
        "fedl2p": "2310.02420",
    },
    "One global model: averaging, and less drift of local steps": {
        "fedavg": "1602.05629",
        "fedprox": "1812.06127",
        "scaffold": "1910.06378",
        "feddyn": "2111.04263",
        "fednova": "2007.07481",
        "moon": "2103.16257",
    },
    "One global model: an optimiser at the server": {
        "fedavgm": "1909.06335",
        "fedadagrad": "2003.00295",
        "fedadam": "2003.00295",
        "fedyogi": "2003.00295",
    },
    "A personal model beside the global one": {
        "ditto": "2012.04221",
        "pfedme": "2006.08848",
        "apfl": "2003.13461",
        "fedala": "2212.01197",
        "feddbe": "2311.14975",
    },
    "A part of the model stays with the agent": {
        "fedper": "1912.00818",
        "fedrep": "2102.07078",
        "fedbabu": "2106.06042",
        "lg_fedavg": "2001.01523",
        "fedbn": "2102.07623",
        "fedrod": "2107.00778",
        "fedsa_lora": "2410.01463",
        "fedpac": "2306.11867",
    },
    "Models of similar agents": {
        "fedamp": "2007.03797",
        "fedfomo": "2012.08565",
        "ifca": "2006.04088",
        "fedem": "2108.10252",
    },
    "Prototypes and neighbours": {"fedproto": "2105.00243", "knn_per": "2111.09360"},
    "Agents of different capacity": {"scalefl": SCALEFL},
}
NEEDS = {  # what a minimal configuration of a method has beside its table
    "fedbn": '[model]\nname = "package.module:function"  # a model with normalisation layers\n'
    'running_stats = "tracked"\n\n',
    "fedsa_lora": '[model]\nname = "hf:FOLDER"\ntrain = "lora"\n\n',
    "scalefl": '[model]\nname = "multi_exit"\nargs = { hidden = [64, 64] }\n\n',
}
COSTS = {  # of methods whose rounds do not cost τ gradients; a test compares them with runs
    "gmeta": "(ν + 1)·τ gradients, ν·τ Hessian-vector products",
    "per_fedavg": "2·τ gradients, τ Hessian-vector products",
    "anil": "(ν + 1)·τ gradients, ν·τ Hessian-vector products",
    "fedl2p": "τ gradients in the first phase; then τ hypergradients",
    "pfedme": "K·τ gradients",
    "apfl": "2·τ gradients",
    "ditto": "τ + τ_v gradients",
    "fedala": "τ gradients, and those of W in passes over a share of the samples",
    "fedrep": "τ_h + τ gradients",
    "fedrod": "2·τ gradients",
    "fedpac": "τ_h + τ gradients",
    "fedem": "k·τ gradients",
}
MISTAKES = "Known mistakes elsewhere:"  # begins the last paragraph of a docstring
TWINS = {"gmeta": "adapt_steps = 3\n"}  # settings without which a method is another one


def tables() -> str:
    """What stands below the heading of docs/algorithms.md."""
    names = list(ALGORITHMS)
    listed = {name for family in FAMILIES.values() for name in family}
    families = FAMILIES | {"Others": {name: "" for name in names if name not in listed}}
    lines = []
    for family, papers in families.items():
        if papers:
            lines += [f"### {family}", "| method | what it is | a newcomer | agents keep |"]
            lines += ["|---|---|---|---|"]
        for name in papers:
            title, facts = title_of(name)
            link = f"[`{name}`](algorithms/{name}.md)"
            lines.append(f"| {link} | {title} | {facts['a newcomer']} | {facts['agents keep']} |")
        lines.append("")
    lines += [
        "### Settings of all",
        "Settings of all algorithms with local steps; each page lists those of its own. *Tuned*: "
        "the range that [`nufed tune`](tuning.md) searches by default.",
        "",
    ]
    lines += ["| setting | meaning | allowed | default | tuned |", "|---|---|---|---|---|"]
    lines += [*rows_of(LocalTraining), "", "```{toctree}", ":hidden:", ""]
    lines += [f"algorithms/{name}" for papers in families.values() for name in papers]
    return "\n".join([*lines, "```"]) + "\n"


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
    """Definition, what travels and is kept, settings, proofs and known mistakes of one method."""
    cls = ALGORITHMS[name]
    title, facts = title_of(name)
    source = Path(inspect.getfile(cls)).relative_to(ROOT)
    modules = [cls.__module__]
    if type(cls().server_optimizer) is not Plain:  # FedOpt: what it is is said there
        modules.append(Plain.__module__)
    texts = [plain(sys.modules[each].__doc__) for each in modules]
    parts = [text.partition(MISTAKES) for text in texts]
    own, _, own_mistakes = plain(cls.__doc__).partition("\n\n")[2].partition(MISTAKES)
    if "    " in own and "Args:" not in own:  # a special case, defined in the class
        definition = own
    else:
        definition = "\n\n".join(part[0].strip() for part in parts)
    if definition.startswith(f"{heading_of(name)}:"):  # the title again
        definition = definition.partition("\n\n")[2]
    listed = [own_mistakes] if own_mistakes else [part[2] for part in parts if part[2]]
    mistakes = "\n\n".join(map(str.strip, listed))
    lines = [f"# {heading_of(name)}", "", title, ""]
    lines += ["## At a glance", "| | |", "|---|---|", f"| name | `{name}` |"]
    lines += [f"| paper | {paper_of(name)} |"] if paper_of(name) else []
    lines += [f"| code | [{source.name}](../../{source}) |"]
    lines += [f"| {key} | {value} |" for key, value in facts_of(name, cls, facts).items()]
    lines += ["", "```toml", f"{NEEDS.get(name, '')}[methods.{name}]\n{TWINS.get(name, '')}```", ""]
    lines += ["## Definition", with_formulas(definition.strip()), ""]
    own_rows = rows_of(cls, without=LocalTraining)
    if own_rows:
        lines += ["## Settings", "| key | meaning | allowed | default | tuned |"]
        lines += ["|---|---|---|---|---|", *own_rows, ""]
    if issubclass(cls, LocalTraining):
        also = "And the" if own_rows else "## Settings\nThe"
        lines += [f"{also} [settings of local steps and of the server](../algorithms.md)."]
    tests = tests_of(cls)
    lines += ["", "## Proofs", f"In [{tests.name}](../../{tests.relative_to(ROOT)}):", ""]
    lines += [f"- {proof}" for proof in proofs(tests)]
    if wrong := wrong_copies(tests, cls):
        lines += ["", f"Wrong implementations that these reject: {', '.join(wrong)}."]
    lines += [
        "",
        "The [conformance suite](../../tests/conformance/test_algorithms.py) runs it on every "
        "engine, with one and two workers, resumed, with rejected updates, and on Flower.",
    ]
    if mistakes:
        lines += ["", "## Known mistakes elsewhere", mistakes.strip()]
    return "\n".join(lines) + "\n"


def heading_of(name: str) -> str:
    """The method's name as its docstring writes it."""
    first, colon, _ = title_of(name)[0].partition(":")
    return first if colon else {"gmeta": "gMeta"}.get(name, name)


def paper_of(name: str) -> str:
    """A link to the paper of a method."""
    reference = next((papers[name] for papers in FAMILIES.values() if name in papers), "")
    if reference.startswith("http"):
        return f"[CVPR 2023]({reference})"
    if re.fullmatch(r"[\d.]+", reference):
        return f"[arXiv:{reference}]({ARXIV}{reference})"
    return reference


def facts_of(name: str, cls: type[Algorithm], facts: dict[str, str]) -> dict[str, str]:
    """What `nufed list` says, what travels in a round, and what it costs an agent."""
    algorithm = cls()
    down = ", ".join(algorithm.receives) or "nothing shared"
    if cls.downlink is not Algorithm.downlink:
        down += "; and vectors of the agent's own"
    return facts | {
        "travels down": down,
        "travels up": ", ".join(algorithm.sends),
        "a round costs an agent": COSTS.get(name, "τ gradients"),
    }


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
    """The wrong implementations of an algorithm that the checks of a file reject, in words."""
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
    """The wrong implementation that an entry names: itself, or the one beside a check's name."""
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
    written = pages()
    for old in PAGES.glob("*.md"):
        old.unlink()
    for name, text in written.items():
        (PAGES / f"{name}.md").write_text(text, "utf-8")
    write_catalogue()
