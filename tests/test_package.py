"""The wheel: what it holds, and that it does not need this checkout."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import nufed

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def test_a_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"nufed-{nufed.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    here = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/nufed").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= names
    assert {name.split("/")[0] for name in names - here} == {f"nufed-{nufed.__version__}.dist-info"}
    assert {
        "nufed/py.typed",
        "nufed/__main__.py",
        "nufed/lab/config/presets/quickstart.toml",
    } <= names


def test_a_wheel_runs_as_a_module(wheel, tmp_path):
    """From the wheel alone, with the packages that are installed here."""
    env = os.environ | {"PYTHONPATH": str(wheel)}
    for words in (["--version"], ["list", "presets"]):
        done = subprocess.run(
            [sys.executable, "-m", "nufed", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout


def test_the_source_distribution_can_build_it(tmp_path):
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert "src/nufed/__init__.py" in names and "tests/test_package.py" in names
    assert not any(name.startswith((".venv", "docs/_build", "runs/")) for name in names)


def test_all_is_every_extra_of_users():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    (listed,) = extras["all"]
    named = re.fullmatch(r"nufed\[(.*)\]", listed)[1].split(",")
    assert sorted(named) == sorted(set(extras) - {"all", "dev", "docs"})


def test_lower_ends_are_those_of_the_ranges():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/lowest.py"], capture_output=True, text=True, check=True
    )
    lines = dict(line.split("==") for line in done.stdout.splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {re.split("[>=]", name)[0] for name in project["dependencies"]} == set(lines)
    assert lines["torch"] in (ROOT / "constraints.txt").read_text("utf-8")
