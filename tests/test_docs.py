"""What the documents name exists, and what the README promises is so."""

import gzip
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from nufed import Samples
from nufed.data.sources import SOURCES, mnist_writers

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "page",
    [
        "docs/paper.md",
        "docs/theory.md",
        "docs/performance.md",
        "docs/data.md",
        "docs/tutorial.md",
        "docs/reliability.md",
        "docs/deployment.md",
        "CONTRIBUTING.md",
        "README.md",
    ],
)
def test_files_that_documents_name_exist(page):
    named = re.findall(
        r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", (ROOT / page).read_text()
    )
    linked = re.findall(r"\]\((?!http|#)([\w./-]+)\)", (ROOT / page).read_text())
    assert all((ROOT / name).exists() for name in named), named
    assert all(((ROOT / page).parent / name).exists() for name in linked), linked
    assert named or linked or page in ("CONTRIBUTING.md", "docs/data.md")


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


def test_the_shares_of_rows_that_agents_share(monkeypatch, capsys):
    """The table of docs/data.md is what its script prints, for labels as CIFAR-10 has them."""
    labels = torch.arange(10).repeat(5000)
    cifar10 = Samples(torch.zeros(len(labels), 1), labels, tuple("0123456789"))
    monkeypatch.setitem(SOURCES, "cifar10", lambda: cifar10)
    exec(python_of("docs/data.md")[1], {})
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
