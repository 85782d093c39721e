"""What the documents name exists, and what the README promises is so."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "page",
    ["docs/paper.md", "docs/theory.md", "docs/performance.md", "CONTRIBUTING.md", "README.md"],
)
def test_files_that_documents_name_exist(page):
    named = re.findall(
        r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", (ROOT / page).read_text()
    )
    linked = re.findall(r"\]\((?!http|#)([\w./-]+)\)", (ROOT / page).read_text())
    assert all((ROOT / name).exists() for name in named), named
    assert all(((ROOT / page).parent / name).exists() for name in linked), linked
    assert named or linked or page == "CONTRIBUTING.md"


def test_every_make_target_is_phony_and_real():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert set(phony) >= {"run", "test", "test-slow", "bench", "format", "clean"}
    assert all(re.search(rf"^{target}:", text, re.MULTILINE) for target in phony)
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"\bmake ([a-z-]+)`", readme)) <= set(phony)


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {re.split(r"[>=<\[]", name)[0].lower() for name in wanted} <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
