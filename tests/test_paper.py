"""The paper's experiments: presets, stages, claims and the page, and a short run on real data."""

import json
import re

import numpy as np
import pytest
from paper import claims, page, summary
from paper.__main__ import _without_nothing
from paper.stages import FOUR, GRID, NUS, STAGES

from nufed.runs import load_config, load_run


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


def test_every_stage_has_a_valid_configuration(tmp_path, monkeypatch):
    chosen = {name: {"adapt_lr": 0.1, "meta_lr": 0.01, "score": 0.5} for name in FOUR}
    (tmp_path / "tuning.json").write_text(json.dumps({"chosen": chosen}))
    monkeypatch.setattr("paper.stages.RESULTS", tmp_path)
    configs = {n: load_config(_without_nothing(s.config())) for n, s in STAGES.items()}
    assert len(configs["tuning"].methods) == len(FOUR) * len(GRID["adapt_lr"]) * len(
        GRID["meta_lr"]
    )
    assert configs["tuning"].eval_on == "validation" and configs["tuned"].eval_on == "test"
    assert {a.meta_lr for a in configs["tuned"].algorithms().values()} == {0.01}
    assert configs["steps"].steps_evaluated == max(NUS)
    assert configs["alpha-inf"].data.partition == "iid"
    assert all(configs[s].data.unseen_agents == 10 for s in configs if s.startswith("alpha"))


def made_up(tmp_path, **means):
    """A summary with two evaluations (rounds 0 and 10), five seeds of 40 agents per method."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 0.05, (5, 40))  # agents and seeds are hard alike for all methods
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
    return summary.Summary(
        {"config": {"rounds": 10, "eval_every": 10}, "methods": methods, "baselines": {}}
    )


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
    found = {c.compared: c.verdict for c in claims._better("fig1", "", run)}
    assert found == {
        "gmeta-fo against per-fedavg-fo": "not held",  # equal, to less than what matters
        "gmeta-hf against per-fedavg-hf": "held",
        "gmeta-fo against fedavg": "held",
        "gmeta-hf against fedavg": "held",
        "gmeta-exact against fedavg": "not held",
    }
    faster = {c.compared: c.verdict for c in claims._faster("fig1", run)}
    assert faster["gmeta-fo against fedavg"] == "held"  # there at once
    assert faster["gmeta-hf against fedavg"] == "not held"  # both at the second evaluation
    assert claims.rounds_to(run, "gmeta-fo", 3, 0.79).tolist() == [0] * 5
    assert claims.rounds_to(run, "fedavg", 3, 0.79).tolist() == [10] * 5
    assert claims.rounds_to(run, "fedavg", 3, 0.99).tolist() == [20] * 5  # never


def pretended(stage, config):
    """The summary of a stage with random scores."""
    rng = np.random.default_rng(len(stage))
    agents = 10
    steps = config.steps_evaluated + 1
    rounds = list(range(0, config.rounds + 1, config.eval_every))
    unseen = 2 if config.data.unseen_agents else 0

    def scores():
        return {
            "seen": [i >= unseen for i in range(agents)],
            "minority_samples": rng.integers(0, 5, agents).tolist(),
            **{
                measure: rng.random((agents, steps)).tolist()
                for measure in ("score", "balanced", "minority")
            },
        }

    def curves(name):
        return {"rounds": rounds} | {
            measure: {str(s): rng.random(len(rounds)).tolist() for s in config.steps_of(name)}
            for measure in ("score", "balanced", "minority")
        }

    return {
        "seconds": 60.0,
        "config": json.loads(config.model_dump_json(exclude={"methods"})),
        "methods": {
            name: {
                "steps": config.steps_of(name),
                "gradients": 40 * (algorithm.adapt_steps + 1),
                "hvps": 0,
                "seeds": {str(s): curves(name) for s in config.seeds},
                "agents": {str(s): scores() for s in config.seeds},
            }
            for name, algorithm in config.algorithms().items()
        },
        "baselines": {n: {str(s): scores() for s in config.seeds} for n in config.baselines},
        "chosen": {name: {"adapt_lr": 0.1, "meta_lr": 0.01, "score": 0.5} for name in FOUR},
        "distance": {name: [0.1, 0.2] for name in config.algorithms()},
    }


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A place of its own for summaries, figures and the page."""
    for module in ("stages", "summary", "figures"):
        monkeypatch.setattr(f"paper.{module}.RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "results.md")
    summary.summary.cache_clear()
    yield tmp_path
    summary.summary.cache_clear()


def test_the_page_shows_every_stage(results):
    for stage in ("tuning", *STAGES):  # others need what tuning chose
        config = load_config(_without_nothing(STAGES[stage].config()))
        (results / f"{stage}.json").write_text(json.dumps(pretended(stage, config)))
    text = page.write().read_text("utf-8")
    assert "Not run yet" not in text and "nan" not in text
    images = set(re.findall(r"\(results/(\S+)\)", text))
    assert images == {path.name for path in results.glob("*.svg")} and len(images) == 11
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(sections) == 13
    for cells in (line.count("|") for line in text.splitlines() if line.startswith("|")):
        assert cells >= 3


def test_a_short_figure_1_on_real_data_from_run_to_page(real_data, nufed, tmp_path, results):
    rounds = ["rounds=2", "eval_every=1", "data.agents=10", "data.dirichlet=0.5", "engine=direct"]
    done = nufed("run", "fig1-smoke", "--seeds", 2, *rounds, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert run.config.seeds == [0, 1] and not run.failures
    hessian_free, exact = (
        [s.score for s in run.methods[m][0].scores] for m in ("gmeta-hf", "gmeta-exact")
    )
    assert np.allclose(hessian_free, exact, atol=0.006)  # one test sample of 200

    (run.path / "stage.json").write_text('{"seconds": 60}')
    (tmp_path / "fig1.json").write_text(json.dumps(summary.summarise_run("fig1", run)))
    text = page.write().read_text("utf-8")
    row = next(r for r in run.rows() if r.name == "gmeta-exact")
    assert f"{100 * row.after.mean:.1f} ± {100 * row.after.half_width:.1f} %" in text
    assert f"{100 * row.balanced.mean:.1f} ±" in text and f"{100 * row.minority.mean:.1f} ±" in text
    assert "gmeta-fo against per-fedavg-fo" in text and "Not run yet: fig2" in text
    assert (tmp_path / "fig1.svg").stat().st_size > 10_000
