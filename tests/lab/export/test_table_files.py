"""CSV and Parquet files hold the data frames of a run, and overwrite nothing."""

import numpy as np
import pandas as pd
import pytest
import torch

import nufed as library
from support import without_report

CONFIG = {
    "rounds": 1,
    "workers": 1,
    "baselines": [],
    "data": {"validation": 0.2},
    "model": {"args": {"hidden": [4]}},
    "method": {"batch_size": 6},
}
OWNERS = ["=1+1", "-2", "me"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("tables")
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    data = x, (x[:, 0] > 0).long(), np.repeat(OWNERS, 30)
    with without_report():
        library.run(CONFIG, data=data, out=cwd / "run")
    return cwd


def test_parquet_is_the_frame(work, nufed):
    said = nufed("export", "run", "--to", "parquet", cwd=work)
    assert said.returncode == 0, said.stderr
    assert "run.parquet" in said.stdout and "run-history.parquet" in said.stdout
    run = library.load_run(work / "run")
    pd.testing.assert_frame_equal(pd.read_parquet(work / "run.parquet"), run.frame())
    pd.testing.assert_frame_equal(pd.read_parquet(work / "run-history.parquet"), run.history())


def test_csv_is_the_frame_without_formulas(work, nufed):
    said = nufed("export", "run", "--to", "csv", "--out", "scores.csv", cwd=work)
    assert said.returncode == 0, said.stderr
    run = library.load_run(work / "run")
    scores = pd.read_csv(work / "scores.csv", dtype={"name": str})
    assert set(scores["name"]) == {"'=1+1", "-2", "me"}
    scores["name"] = scores["name"].str.removeprefix("'")
    pd.testing.assert_frame_equal(scores, run.frame())
    pd.testing.assert_frame_equal(pd.read_csv(work / "scores-history.csv"), run.history())


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("there.csv", "there.csv exists, and is not overwritten"),
        ("new.csv", "new-history.csv exists, and is not overwritten"),
        ("scores.parquet", "must end in .csv"),
        ("nowhere/scores.csv", "there is no directory nowhere"),
    ],
)
def test_other_files_are_left_alone(work, nufed, out, words):
    for name in ("there.csv", "new-history.csv"):
        (work / name).write_text("mine")
    said = nufed("export", "run", "--to", "csv", "--out", out, cwd=work)
    assert said.returncode == 2 and words in said.stderr and not said.stdout
    assert (work / "there.csv").read_text() == (work / "new-history.csv").read_text() == "mine"
    assert not (work / "new.csv").exists()
