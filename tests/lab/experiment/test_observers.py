"""Observers are told everything, in the parent, and can change nothing."""

import os
import random
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

import nufed
from nufed.errors import ObserverWarning
from nufed.lab.cli.progress import show_progress
from nufed.simulation import start_method
from support import Killed, file_hashes

pytestmark = pytest.mark.usefixtures("no_report")
CONFIG = {
    "rounds": 5,
    "participation": 0.5,
    "eval_every": 2,
    "checkpoint_every": 2,
    "baselines": ["majority"],
    "workers": 1,
    "data": {"agents": 6, "samples_per_agent": 20, "dirichlet": 1.0, "unseen_agents": 2},
    "model": {"args": {"hidden": [6]}},
    "method": {"adapt_steps": 1, "adapt_lr": 0.05, "meta_lr": 0.3, "batch_size": 5},
    "methods": {"gmeta": {}, "fedper": {}},
}


class Notes(nufed.Observer):
    """Writes down what it is told, and where."""

    def __init__(self):
        self.started, self.parts, self.rounds, self.evaluations, self.ended = [], [], [], [], []
        self.processes = set()

    def start(self, config, path):
        self.started.append((config.rounds, path))

    def part(self, event):
        self.parts.append(event)

    def round(self, event):
        self.rounds.append(event)
        self.processes.add(os.getpid())

    def evaluation(self, event):
        self.evaluations.append(event)

    def end(self, run):
        self.ended.append(run)

    def of(self, method):
        events = [*self.rounds, *self.evaluations]
        return sorted((e for e in events if e.method == method), key=lambda e: e.round)


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    notes = Notes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nufed.lab.report.run_page.build_report", lambda runs, out, **_: out)
        run = nufed.run(CONFIG, out=tmp_path_factory.mktemp("runs") / "one", observers=[notes])
    return run, notes


def test_an_observer_is_told_what_the_run_records(observed):
    run, notes = observed
    assert notes.started == [(5, run.path)] and notes.ended == [run]
    assert {(e.method, e.round) for e in notes.parts} == {
        ("gmeta", 0),
        ("fedper", 0),
        ("null baselines", 0),
    }
    for method, part in run.methods.items():
        lines, steps = part[0].metrics, run.config.steps_of(method)[0]
        rounds = [e for e in notes.rounds if e.method == method]
        assert [e.round for e in rounds] == [1, 2, 3, 4, 5]
        assert [e.update_norm for e in rounds] == [m.update_norm for m in lines[1:]]
        assert all(e.update_norm > 0 for e in rounds)
        assert [e.gradients for e in rounds] == np.cumsum([m.gradients for m in lines])[1:].tolist()
        assert [e.hvps for e in rounds] == np.cumsum([m.hvps for m in lines])[1:].tolist()
        assert [e.scored_round for e in rounds] == [0, 2, 2, 4, 5]
        evaluated = [e for e in notes.evaluations if e.method == method]
        assert [e.round for e in evaluated] == [0, 2, 4, 5]
        for event, line in zip(evaluated, (lines[k] for k in (0, 2, 4, 5)), strict=True):
            seen, unseen = line.evaluation["seen"], line.evaluation["unseen"]
            assert event.score == seen.score[steps] and event.unseen_score == unseen.score[steps]
            assert event.global_score == seen.global_score
            assert (event.global_score is None) == (method == "fedper")
            assert event.training_loss == line.training_loss > 0
            assert event.evaluation_gradients > 0


@pytest.mark.skipif(start_method() != "fork", reason="needs Linux")
def test_workers_tell_the_parent_the_same(observed, tmp_path):
    notes = Notes()
    nufed.run(CONFIG, ["workers=2"], out=tmp_path / "run", observers=[notes])
    assert notes.processes == {os.getpid()}
    for method in CONFIG["methods"]:
        assert notes.of(method) == observed[1].of(method)


class Disturbing(nufed.Observer):
    """Raises, and changes what it can reach."""

    def start(self, config, path):
        config.seeds.append(7)
        config.model.args["hidden"] = [99]

    def round(self, event):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        raise ZeroDivisionError("of its own")


def test_an_observer_changes_no_bit_and_does_not_end_the_run(observed, tmp_path):
    notes = Notes()
    with pytest.warns(ObserverWarning) as caught:
        run = nufed.run(CONFIG, out=tmp_path / "run", observers=[Disturbing(), notes])
    (warning,) = caught
    assert "Disturbing" in str(warning.message) and "ZeroDivisionError: of its own" in str(
        warning.message
    )
    assert file_hashes(run.path) == file_hashes(observed[0].path)
    assert len(notes.rounds) == 10 and notes.ended == [run]


def test_a_resumed_run_says_where_it_resumes_and_counts_on(observed, tmp_path):
    class Kill(nufed.Observer):
        def round(self, event):
            if event.round == 3:
                raise Killed

    notes = Notes()
    with pytest.raises(Killed):
        nufed.run(CONFIG, out=tmp_path / "run", observers=[notes, Kill()])
    assert notes.ended == [None]
    later = Notes()
    nufed.resume(tmp_path / "run", observers=[later])
    before = next(e for e in observed[1].evaluations if (e.method, e.round) == ("gmeta", 2))
    assert later.parts[1] == replace(before, starts=True)
    assert later.of("gmeta") == [e for e in observed[1].of("gmeta") if e.round > 2]


def test_progress_names_the_round_of_a_score():
    text = StringIO()
    with show_progress(Console(file=text, width=100)) as display:
        display.start(nufed.lab.config.load_config(CONFIG), os.curdir)
        event = nufed.Event(0, "gmeta", 0, score=0.5, scored_round=0)
        display.part(replace(event, starts=True))
        for round in range(1, 6):
            at = replace(event, round=round, scored_round=round // 4 * 4, last=round == 5)
            display.round(at)
    assert "gmeta  round 2/5  score 0.500 (round 0)" in text.getvalue()
    assert "gmeta  round 5/5  score 0.500 (round 4)" in text.getvalue()
