"""Tables in a federation: hospitals count, the configuration prepares, sites load raw columns."""

import csv
import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

import nufed as library
from flower.app.in_memory import MemoryGrid
from flower.ops.small_app import files_of
from nufed import InputError, load_bundle, load_run
from nufed.flower import App
from nufed.lab.config import load_config
from nufed.lab.config.tallies import as_toml, read_tally
from nufed.lab.readers.sources import SOURCES

EXAMPLE = Path(__file__).parents[3] / "examples/hospitals"
CATEGORICAL = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")
TRAINING = ("cleveland", None, "long-beach", "switzerland")  # the second is new


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example's files and those of its hospitals, in a folder."""
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("write_files", "my_data"):
        sys.modules.pop(module, None)
    runpy.run_path(str(tmp_path / "write_files.py"))["write_files"](tmp_path)
    yield tmp_path
    for module in ("write_files", "my_data"):
        sys.modules.pop(module, None)


def tally(nufed, folder, site, *more):
    options = [word for name in CATEGORICAL for word in ("--categorical", name)]
    given = ("--site", site, "--label", "disease", "--out", f"tally-{site}.json", *options, *more)
    return nufed("data", "tally", "federation.toml", f"{TRAINING[site]}.csv", *given, cwd=folder)


def test_the_hospitals_tallies_give_the_examples_configuration(example, nufed):
    sites = [site for site, name in enumerate(TRAINING) if name]
    for site in sites:
        assert tally(nufed, example, site).returncode == 0
    text = (example / "tally-3.json").read_text()
    assert json.loads(text)["tally of site"] == 3 and read_tally(example / "tally-3.json")[0] == 3
    files = [f"tally-{site}.json" for site in sites]
    said = nufed("data", "prepare", "federation.toml", *files, cwd=example)
    assert said.returncode == 0 and "become 35 inputs" in said.stderr
    assert said.stdout == as_toml(load_config(example / "federation.toml").data.prepare.given)
    assert (example / "federation.toml").read_text().endswith(said.stdout)
    for wrong, sentence in (
        (files[:2], "the tallies of sites 3 are not given"),
        ([*files, files[0]], "a second tally of site 0"),
        (["cleveland.csv"], "cleveland.csv is not the tally of a site"),
        (["nowhere.json"], "nowhere.json can't be read"),
    ):
        refused = nufed("data", "prepare", "federation.toml", *wrong, cwd=example)
        assert refused.returncode and sentence in refused.stderr
    (example / "tally-1.json").write_text(text.replace('"tally of site": 3', '"tally of site": 1'))
    refused = nufed("data", "prepare", "federation.toml", *files, "tally-1.json", cwd=example)
    assert "site 1, which does not take part in training" in refused.stderr
    (example / "tally-3.json").write_text(text.replace('"present": 61', '"present": "61"', 1))
    refused = nufed("data", "prepare", "federation.toml", *files, cwd=example)
    assert "present of a column is '61', not int" in refused.stderr


def federate(folder, out, **config):
    """The example's app, its sites in this process, each with its own file."""
    load = runpy.run_path(str(folder / "my_data.py"))["load"]
    names = ("cleveland", "hungary", "long-beach", "switzerland")
    app = App(
        folder / "federation.toml",
        lambda site: load({**site, "data": folder / f"{names[site['partition-id']]}.csv"}),
        **config,
    )
    grid = MemoryGrid(app.site, range(4), folder / "sites", lambda agent, message, reply: reply)
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(out)}))


def test_a_federation_of_tables_leaves_the_files_of_the_simulation(example):
    toml = example / "federation.toml"
    text = toml.read_text().replace("wait = 120", "wait = 0.01\ndeadline = 0.01")
    toml.write_text(text.replace("rounds = 10", "rounds = 2"))
    federate(example, example / "run")
    head, _, rest = toml.read_text().partition("[federation]")
    (example / "simulated.toml").write_text(head + rest[rest.index("[[data") :])
    heart = SOURCES["heart"]()
    numbers = np.unique(heart.owners, return_inverse=True)[1].astype(str)
    given = {"data": replace(heart, owners=numbers), "out": example / "sim"}
    changes = ["engine=direct", "workers=1", "max_update_norm=100.0"]  # as in federations
    library.run(example / "simulated.toml", changes, **given)
    run, simulated = files_of(example / "run"), files_of(example / "sim")
    assert run == simulated
    loaded = load_run(example / "run")
    about = load_bundle(example / "run/bundles/gmeta.nufed").about
    assert about.preparation == loaded.preparation(0) and about.inputs.shape == [35]
    with (example / "hungary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(about.read_inputs({name: [r[name] for r in rows] for name in rows[0]})) == 294


def test_a_preparation_and_a_table_belong_together(example):
    toml = example / "federation.toml"
    app = App(toml, None)
    assert app.plan().like.input_shape == (35,)
    text = toml.read_text()
    toml.write_text(text.replace("[federation]", "[federation]\ninput_shape = [13]"))
    with pytest.raises(InputError, match=r"input_shape = \[13\]: data.prepare.columns make 35"):
        App(toml, None).plan()
    toml.write_text(text[: text.index("[[data")])
    with pytest.raises(InputError, match=r"federation.input_shape = None"):
        App(toml, None).plan()


def test_the_example_adapts_to_the_fourth_hospital(example, monkeypatch, capsys):
    monkeypatch.chdir(example)
    text = (example / "hospitals.py").read_text()
    (example / "quick.py").write_text(text.replace('["seeds=[0]"]', '["seeds=[0]", "rounds=5"]'))
    runpy.run_path(str(example / "quick.py"))
    said = capsys.readouterr().out
    assert "become 35 inputs" in said and said.count("% right") == 2
    assert SOURCES["heart"]().unseen_owners == ()
