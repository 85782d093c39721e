"""Data frames of a run hold the numbers of its results, agents and rounds, each in its row."""

import sys

import numpy as np
import pytest

import nufed
from nufed.lab.runs.frames import ScoreRow
from support import without_report

CONFIG = {
    "rounds": 4,
    "eval_every": 2,
    "seeds": [0, 1],
    "workers": 1,
    "participation": 0.5,
    "baselines": ["majority"],
    "data": {"agents": 6, "samples_per_agent": 30, "unseen_agents": 2, "validation": 0.2},
    "model": {"args": {"hidden": [4]}},
    "method": {"batch_size": 6, "adapt_steps": 2},
    "methods": {"gmeta": {}, "fedper": {"algorithm": "fedper"}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with without_report():
        return nufed.run(CONFIG, out=tmp_path_factory.mktemp("frames") / "run")


def means(frame, **where):
    for key, value in where.items():
        frame = frame[frame[key] == value]
    return frame.groupby("seed")["value"].mean().mean()


def test_means_of_the_frame_are_those_of_the_results(run):
    frame, rows = run.frame(), run.rows()
    assert list(frame.columns) == list(ScoreRow._fields) and len(rows) == 6
    for row in rows:
        name = row.name.split(" after ")[0]
        own = frame[(frame["method"] == name) & (frame["kind"] == row.kind)]
        own = own[own["seen"] == (row.group == "seen")]
        steps = run.config.steps_of(name)[0] if row.kind == "method" else 2
        last = own[(own["model"] == "personal") & (own["steps"] == steps)]
        size = "chosen" if row.kind == "method" else "as_trained"
        assert np.isclose(means(last, step_size=size), row.personal.mean)
        assert np.isclose(means(last, step_size="as_trained"), row.as_trained.mean)
        if row.lr_scale:
            assert set(last[last["step_size"] == "chosen"]["lr_scale"]) == set(row.lr_scale)
        assert np.isclose(means(own, model="global"), row.shared.mean, equal_nan=True)
    assert "global" not in set(frame[frame["method"] == "fedper"]["model"])  # it has none


def test_every_score_of_every_agent_is_one_row(run):
    frame = run.frame()
    key = ["method", "seed", "agent", "model", "steps", "step_size"]
    assert not frame.duplicated(key).any()
    for name, seeds in run.methods.items():
        for seed, trained in seeds.items():
            for scores, size in ((trained.scores, "as_trained"), (trained.chosen, "chosen")):
                for s in scores:
                    own = frame[(frame["method"] == name) & (frame["seed"] == seed)]
                    own = own[(own["agent"] == s.agent) & (own["step_size"] == size)]
                    assert own["value"].tolist() == list(s.score)
                    assert own["loss"].tolist() == list(s.loss)
                    assert own["balanced"].tolist() == list(s.balanced)
                    assert set(own["seen"]) == {s.seen} and set(own["round"]) == {4}
    steps = 1 + run.config.steps_evaluated
    shared = 6 * 2  # rows of gmeta's global model
    assert len(frame) == 6 * 2 * (2 * 2 * steps + steps) + shared


def test_the_history_is_that_of_the_metrics(run):
    history = run.history()
    trained = history[history["step_size"] == "as_trained"]
    assert len(trained) == 2 * 2 * 5 * 2  # methods, seeds, rounds, groups
    for name, seeds in run.methods.items():
        shown = run.config.steps_of(name)[0]
        for seed, part in seeds.items():
            for line in part.metrics:
                row = trained[(trained["method"] == name) & (trained["seed"] == seed)]
                row = row[(row["round"] == line.round) & (row["group"] == "seen")].iloc[0]
                assert row["gradients"] == line.gradients and row["cohort"] == len(line.cohort)
                assert np.isnan(row["personal"]) == (not line.evaluation)
                if line.evaluation:
                    scores = line.evaluation["seen"].score
                    assert row["personal"] == scores[shown]
                    assert [row[f"personal_{k}"] for k in range(len(scores))] == scores
    chosen = history[history["step_size"] == "chosen"]
    assert set(chosen["round"]) == {4} and len(chosen) == 2 * 2 * 2


def test_without_pandas_one_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for make in (run.frame, run.history):
        with pytest.raises(nufed.InputError, match=r'pip install "nufed\[frames\]"'):
            make()


def test_a_run_is_read_from_a_text_and_its_repr_is_short(run):
    again = nufed.load_run(str(run.path))
    assert again == run and repr(again) == repr(run)
    assert "gmeta, fedper, majority" in repr(run) and len(repr(run)) < 300 + len(str(run.path))
