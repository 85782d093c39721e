"""Numerical warnings of a run are in its results and report, not only on stderr."""

import json
import warnings

import pytest
import tomli_w
import torch
from torch import nn

import nufed
from nufed.errors import NumericalWarning, RunError
from nufed.evaluate import AgentScores, Measure
from nufed.lab.runs.records import Curves, MetricsLine
from nufed.lab.runs.results import Line, Trained
from nufed.lab.runs.warnings import below_start
from nufed.simulation import start_method
from support import file_hashes

CONFIG = {
    "rounds": 12,
    "participation": 0.5,
    "seeds": [0, 1],
    "workers": 1,
    "data": {"agents": 6, "samples_per_agent": 24},
    "model": {"args": {"hidden": [6]}},
    "method": {"adapt_steps": 2, "batch_size": 4, "local_steps": 1},
    "baselines": [],
    "eval_every": 6,
    "checkpoint_every": 5,
    "methods": {
        "poor-step": {"algorithm": "gmeta", "curvature": "hessian_free", "fd_step": 1000.0},
        "good": {"algorithm": "gmeta", "curvature": "exact"},
    },
}


def run(out, *overrides, **own):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nufed.run(CONFIG, overrides, out=out, figures=False, **own)
    return [str(w.message) for w in caught if issubclass(w.category, NumericalWarning)]


def told(path):
    return json.loads((path / "results.json").read_text())["warnings"]


def test_a_poor_step_is_in_the_results_on_the_page_and_on_stderr(tmp_path):
    stderr = run(tmp_path / "run")
    found = told(tmp_path / "run")
    assert [(w["method"], w["seed"], w["first_round"], w["count"]) for w in found] == [
        ("poor-step", seed, round, 1) for seed in (0, 1) for round in (1, 10)
    ]
    assert all(w["about"] == "numbers" and "fd_step = 1000 gives" in w["message"] for w in found)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Numerical warnings" in page
    for w in found:
        shown = w["message"].replace('"', "&#34;")
        assert f"<li>poor-step, seed {w['seed']}, round {w['first_round']}: {shown}</li>" in page
        assert f"poor-step, seed {w['seed']}: {w['message']}" in stderr
    assert len(stderr) == len(found)


def test_a_run_without_numerical_problems_has_no_warnings(tmp_path):
    assert run(tmp_path / "run", "methods.poor-step.fd_step=auto") == []
    assert told(tmp_path / "run") == []
    assert "Numerical warnings" not in (tmp_path / "run" / "report.html").read_text()
    assert not list((tmp_path / "run").rglob("warnings.jsonl"))


class CutOff(torch.autograd.Function):
    """tanh with a detached gradient, which has no second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = x.tanh().detach()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, g):
        return (g * (1 - ctx.y**2)).detach()


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 6), nn.Linear(6, 10)

    def forward(self, x):
        return self.last(CutOff.apply(self.first(x.flatten(1))))


def test_a_detached_exact_product_is_reported(tmp_path):
    run(tmp_path / "run", "rounds=1", model=Cut)
    found = [w for w in told(tmp_path / "run") if w["method"] == "good"]
    assert [w["seed"] for w in found] == [0, 1]
    assert all("exact Hessian-vector product is" in w["message"] for w in found)


def test_updates_left_out_are_in_the_results(tmp_path):
    attack = ["faults.corruption=0.4", 'faults.attack="nan"', "methods.poor-step.fd_step=auto"]
    run(tmp_path / "run", *attack, "rounds=3")
    found = told(tmp_path / "run")
    loaded = nufed.load_run(tmp_path / "run")
    assert {w["about"] for w in found} == {"updates"}
    assert sum(w["count"] for w in found) == len(loaded.rejected()) > 0
    assert "'model' is not finite" in found[0]["message"]


@pytest.mark.skipif(start_method() != "fork", reason="needs Linux")
def test_warnings_do_not_depend_on_workers(tmp_path):
    one = run(tmp_path / "1")
    for workers in (2, 6):  # parts, and then also agents, in separate processes
        assert sorted(run(tmp_path / str(workers), f"workers={workers}")) == sorted(one)
        hashes = [file_hashes(tmp_path / str(n)) for n in (1, workers)]
        for own in hashes:
            del own["config.toml"]  # it contains the number of workers
        assert hashes[0] == hashes[1]


def test_a_resumed_run_has_the_warnings_of_an_uninterrupted_one(tmp_path):
    run(tmp_path / "whole")

    def interrupt(event):
        if event.method == "poor-step" and event.round == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nufed.run(CONFIG, out=tmp_path / "stopped", figures=False, on_progress=interrupt)
    assert not (tmp_path / "stopped" / "results.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nufed.resume(tmp_path / "stopped", figures=False)
    assert file_hashes(tmp_path / "stopped") == file_hashes(tmp_path / "whole")
    assert len(told(tmp_path / "stopped")) == 4


def test_a_method_that_fails_reports_its_warnings(tmp_path):
    run(tmp_path / "run", "methods.poor-step.meta_lr=1e30", "seeds=[0]")
    (failure,) = nufed.load_run(tmp_path / "run").failures
    assert failure.startswith("poor-step, seed 0: ")
    assert "; warned in round 1: fd_step = 1000 gives" in failure


def test_changed_warnings_are_detected(tmp_path):
    run(tmp_path / "run", "rounds=1")
    (file, *_) = sorted((tmp_path / "run").rglob("warnings.jsonl"))

    file.write_text(file.read_text().replace("1000", "0.01"))
    with pytest.raises(RunError, match=r"warnings.jsonl: its SHA-256 differs"):
        nufed.load_run(tmp_path / "run")


WORSE = {
    "rounds": 6,
    "data": {"agents": 6, "samples_per_agent": 24, "test": 0.25},
    "model": {"args": {"hidden": [6]}},
    "baselines": [],
    "seeds": [0],
    "workers": 1,
    "eval_every": 3,
    "method": {"adapt_lr": 0.1, "batch_size": 6, "meta_lr": 0.1},
    "methods": {"good": {"algorithm": "fedavg"}, "large": {"algorithm": "fedavg", "meta_lr": 60.0}},
}


def test_a_training_that_ends_below_its_start_is_named_with_the_likely_cause(tmp_path, nufed):
    """With far too large steps; the same with clipped gradients and smaller ones is not."""
    config = tmp_path / "worse.toml"
    config.write_text(tomli_w.dumps(WORSE))
    said = nufed("run", str(config), "--out", "run", "--no-figures", cwd=tmp_path)
    named = [w for w in told(tmp_path / "run") if w["about"] == "training"]
    assert [w["method"] for w in named] == ["large"] and said.returncode == 0
    message = named[0]["message"]
    assert message.startswith("ends below its untrained start") and "lower meta_lr" in message
    assert f"large, seed 0: {message}" in " ".join(said.stdout.split())
    assert message in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("before", "after", "losses", "said"),
    [
        (0.50, 0.49, (1.2201, 1.2204), None),  # one agent of 20 by one sample of five
        (0.50, 0.4999999, (1.0, 1.5), None),
        (0.50, 0.30, (1.2201, 1.2204), "the loss stayed at 1.22: train for more rounds"),
        (0.50, 0.30, (1.2, 1.9), "the loss rose from 1.2 to 1.9, so step sizes are too large"),
        (0.50, 0.30, (1.9, 1.2), "the loss fell from 1.9 to 1.2, so it learns"),
        (0.50, None, (1.2, 1.9), "it diverged: lower meta_lr"),
    ],
)
def test_a_difference_within_the_spread_of_agents_is_no_alarm(before, after, losses, said):
    ends = zip((0, 1), (before, after), losses, strict=True)
    metrics = [
        MetricsLine(round=at, cohort=[0], rejected=[], gradients=0, hvps=0, bytes_down=0,
                    bytes_up=0, evaluation={"seen": Curves(score=[score], loss=[loss])})
        for at, score, loss in ends
    ]  # fmt: skip
    agents = [AgentScores(k, f"{k}", True, 5, 5, (1.0,), (0.4 + 0.2 * (k % 2),)) for k in range(20)]
    trained = Trained(metrics, agents)
    found = below_start(Line("m", "method", 0, {0: trained}), trained, Measure("accuracy"))
    assert found is None if said is None else said in found
