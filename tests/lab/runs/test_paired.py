"""Paired differences: closed forms, verdicts, coverage, and the sentence that is made of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import nufed as library
from nufed.evaluate import AgentScores, Measure
from nufed.lab.report.headline import finding
from nufed.lab.runs.results import Estimate, Line, Trained, paired_differences, results_table

ACCURACY, LOSS = Measure("accuracy"), Measure("loss", None)
AGENTS = np.linspace(0.3, 0.6, 8)  # agents differ far more than methods


def run_of(methods, measure=ACCURACY, **baselines):
    """A run with these scores, each an array of (seeds, agents)."""

    def line(name, scores, kind):
        seeds = {
            seed: Trained(
                [], [AgentScores(a, str(a), True, 9, 9, (0.0,), (x,)) for a, x in enumerate(own)]
            )
            for seed, own in enumerate(np.atleast_2d(scores).tolist())
        }
        return Line(name, kind, 0, seeds)

    lines = [line(name, scores, "method") for name, scores in methods.items()]
    lines += [line(name, scores, "baseline") for name, scores in baselines.items()]
    rows = results_table(lines, ["seen"], measure, lambda line: None)
    return SimpleNamespace(
        measure=measure, rows=lambda: rows, paired=lambda: paired_differences(lines, rows, measure)
    )


def pair(run, name, against):
    (found,) = [p for p in run.paired() if (p.name, p.against) == (name, against)]
    return found


def test_with_three_seeds_the_interval_is_over_their_means():
    gains = np.array([0.01, 0.02, 0.06])
    run = run_of({"a": AGENTS + gains[:, None]}, local=np.tile(AGENTS, (3, 1)))
    found, wanted = pair(run, "a", "local"), Estimate.of(gains.tolist())
    assert (found.over, found.verdict) == ("seeds", "undecided")
    assert (found.mean, found.half_width) == pytest.approx((wanted.mean, wanted.half_width))


def test_seeds_that_agree_by_chance_give_no_narrow_interval():
    """Their means are equal, and their agents are not."""
    gain = np.array([0.3, -0.2, 0.1, 0.0, 0.2, -0.1, 0.05, 0.05])
    run = run_of({"a": np.tile(AGENTS + gain, (3, 1))}, local=np.tile(AGENTS, (3, 1)))
    found, wanted = pair(run, "a", "local"), Estimate.of(gain.tolist())
    assert (found.over, found.verdict) == ("agents", "undecided")
    assert (found.mean, found.half_width) == pytest.approx((wanted.mean, wanted.half_width))


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_fewer_seeds_the_interval_is_over_agents_each_a_mean_over_seeds(seeds):
    gain = np.array([0.01, 0.02, 0.03, 0.02, 0.01, 0.02, 0.03, 0.02])
    noise = np.array([[0.01], [-0.01]])[:seeds] if seeds > 1 else 0
    run = run_of({"a": AGENTS + gain + noise}, local=np.tile(AGENTS, (seeds, 1)))
    found, wanted = pair(run, "a", "local"), Estimate.of(gain.tolist())
    assert (found.over, found.verdict) == ("agents", "better")
    assert (found.mean, found.half_width) == pytest.approx((wanted.mean, wanted.half_width))
    (row, _) = run.rows()
    assert row.personal.half_width > 5 * found.half_width  # what pairing is for
    lower = run_of({"a": AGENTS + gain}, LOSS, local=AGENTS)
    assert pair(lower, "a", "local").verdict == "worse"


def test_too_few_to_tell():
    run = run_of({"a": [[0.9, 0.8]] * 2}, local=[[0.1, 0.1]] * 2)
    found = pair(run, "a", "local")
    assert (found.half_width, found.over, found.verdict) == (None, None, "undecided")
    assert [row.personal.half_width for row in run.rows()] == [None, None]
    assert finding(run).startswith("Too few agents and seeds to tell whether a method beats local")


def test_agents_that_only_one_of_both_has_scores_of_are_left_out():
    run = run_of({"a": AGENTS + 0.1}, local=AGENTS[:5])
    assert pair(run, "a", "local").mean == pytest.approx(0.1)


def test_the_interval_has_its_nominal_coverage():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(600):
        base = rng.normal(0.5, 0.2, (1, 12))
        run = run_of({"a": base + 0.03 + rng.normal(0, 0.05, base.shape)}, local=base)
        found = pair(run, "a", "local")
        inside += abs(found.mean - 0.03) <= found.half_width
    assert inside / 600 == pytest.approx(0.95, abs=0.03)


NOISE = np.array([0.02, -0.02, 0.01, -0.01, 0.02, -0.02, 0.01, -0.01])


@pytest.mark.parametrize(
    ("methods", "baselines", "sentence"),
    [
        (
            {"a": 0.2, "b": 0.1},
            {"local": 0.0},
            "a is the best method at 65.0 % accuracy, +20.0 ± 0.0 points",
        ),
        (
            {"a": 0.2, "b": 0.2 + 2 * NOISE},
            {"local": 0.0},
            "a and b can't be told apart (65.0 % accuracy); all",
        ),
        (
            {"a": 0.2, "b": 0.2 + NOISE},
            {"local": 0.0},
            "a and b are practically equal (65.0 % accuracy); all",
        ),
        (  # told apart, and too little to matter
            {"a": 0.2, "b": 0.195, "c": 0.1},
            {"local": 0.0},
            "a and b are practically equal (65.0 % to 64.5 % accuracy); all beat local",
        ),
        (
            {"a": 0.005, "b": -0.1},
            {"local": 0.0},
            "a is the best method at 45.5 % accuracy, +0.5 ± 0.0 points (95 %, over agents; "
            "practically equal) over local training (45.0 %).",
        ),
        ({"a": 0.2, "b": 0.1, "c": 0.2 + 2 * NOISE}, {"local": 0.0}, "a and c can't be told apart"),
        (
            {n: 0.2 + i * NOISE for i, n in enumerate("abc")},
            {"local": 0.0},
            "The 3 methods can't be told apart (65.0 % accuracy); all beat local training (45.0",
        ),
        (
            {"a": NOISE + 0.003, "b": -0.1},
            {"local": 0.0, "majority": -0.2},
            "No method beats local training beyond noise: a 45.3 % accuracy, local 45.0 %, paired "
            "difference +0.3 ± 1.4 points (95 %, over agents; practically equal).",
        ),
        (
            {"a": -0.1, "b": -0.2},
            {"local": 0.0},
            "Local training beats every method: a 35.0 % accuracy,",
        ),
        ({"a": -0.1}, {"local": 0.0}, "Local training beats a: a 35.0 % accuracy, local"),
        (
            {"a": 0.1, "b": 0.0},
            {"local": -0.1, "majority": 0.2},
            "Always predicting the agent's most frequent class beats every method",
        ),
        ({"a": 0.1, "b": 0.0}, {}, "a is the best method at 55.0 % accuracy, +10.0 ±"),
        ({"a": math.nan}, {"local": 0.0}, "No method has finite scores."),
        (
            {"a": math.nan, "b": 0.1},
            {"local": 0.0},
            "b reaches 55.0 % accuracy, +10.0 ± 0.0 points",
        ),
    ],
)
def test_the_finding_names_a_best_method_only_where_it_is(methods, baselines, sentence):
    shifted = {name: AGENTS + shift for name, shift in methods.items()}
    nulls = {name: AGENTS + shift for name, shift in baselines.items()}
    assert finding(run_of(shifted, **nulls)).startswith(sentence)


def test_of_losses_the_lowest_is_the_best():
    run = run_of({"a": AGENTS - 0.1, "b": AGENTS}, LOSS, local=AGENTS + 0.1)
    assert finding(run).startswith("a is the best method at loss 0.35, −0.2 ± ")


CONFIG = {
    "rounds": 2,
    "workers": 1,
    "seeds": [0, 1],
    "baselines": ["majority", "local"],
    "data": {"agents": 4, "samples_per_agent": 60, "dirichlet": 0.5, "validation": 0.2},
    "method": {"batch_size": 6},
    "methods": {
        "a": {"algorithm": "fedavg"},
        "b": {"algorithm": "fedavg"},
        "c": {"algorithm": "fedavg", "meta_lr": 0.5},
    },
}


def test_few_agents_have_intervals_over_their_samples(tmp_path, nufed):
    run = library.run(CONFIG, out=tmp_path / "run", figures=False)
    for line, row in ((line, r) for line in run.lines() for r in run.rows() if r.name == line.name):
        widths = []
        for scores in line.scores("seen"):  # of a mean of four independent shares
            shares = [(s.score[line.steps], s.test_samples) for s in scores]
            errors = [p * (1 - p) / n for p, n in shares]
            widths.append(1.96 * math.sqrt(sum(errors)) / 4)
        assert row.over_samples == pytest.approx(np.mean(widths), rel=0.2)
    same, other = pair(run, "b", "a"), pair(run, "c", "a")
    assert (same.mean, same.over_samples) == (0, 0)  # the same resamples
    rows = {row.name: row for row in run.rows()}
    alone = math.hypot(rows["a"].over_samples, rows["c"].over_samples)
    assert 0 < other.over_samples < alone  # what pairing is for
    text = f"/ {100 * pair(run, rows['a'].name, 'local').over_samples:.1f}"
    said = nufed("report", run.path, "--no-figures", cwd=tmp_path)
    page = (run.path / "report.html").read_text()
    assert "± samples" in said.stdout and text in said.stdout
    assert "<th>± samples</th>" in page and "over these agents&#39; samples" in page


def test_runs_without_resamples_can_be_read(tmp_path, monkeypatch):
    """Such of many agents, of a federation, or of earlier versions."""
    monkeypatch.setattr("nufed.evaluate.scores.FEW_AGENTS", 3)
    run = library.run(CONFIG, ["seeds=[0]"], out=tmp_path / "run", figures=False)
    assert not list(run.path.rglob("resampled.jsonl"))
    assert {row.over_samples for row in run.rows()} == {None}
    assert {p.over_samples for p in run.paired()} == {None}
    assert "± samples" not in (run.path / "report.html").read_text()
