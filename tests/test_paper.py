"""The paper's experiments: presets, stages, claims and the page, and a short run on real data."""

import itertools
import json
import re

import numpy as np
import pytest
from paper import claims, page, summary, tuning
from paper.__main__ import _without_none
from paper.figures import FIGURES
from paper.smoke import run_all
from paper.stages import STAGES, WHERE

from nufed.data import make_split, part_sizes
from nufed.lab.config import load_config
from nufed.lab.runs import load_run
from nufed.lab.runs.results import Estimate


@pytest.mark.parametrize("figure", ["fig1", "fig2", "fig3", "fig4"])
def test_the_presets_are_the_papers_setting(figure):
    config = load_config(figure)
    assert (config.data.agents, config.participation, config.data.dirichlet) == (50, 0.2, 0.01)
    assert (config.data.samples_per_agent, config.data.validation, config.data.test) == (
        1000,
        0,
        0.2,
    )
    assert config.data.source == ("cifar100" if figure == "fig2" else "cifar10")
    assert config.model.args == {"hidden": [80, 60], "activation": "relu"}
    assert len(config.seeds) >= 5 and config.steps_shown == 3 and config.eval_agents is None
    for name, algorithm in config.algorithms().items():
        nu = 0 if name.startswith("fedavg") else 1 if name.startswith("per-fedavg") else 3
        assert algorithm.adapt_steps == nu
        assert (algorithm.adapt_lr, algorithm.meta_lr, algorithm.local_steps) == (0.01, 0.001, 4)
        assert algorithm.batch_size == (120 if name.endswith("120") else 40)


def test_the_figures_show_the_stated_numbers_of_steps():
    for figure, one_step in (("fig3", [1]), ("fig4", [3, 1])):
        config = load_config(figure)
        for method in config.methods:
            assert config.steps_of(method) == (one_step if method.endswith("120") else [3])


def test_every_stage_keeps_the_papers_training_part():
    """800 of 1000 samples to train on, the same ones as in the paper's protocol."""
    for name in ("fig1", "fair-fig1", "fair-standardised", "alpha-0.1"):
        data = load_config(_without_none(STAGES[name].config())).data
        assert part_sizes(1000, data.validation, data.test)[0] == 800
        split = make_split([np.arange(1000)], 3, validation=data.validation, test=data.test)
        right = make_split([np.arange(1000)], 3, validation=0.0, test=0.2)
        assert split.train[0].tolist() == right.train[0].tolist()


def test_a_search_is_extended_until_the_best_point_is_inside():
    def score(a, b):
        return -abs(a - 2) - abs(b - 4)

    scores = {}
    for _ in range(tuning.MAX_RUNS):
        points = tuning.next_points("gmeta-fo", scores)
        scores |= {point: score(*point) for point in points}
        if not points:
            break
    assert tuning.best(scores) == (2, 4) and not tuning.next_points("gmeta-fo", scores)
    neighbours = {(1, 4), (3, 4), (2, 3), (2, 5)}
    assert neighbours <= scores.keys()
    assert tuning.best({(0, 0): float("nan"), (0, 1): 0.1}) == (0, 1)
    sizes = [tuning.step_size(k) for k in range(-4, 5)]
    assert all(b / a == pytest.approx(3, rel=0.01) for a, b in itertools.pairwise(sizes))


def made_up(tmp_path, **means):
    """A summary with two evaluations (rounds 0 and 10), five seeds of 40 agents per method."""
    rng = np.random.default_rng(0)
    shared = rng.normal(
        0, 0.05, (5, 40)
    )  # the difficulty of agents and seeds, common to all methods
    methods = {}
    for name, (first, last) in means.items():
        agents = last + shared + rng.normal(0, 0.005, (5, 40))
        methods[name] = {
            "steps": [3],
            "seeds": {
                str(s): {"rounds": [0, 10], "score": {"3": [first, own.mean()]}}
                for s, own in enumerate(agents)
            },
            "agents": {
                str(s): {"seen": [True] * 40, "score": [[0, 0, 0, x] for x in own]}
                for s, own in enumerate(agents)
            },
        }
    config = {"rounds": 10, "eval_every": 10}
    return summary.Summary({"config": config, "methods": methods, "baselines": {}})


def test_claims_are_decided_by_what_was_measured(tmp_path):
    run = made_up(
        tmp_path,
        **{
            "fedavg": (0.2, 0.85),
            "per-fedavg-fo": (0.2, 0.9),
            "per-fedavg-hf": (0.2, 0.8),
            "gmeta-fo": (0.88, 0.9),
            "gmeta-hf": (0.2, 0.9),
            "gmeta-exact": (0.2, 0.8),
        },
    )
    better = {c.sentence: c for c in claims._better("fig1", run, "here", "as_trained")}
    found = {c.compared: c.verdict for claim in better.values() for c in claim.comparisons}
    assert found == {
        "gmeta-fo against per-fedavg-fo": "not held",  # equal, to less than RELEVANT
        "gmeta-hf against per-fedavg-hf": "held",
        "gmeta-fo against fedavg": "held",
        "gmeta-exact against fedavg": "not held",
    }
    assert [claim.verdict for claim in better.values()] == ["mixed", "mixed"]
    faster = {
        c.compared: c.verdict
        for claim in claims._faster("fig1", run, "here", "as_trained")
        for c in claim.comparisons
    }
    assert faster["gmeta-fo against fedavg"] == "held"  # there at once
    assert faster["gmeta-exact against fedavg"] == "not held"  # both at the second evaluation
    for method, target, rounds in (
        ("gmeta-fo", 0.79, 0),
        ("fedavg", 0.79, 10),
        ("fedavg", 0.99, 20),
    ):
        assert claims.rounds_to(run, method, 3, target, "as_trained").tolist() == [rounds] * 5


def test_speed_is_not_testable_where_the_untrained_network_has_the_target(tmp_path):
    at_once = made_up(tmp_path, **{"fedavg": (0.95, 0.9), "gmeta-fo": (0.95, 0.9)})
    slower = made_up(tmp_path, **{"fedavg": (0.2, 0.9), "gmeta-fo": (0.2, 0.9)})
    found = []
    for run in (at_once, slower):
        (claim,) = (c for c in claims._faster("fig1", run, "here", "chosen") if c.comparisons)
        found.append(claim)
    assert [claim.verdict for claim in found] == ["not testable", "not held"]
    assert page.verdicts(found) == (
        "1 did not hold, 1 not testable (the target is reached before training)"
    )
    at_once.data["methods"]["fedavg"]["seeds"]["3"]["score"]["3"][0] = 0.2  # in one seed of five
    (claim,) = (c for c in claims._faster("fig1", at_once, "here", "chosen") if c.comparisons)
    assert claim.verdict != "not testable"


def test_claims_with_every_methods_own_step_size_use_the_chosen_scores(tmp_path):
    run = made_up(tmp_path, **{"fedavg": (0.2, 0.6), "gmeta-fo": (0.2, 0.9)})
    fedavg = run.data["methods"]["fedavg"]
    fedavg["agents_chosen"] = run.data["methods"]["gmeta-fo"]["agents"]
    (_, as_trained), (_, chosen) = (
        claims._better("fig1", run, "here", lr) for lr in ("as_trained", "chosen")
    )
    assert [c.verdict for c in as_trained.comparisons] == ["held"]
    assert [c.verdict for c in chosen.comparisons] == ["not held"]


def test_summaries_say_what_step_sizes_at_use_were_chosen_by():
    chosen = {"methods": {"fedavg": {"step_sizes": {}}}}
    of = [{"methods": {"fedavg": {}}}, chosen, {"tried": {}}, {**chosen, "rule": "loss"}]
    rules = [summary.Summary(data).rule for data in of]
    assert rules == [summary.ONE, *2 * [summary.ACCURACY_RULE], summary.LOSS_RULE]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A separate directory for summaries, figures and the page."""
    monkeypatch.setattr(WHERE, "results", tmp_path)
    monkeypatch.setattr(WHERE, "page", tmp_path / "results.md")
    summary.summary.cache_clear()
    yield tmp_path
    summary.summary.cache_clear()


@pytest.mark.usefixtures("no_report")  # which other tests look at
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(("fig1", "tuning", "tuned", "fair-fig1"), id="some"),
        pytest.param(tuple(STAGES), id="all", marks=pytest.mark.slow),
    ],
)
def test_stages_run_to_their_end_and_are_on_the_page(tmp_path, stages):
    """`make paper` on a few digits: every search, run, summary, claim, figure and table."""
    text = run_all(tmp_path, stages).read_text("utf-8")
    whole = stages == tuple(STAGES)
    assert ("Not run yet" not in text) == whole and "nan" not in text
    assert {path.stem for path in (tmp_path / "results").glob("*.json")} == set(stages)
    images = set(re.findall(r"\(results/(\S+)\)", text))
    drawn = {path.name for path in (tmp_path / "results").glob("*.svg")}
    every = {f"{name}.svg" for name in (*FIGURES, *["delta", "alpha", "heat", "compute"])}
    assert images == drawn and (drawn == every if whole else "fig1.svg" in drawn)
    for stage in {"fair-fig1", "tuned", "writers"} & set(stages):
        run = load_run(tmp_path / "runs" / stage)
        assert run.step_sizes_chosen and not run.failures
        for row in run.rows():
            if row.kind == "method" and stage == "fair-fig1":
                steps = run.config.steps_of(row.name)[0]
                means = [
                    np.mean([s.score[steps] for s in trained.final if s.seen])
                    for trained in run.methods[row.name].values()
                ]  # the page's intervals are over seeds, however few
                found = Estimate.of(means)
                assert f"{100 * found.mean:.1f} ± {100 * found.half_width:.1f} %" in text
    assert not load_run(tmp_path / "runs" / "fig1").step_sizes_chosen
    assert "not kept" not in text
    assert not whole or "nufed's rule | `fair-standardised`, `tuning`" in text
    for cells in (line.count("|") for line in text.splitlines() if line.startswith("|")):
        assert cells >= 3


def test_a_short_figure_1_on_real_data_from_run_to_page(real_data, nufed, tmp_path, results):
    rounds = ["rounds=2", "eval_every=1", "data.agents=10", "data.dirichlet=0.5", "engine=direct"]
    done = nufed("run", "fig1-smoke", "--seeds", 3, *rounds, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert run.config.seeds == [0, 1, 2] and not run.failures
    hessian_free, exact = (
        [s.score for s in run.methods[m][0].scores] for m in ("gmeta-hf", "gmeta-exact")
    )
    assert np.allclose(hessian_free, exact, atol=0.006)  # one test sample of 200

    (tmp_path / "fig1.json").write_text(json.dumps(summary.summarise_run("fig1", run, 60.0)))
    text = page.write().read_text("utf-8")
    row = next(r for r in run.rows() if r.name == "gmeta-exact")
    assert f"{100 * row.personal.mean:.1f} ± {100 * row.personal.half_width:.1f} %" in text
    assert f"{100 * row.balanced.mean:.1f} ±" in text and f"{100 * row.minority.mean:.1f} ±" in text
    assert "gmeta-fo against per-fedavg-fo" in text and "Not run yet: fig2" in text
    assert (tmp_path / "fig1.svg").stat().st_size > 10_000


def test_a_search_may_end_with_methods_of_fixed_steps_only():
    tables = STAGES["tuning"].config()
    for points, shares in (({"per-fedavg-fo": [(1, 5)]}, False), ({"gmeta-fo": [(1, 5)]}, True)):
        config = tuning.tables_of(tables, {**points, "fedavg": [(0, 1)]})
        assert ("adapt_steps" in config["method"]) == shares
        assert load_config(config).algorithms()  # unused keys are refused
