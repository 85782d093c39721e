"""Names, paths, links and commands in the documents exist, and scripts in them run."""

import ast
import gzip
import re
import tomllib
from functools import cache
from pathlib import Path
from pydoc import locate

import numpy as np
import pytest
import torch
import typer.main

from nufed import Samples
from nufed.algorithms import ALGORITHMS
from nufed.algorithms.aggregation import AGGREGATIONS
from nufed.data import PARTITIONS
from nufed.lab.cli.commands import app
from nufed.lab.config.describe import known_settings
from nufed.lab.config.load import known_fields
from nufed.lab.readers.sources import SOURCES, mnist_writers, omniglot

ROOT = Path(__file__).parent.parent
BASES = ["", "src", "src/nufed", "tests"]  # paths may be written from any of these
PACKAGES = {path.stem for path in (ROOT / "src/nufed").iterdir()}
GROUPS = {known.group for known in (ALGORITHMS, AGGREGATIONS, PARTITIONS)}  # of entry points
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()} | PACKAGES | {"nufed"}
MADE_UP = {  # files that a reader makes
    "algorithms/yours.py",
    "tests/algorithms/test_yours.py",
    "app.py",
    "mine.py",
    "my_data.py",
}
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def text_of(page):
    """A page; of the changelog only the unreleased part, which describes this state."""
    text = (ROOT / page).read_text("utf-8")
    return text.split("\n## ")[1] if page == "CHANGELOG.md" else text


def missing_paths(text):
    """Missing files and folders that a text names, relative to the root or a package.

    A bare file name is looked for in the folders that the same line or table row names, too.
    """
    for line in text.splitlines():
        names = re.findall(r"`([\w.*/-]+)`", line)
        names += re.findall(
            r"(?<![\w./-])((?:src|tests|docs|examples|benchmarks)/[\w./*-]*\w)", line
        )
        folders = [name for name in names if name.endswith("/")]
        folders += [f"{Path(name).parent}" for name in names if "/" in name]
        for name in set(names) - MADE_UP:
            first, slash, _ = name.partition("/")
            if re.match(r"runs/\w+(-\w+)*(/|$)", name) and not name.endswith((".py", ".toml")):
                continue  # a run directory of the reader's
            if (slash and first in TOP) or name.endswith((".py", ".j2")):
                places = [ROOT / base / folder for base in BASES for folder in ("", *folders)]
                if not any(any(place.glob(name)) for place in places):
                    yield name


def missing_tests(text):
    """``file::test`` whose file has no such test."""
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        if f"def {test}(" not in (ROOT / file).read_text("utf-8"):
            yield f"{file}::{test}"


def missing_names(text):
    """Dotted names of nufed, in backticks or in Python, that can't be imported.

    What is called must be callable. ``data.agents`` may be a key of a configuration instead, and
    ``nufed.partitions`` is a group of entry points.
    """
    python = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for piece in (*re.findall(r"`([^`\n]+)`", text), *python):
        for name, called in re.findall(r"(?<![\w./:-])([a-z_]\w*(?:\.\w+)+)(\()?", piece):
            first = name.partition(".")[0]
            if first != "nufed":  # in Python a variable
                if first not in PACKAGES or piece in python or is_key(name) or is_file(name):
                    continue
                name = f"nufed.{name}"
            if name in GROUPS:
                continue
            found = locate(name)
            if found is None or (called and not callable(found)):
                yield name


def is_key(name):
    """Whether a configuration has this key, or a table of free keys above it."""
    keys = [key for key, _ in known_fields()]
    tables = {key for key in keys for other in keys if other.startswith(f"{key}.")}
    return name in keys or any(name.startswith(f"{key}.") for key in set(keys) - tables)


def is_file(name):
    return name.endswith((".json", ".toml", ".md", ".py", ".txt", ".html", ".safetensors"))


def missing_imports(text):
    """Imports of nufed in the Python of a page that would fail."""
    for script in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for node in ast.walk(ast.parse(script)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "nufed":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name for name in names if locate(name) is None)


def missing_links(page, text):
    """Links to files that don't exist, and to headings that no page has."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield target


@cache
def anchors(path):
    """The names that GitHub gives to the headings of a page."""
    plain = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def missing_commands(text):
    """Commands of nufed, and targets of make, that don't exist."""
    top = typer.main.get_command(app)
    for words in re.findall(r"(?:^|`|\$ )nufed ((?:[a-z-]+ ?)+)", text, re.MULTILINE):
        group = top
        for word in words.split():
            if group is None or not hasattr(group, "commands"):
                break
            if word not in group.commands:
                yield f"nufed {words}"
            group = group.commands.get(word)
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE):
        if target not in make_targets() and not target.startswith("paper-"):
            yield f"make {target}"


@cache
def make_targets():
    text = (ROOT / "Makefile").read_text()
    return re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()


def missing_keys(text):
    """Keys of a configuration's tables, in backticks, that it does not have."""
    tables = "method|model|faults|compression|federation|privacy|tune"
    for piece in re.findall(r"`([^`\n]+)`", text):
        for key in re.findall(rf"(?<![\w./\-\[])((?:{tables})\.[a-z_.]+\w)(?=$|[\s=,])", piece):
            if (
                not is_key(key)
                and not is_file(key)
                and key.removeprefix("method.") not in known_settings()
            ):
                yield key


def missing(page, text):
    return {
        *missing_keys(text),
        *missing_paths(text),
        *missing_tests(text),
        *missing_names(text),
        *missing_imports(text),
        *missing_links(page, text),
        *missing_commands(text),
    }


def test_the_changelog_names_every_algorithm():  # that every page is in the site: test_site.py
    changelog = text_of("CHANGELOG.md")
    assert [name for name in ALGORITHMS if f"`{name}`" not in changelog] == []


def test_algorithms_are_mapped_to_their_code_and_test():
    for name in ("gmeta", "scaffold", "ditto"):
        for path in (f"src/nufed/algorithms/{name}.py", f"tests/algorithms/test_{name}.py"):
            assert f"`{path}`" in text_of("docs/paper.md")


@pytest.mark.parametrize("page", PAGES)
def test_what_documents_name_exists(page):
    assert missing(page, text_of(page)) == set()


def test_all_pages_are_read():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/privacy.md"} <= set(PAGES)


@pytest.mark.parametrize(
    "text",
    [
        "`src/nufed/nowhere.py`",
        "`nufed/nowhere.py`",
        "`simulation/nowhere.py`",
        "`nowhere.py`",
        "in `lab/bundle/`: the file in `nowhere.py`",
        "`nowhere.md.j2`",
        "`lab/config/presets/nowhere*.toml`",
        "`paper/nowhere.py`",
        "tests/nowhere",
        "`tests/test_docs.py::test_nothing`",
        "`nufed.nowhere`",
        "`nufed.meta.nowhere(w)`",
        "`simulation.loop.nowhere`",
        "`data.nowhere`",
        "```python\nw = nufed.meta.fine_tuning(w)\n```",
        "```python\nfrom nufed.data import Nothing\n```",
        "[page](docs/nowhere.md)",
        "[page](README.md#nowhere)",
        "[below](#nowhere)",
        "`nufed nowhere`",
        "`privacy.nowhere = 1`",
        "`nufed run quickstart method.nowhere=1`",
        "```\nnufed data nowhere\n```",
        "`make nowhere`",
    ],
)
def test_what_does_not_exist_is_found(text):
    assert len(missing("README.md", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`src/nufed/lab/files.py` `lab/files.py` `files.py` `tests/support.py`",
        "in `lab/bundle/`: the file in `adapting.py`",
        "`lab/config/presets/fig*.toml` `paper/stages.py` `paper/` `results.json`",
        "`tests/test_docs.py::test_all_pages_are_read`",
        "`nufed.meta.curvature` `nufed.run(data=…)` `seeding.stream(seed)` `data.agents`",
        "`nufed.partitions`",
        "`method.adapt_lr` `nufed run fig1 faults.dropout=0.1 model.args.hidden=[8]`",
        "`runs/mine` `runs/quickstart-001/report.html` `nufed data get cifar10` `make test`",
        "[page](CONTRIBUTING.md#add-an-algorithm) [below](#start)",
    ],
)
def test_what_exists_is_found(text):
    assert missing("README.md", text) == set()


def test_the_script_that_makes_mnist_by_writer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = np.arange(3 * 784).reshape(3, 28, 28) % 256
    labels = np.array([[7, 0, 300, 5], [2, 1, 300, 6], [1, 4, 2599, 7], [9, 9, 9, 9]])
    for part, images in (("train", "train"), ("test", "t10k")):
        write_idx(f"{images}-images-idx3-ubyte.gz", digits, ">u1")
        write_idx(f"qmnist-{part}-labels-idx2-int.gz", labels, ">i4")
    exec(python_of("docs/data.md")[0], {})
    monkeypatch.setenv("NUFED_DATA", str(tmp_path))
    samples = mnist_writers()
    assert samples.targets.tolist() == [7, 2, 1]
    assert samples.owners.tolist() == ["train-300", "train-300", "train-2599"]
    assert (samples.inputs.numpy() == digits).all()


def test_the_script_that_makes_omniglot(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    drawings = np.random.default_rng(0).random((10, 105, 105)) < 0.9  # ink is False
    for number, drawing in enumerate(drawings):
        part, name = ("background", "Greek") if number < 6 else ("evaluation", "Keble")
        folder = tmp_path / f"images_{part}/{name}/character{1 + number // 2:02}"
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(drawing).save(folder / f"0394_{1 + number % 2:02}.png")
    exec(python_of("docs/data.md")[1], {})
    monkeypatch.setenv("NUFED_DATA", str(tmp_path))
    samples = omniglot(ways=2)
    assert set(samples.owners) == {"Greek-0", "Keble-0"} and samples.unseen_owners == ("Keble-0",)
    assert samples.targets.bincount().tolist() == [4] * 2
    means = samples.inputs.float().mean(dim=(1, 2))
    assert (means - 25.5).abs().max() < 3  # a tenth is ink


def test_the_shares_of_rows_that_agents_share(monkeypatch, capsys):
    """The table of docs/data.md is what its script prints, for labels as CIFAR-10 has them."""
    labels = torch.arange(10).repeat(5000)
    cifar10 = Samples(torch.zeros(len(labels), 1), labels, tuple("0123456789"))
    monkeypatch.setitem(SOURCES, "cifar10", lambda: cifar10)
    exec(python_of("docs/data.md")[2], {})
    page = (ROOT / "docs/data.md").read_text()
    listed = re.findall(r"^\| (?:train|test).* \| .* \| (\d+ % .*) \|$", page, re.MULTILINE)
    assert len(listed) == 5 and capsys.readouterr().out.splitlines() == listed


def python_of(page):
    """The Python scripts on a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def write_idx(file, array, number):
    """The idx format: two zeros, the type's code, dimensions, sizes, numbers (all big-endian)."""
    head = bytes([0, 0, {">u1": 8, ">i4": 12}[number], array.ndim])
    sizes = np.array(array.shape, ">i4").tobytes()
    Path(file).write_bytes(gzip.compress(head + sizes + array.astype(number).tobytes()))


def test_every_make_target_is_phony_and_real():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert set(phony) >= {"run", "test", "test-slow", "bench", "format", "clean"}
    assert all(re.search(rf"^{target}:", text, re.MULTILINE) for target in phony)
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"\bmake ([a-z-]+)`", readme)) <= set(phony)


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {re.split(r"[>=<\[]", name)[0].lower() for name in wanted} - {"nufed"} <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
