"""The sources ``table`` and ``heart``, and a table's way from a run to a new site."""

import csv
import hashlib
import json
import re
import runpy
import shutil
import tracemalloc
import warnings
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import nufed as library
from nufed import InputError, load_bundle, load_run
from nufed.data import Preparation, learn_preparation, prepare
from nufed.lab.config import load_config
from nufed.lab.config.problem import Problem
from nufed.lab.files import read_sealed
from nufed.lab.readers.files import LIMIT
from nufed.lab.readers.sources import SOURCES
from nufed.lab.readers.tables import CELL_GROWTH

ROOT = Path(__file__).parents[3]
RAW = ROOT.parent / "shared/data/heart"
TEXT = """age,sex,chol,label,hospital
63,f,233,no,a
?,m,,yes,a
41,m,NA,yes,b
57,,190,no,b
"""


def write(folder, text=TEXT, name="t.csv"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_csv_with_categories_and_missing_values(tmp_path):
    found = SOURCES["table"](write(tmp_path), owner="hospital", leave_out=["chol"])
    assert [column.name for column in found.columns] == ["age", "sex"]
    expected = [[63, 0], [np.nan, 1], [41, 1], [57, np.nan]]
    np.testing.assert_array_equal(found.inputs.numpy(), expected)
    assert found.classes == ("no", "yes") and found.owners.tolist() == ["a", "a", "b", "b"]
    comma = TEXT.replace(",", ";").replace("63", "63,5")
    found = SOURCES["table"](write(tmp_path, comma), owner="hospital", missing=["233"])
    assert found.inputs[0, 0] == 63.5 and found.inputs[:2, 2].isnan().all()


def test_a_parquet_file_gives_the_same(tmp_path):
    rows = list(csv.DictReader(TEXT.splitlines()))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["age"] = [63.0, None, 41.0, 57.0]
    columns["sex"] = pa.array(["f", "m", "m", None]).dictionary_encode()
    columns["chol"] = pa.array([233, None, None, 190], pa.int32())
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    one = SOURCES["table"](write(tmp_path), owner="hospital")
    other = SOURCES["table"](str(tmp_path / "t.parquet"), owner="hospital")
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (TEXT, {"owner": "clinic"}, r"no column 'clinic' \(its first line is 'age', .* 'hospital'"),
        (TEXT, {"leave_out": ["age", "tall"]}, "must be columns of the table, age, sex, chol"),
        (TEXT, {"categorical": "sex"}, r"must be a list of texts, for example \[\"sex\"\]"),
        (TEXT, {"categorical": ["sx"]}, "no column 'sx', the columns are age, .* mean 'sex'"),
        (TEXT.replace("63", "old"), {}, "t.csv can't be used: the column 'age' holds numbers and"),
        (TEXT.replace("sex", "age"), {}, "two columns 'age'"),
        ("label,hospital\nx,a\n", {"owner": "hospital"}, "no column beside the label"),
        (TEXT.replace("yes", ""), {}, r"row 1 \(counted from 0\) has an empty 'label'"),
        ("age,label\n", {}, "it is empty"),
    ],
)
def test_tables_that_cannot_be_used_are_one_sentence(tmp_path, text, options, sentence):
    with pytest.raises(InputError, match=sentence):
        SOURCES["table"](write(tmp_path, text), **options)


def test_heart_ships_with_nufed():
    found = SOURCES["heart"]()
    hospitals, sizes = np.unique(found.owners, return_counts=True)
    assert dict(zip(hospitals, sizes.tolist(), strict=True)) == {
        "cleveland": 303,
        "hungary": 294,
        "long-beach": 200,
        "switzerland": 123,
    }
    chol = [column.name for column in found.columns].index("chol")
    assert found.inputs[found.owners == "switzerland", chol].isnan().all()
    assert found.targets.sum() == 509  # of 920 patients
    content = (files("nufed.data") / "heart.csv").read_bytes()
    assert hashlib.sha256(content).hexdigest()[:12] == "a8fc51a60249"


@pytest.mark.skipif(not RAW.is_dir(), reason=f"{RAW} is not here")
def test_the_shipped_file_is_made_from_the_official_ones(tmp_path):
    tool = runpy.run_path(str(ROOT / "tools/make_heart.py"))
    tool["main"].__globals__["OUT"] = tmp_path / "heart.csv"
    tool["main"](RAW)
    assert (tmp_path / "heart.csv").read_bytes() == (files("nufed.data") / "heart.csv").read_bytes()
    shutil.copytree(RAW, tmp_path / "raw")
    damaged = tmp_path / "raw/processed.va.data"
    damaged.chmod(0o600)
    damaged.write_text("1")
    with pytest.raises(SystemExit, match="its SHA-256 differs"):
        tool["main"](tmp_path / "raw")


SMALL = {
    "rounds": 3,
    "participation": 1.0,
    "workers": 1,
    "seeds": [0, 1],
    "baselines": ["majority"],
    "data": {"source": "heart", "validation": 0.2, "test": 0.3, "unseen": ["switzerland"]},
    "model": {"name": "logistic"},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.3, "batch_size": 10},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return library.run(SMALL, out=tmp_path_factory.mktemp("heart") / "run")


def test_a_run_records_what_it_learned_from_training_parts_of_seen_agents(run):
    problem = Problem.make(load_config(SMALL))
    for seed, federation in problem.federations.items():
        split = federation.split
        seen = [split.train[agent] for agent in split.seen]
        right = learn_preparation(problem.samples, seen)
        assert run.splits[seed].preparation == right == federation.samples.preparation
        for leak in (
            [split.train[agent] for agent in split.agents],  # with the unseen hospital
            [np.concatenate(p) for p in zip(split.train, split.validation, strict=True)],
        ):
            assert learn_preparation(problem.samples, leak) != right
    assert run.splits[0].preparation != run.splits[1].preparation
    assert run.inputs.shape == [right.width] and run.inputs.dtype == "float32"


def test_the_run_is_resumed_and_read_back(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    longer = library.resume(tmp_path / "run", ["rounds=4"])
    assert longer.splits[0].preparation == run.splits[0].preparation
    record = read_sealed(tmp_path / "run/splits/seed-0.json").about["preparation"]
    assert Preparation.read(record) == run.splits[0].preparation


def raw(hospital, tmp_path, change=lambda row: row):
    """A site's own file, as the hospital has it."""
    with (files("nufed.data") / "heart.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.pop("hospital") == hospital]
    for row in rows:
        row["label"] = "disease" if row.pop("num") != "0" else "healthy"
        for name in ("trestbps", "chol"):
            row[name] = "" if row[name] == "0" else row[name]
    rows = [change(row) for row in rows]
    with (tmp_path / f"{hospital}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path / f"{hospital}.csv"


def test_raw_columns_at_a_new_site_become_the_inputs_of_the_run(run, tmp_path):
    about = load_bundle(run.path / "bundles/gmeta.nufed").about
    assert about.format == 3 and about.preparation == run.splits[0].preparation
    samples = SOURCES["heart"]()
    rows = samples.owners == "switzerland"
    expected = prepare(samples, about.preparation)[0].inputs[rows]
    with raw("switzerland", tmp_path).open() as file:
        table = list(csv.DictReader(file))
    columns = {name: [row[name] for row in table] for name in table[0]}
    assert torch.equal(about.read_inputs(columns), expected)
    with pytest.raises(InputError, match="this model takes columns by name, and ndarray has none"):
        about.read_inputs(np.zeros((2, 13)))


def test_adapt_and_predict_take_raw_columns(run, tmp_path, nufed):
    bundle, data = run.path / "bundles/gmeta.nufed", raw("switzerland", tmp_path)
    said = nufed("adapt", bundle, data, "--out", "m.safetensors", "--anyway", cwd=tmp_path)
    assert said.returncode == 0 and "123 samples, 2 fine-tuning steps" in said.stdout, said.stderr
    said = nufed("predict", "m.safetensors", data, "--json", cwd=tmp_path)
    assert len(json.loads(said.stdout)["predictions"]) == 123

    def other(row):
        row.pop("thal")
        return {**row, "cp": "9" if row["cp"] == "1" else row["cp"], "ward": "west"}

    raw("switzerland", tmp_path, other)
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # printed
        said = nufed("predict", "m.safetensors", data, cwd=tmp_path)
    assert "columns of training that are not there (thal) count as missing" in said.stderr
    assert "in column 'cp', 4 values that no training row has ('9') count as missing" in said.stderr

    raw("switzerland", tmp_path, lambda row: {**row, "thalach": "high"})
    said = nufed("predict", "m.safetensors", data, cwd=tmp_path)
    assert said.returncode and "'thalach' holds 'high' at row 0" in said.stderr
    card = " ".join(nufed("inspect", bundle, cwd=tmp_path).stdout.split())
    assert "6 columns of numbers and 7 of categories become 35 inputs" in card


def test_personal_models_take_raw_columns(run, tmp_path, nufed):
    data = raw("cleveland", tmp_path)
    options = ("--agent", 0, "--out", "own.safetensors")
    made = nufed("bundle", run.path, "--method", "gmeta", *options, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    said = nufed("predict", "own.safetensors", data, cwd=tmp_path)
    assert said.returncode == 0 and "of 303" in said.stdout


def test_a_preparation_given_in_the_configuration_is_used(run, tmp_path):
    given = run.splits[1].preparation
    config = {**SMALL, "data": {**SMALL["data"], "prepare": {"columns": given.describe()}}}
    other = library.run(config, out=tmp_path / "run")
    assert other.splits[0].preparation == other.splits[1].preparation == given
    assert load_config(tmp_path / "run/config.toml").data.prepare.given == given
    assert load_run(tmp_path / "run").preparation(0) == given
    mean = library.run(SMALL, ["data.prepare.fill=mean"], out=tmp_path / "mean")
    assert mean.splits[0].preparation != run.splits[0].preparation
    plain = {**config, "data": {**config["data"], "source": "digits", "unseen": []}}
    with pytest.raises(InputError, match=r"data.prepare.columns names 13 columns, and this data"):
        library.run(plain, out=tmp_path / "no")
    wrong = [{**given.describe()[0], "center": 1.0}]
    with pytest.raises(InputError, match="did you mean 'centre'"):
        load_config({"data": {"prepare": {"columns": wrong}}})


def test_spawned_workers_learn_the_same(run, tmp_path):
    library.run(SMALL, ["workers=2"], out=tmp_path / "run")
    for file in ("methods/gmeta/seed-0/model.safetensors", "splits/seed-0.json"):
        assert (tmp_path / "run" / file).read_bytes() == (run.path / file).read_bytes()


def test_data_of_numbers_alone_has_no_preparation(tmp_path):
    config = {**SMALL, "seeds": [0], "data": {"agents": 4, "samples_per_agent": 40}}
    plain = library.run(config, out=tmp_path / "run")
    about = read_sealed(plain.path / "splits/seed-0.json").about
    assert "preparation" not in about and plain.preparation(0) is None
    assert load_bundle(plain.path / "bundles/gmeta.nufed").about.format == 2
    assert "prepare" not in (plain.path / "config.toml").read_text()


def test_data_show_names_what_hospitals_lack_and_who_is_new(tmp_path, nufed):
    said = nufed("data", "show", "heart", cwd=tmp_path).stdout
    assert re.search(r"hungary .* 294 unseen in training", said)
    assert re.search(r"\nchol +numbers +7.8% +28.0% +100.0%\n", said)
    shown = json.loads(nufed("data", "show", "heart", "--json", cwd=tmp_path).stdout)
    assert shown["unseen"] == ["hungary"]
    listed = nufed("data", "list", cwd=tmp_path).stdout
    assert re.search(r"heart +present +shipped with nufed\n +Janosi, .*licence: CC BY 4.0", listed)


@pytest.mark.parametrize("cells", ["," * 19, ",".join("7" * 20), ",".join(["yes", ""] * 10)])
def test_reading_takes_at_most_the_memory_that_is_counted(tmp_path, cells):
    header = ",".join(f"c{place}" for place in range(20))
    path = write(tmp_path, f"{header},label\n" + f"{cells},x\n" * 2000)
    tracemalloc.start()
    SOURCES["table"](path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < CELL_GROWTH * Path(path).stat().st_size


def test_a_table_beyond_the_limit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path, TEXT * 100)
    monkeypatch.setenv(LIMIT, "1000")
    with pytest.raises(InputError, match=f"{LIMIT} to the number of bytes"):
        SOURCES["table"](path)
