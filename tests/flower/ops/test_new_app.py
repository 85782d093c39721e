"""The app of `nufed federate new`, of the docs page and of the example."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from flower.app.in_memory import MemoryGrid
from nufed.errors import InputError
from nufed.flower.app.check import load_app
from nufed.flower.ops.local import new_app
from nufed.lab.runs import load_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def imported(monkeypatch):
    """Restores modules and paths: apps are imported as `app` and `my_data`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ("app", "my_data")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def train(app, folder, data=lambda number: ""):
    grid = MemoryGrid(app.site, (), folder / "sites")
    for number in range(app.checked.data.agents):
        grid.add(number, data=str(data(number)), name=f"site {number}")
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(folder / "run")}))
    return load_run(folder / "run")


@pytest.mark.parametrize("where", ["as it is written", "as the page shows it"])
def test_a_new_app_trains_on_the_files_that_its_sites_name(tmp_path, imported, where):
    new_app(tmp_path / "app")
    if where == "as the page shows it":
        page = (ROOT / "docs" / "deployment.md").read_text()
        for language, name in (("python", "my_data.py"), ("toml", "federation.toml")):
            block = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)[1]
            (tmp_path / "app" / name).write_text(block)
    rng = np.random.default_rng(0)
    for number in range(4):
        inputs = rng.normal(size=(40, 64))
        np.savez(tmp_path / f"{number}.npz", inputs=inputs, targets=inputs[:, 0] > 0)
    app = load_app(tmp_path / "app")
    run = train(app, tmp_path, lambda number: tmp_path / f"{number}.npz")
    assert [s.name for s in run.methods["gmeta"][0].scores] == [f"site {i}" for i in range(4)]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_flower_takes_a_new_app_with_all_its_files(tmp_path):
    new_app(tmp_path / "app")
    load_and_validate(tmp_path / "app" / "pyproject.toml")  # raises what is wrong with it
    fab = build_fab_from_disk(tmp_path / "app")
    for name in ("app.py", "my_data.py", "federation.toml"):
        assert name.encode() in fab


def test_nothing_is_overwritten(tmp_path):
    new_app(tmp_path)
    with pytest.raises(InputError, match="exists and is not empty"):
        new_app(tmp_path)


def test_the_example_is_such_an_app_and_fine_tuning_helps_its_sites(tmp_path, imported):
    new_app(tmp_path / "new")
    example = ROOT / "examples" / "federation"
    for name in ("app.py", "pyproject.toml"):
        assert (example / name).read_text() == (tmp_path / "new" / name).read_text()
    run = train(load_app(example), tmp_path)
    scores = run.methods["gmeta"][0].scores
    assert len(scores) == 4
    assert np.mean([s.score[-1] - s.score[0] for s in scores]) > 0
