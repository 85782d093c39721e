"""Tables show the global and personal model, every setting, and a newcomer's cost."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

import nufed as library
from nufed.algorithms import Cost
from nufed.lab.report.tables import (
    agents_table,
    between_runs,
    costs_table,
    methods_table,
    newcomer_notes,
    results_table,
)
from nufed.lab.runs.records import by_group

CONFIG = {
    "rounds": 2,
    "workers": 1,
    "baselines": ["majority"],
    "data": {"agents": 6, "samples_per_agent": 30, "unseen_agents": 2, "dirichlet": 0.5},
    "method": {"batch_size": 6},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "hf": {
            "algorithm": "gmeta",
            "curvature": "hessian_free",
            "aggregation": "trimmed",
            "trim": 0.1,
        },
        "ditto": {"algorithm": "ditto", "personal_steps": 3, "weight": 0.5},
        "scaffold": {"algorithm": "scaffold", "server_lr": 0.5},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return library.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run", figures=False)


def cells(table):
    return {row[0]: dict(zip(table.headings[1:], row[1:], strict=True)) for row in table.rows}


def test_the_table_of_methods_shows_every_setting_of_each(run):
    found = cells(methods_table([run]))
    names = {re.sub(r" \(.*\)", "", key) for key in found}
    for algorithm in run.config.algorithms().values():
        assert {field.name for field in library.settings.settings_of(type(algorithm))} <= names
    assert found["weight (λ)"] == {"fedavg": "–", "hf": "–", "ditto": "0.5", "scaffold": "–"}
    assert found["server_lr (η_g)"]["scaffold"] == "0.5"
    assert found["personal_steps (τ_v)"]["ditto"] == "3"
    assert found["curvature"]["hf"] == "hessian_free, fd_step auto"
    assert found["aggregation"]["hf"] == "trimmed, trim 0.1"
    assert found["aggregation"]["ditto"] == "mean, averaging uniform"
    assert found["adapt_steps (ν)"]["fedavg"] == "0"  # fixed by the algorithm
    assert found["algorithm"]["fedavg"] == "FedAvg"
    counts = [sum(cell != "–" for cell in row.values()) for row in found.values()]
    assert counts == sorted(counts, reverse=True)  # the most common settings first


def test_agents_have_a_global_and_a_personal_score(run):
    table = agents_table(run)
    assert table.headings[3:15] == [
        *(f"of class {k}" for k in range(10)),
        "fedavg: global",
        "personal",
    ]
    counts = {agent.name: agent.counts for agent in run.splits[0].agents}
    assert all([int(x) for x in row[3:13]] == counts[row[0].split(",")[0]] for row in table.rows)
    found = {row[0].removesuffix(", unseen"): row for row in table.rows}
    place = table.headings.index("ditto after 0 steps: global")
    (steps,) = run.config.steps_of("ditto")
    for s in run.methods["ditto"][0].final:
        shown = found[s.name][place : place + 2]
        assert shown[0] == f"{100 * s.global_score:.1f} %"
        score, width = shown[1].split(" ± ")
        assert score == f"{100 * s.score[steps]:.1f} %"
        wanted = 1.96 * np.std(s.resampled[steps]) or 3 / s.test_samples  # all right or all wrong
        assert width == f"{100 * min(1, wanted):.1f} %"


def test_results_name_global_personal_and_harmed(run):
    found = cells(results_table([run], "seen"))
    assert list(found["hf"])[:2] == ["global", "personal"] and "harmed" in found["hf"]
    scores = [s for s in run.methods["ditto"][0].final if s.seen]
    (steps,) = run.config.steps_of("ditto")
    harmed = sum(s.score[steps] < s.global_score for s in scores) / len(scores)
    assert found["ditto after 0 steps"]["harmed"] == f"{100 * harmed:.0f} %"
    assert found["majority"]["global"] == found["majority"]["harmed"] == "–"


def test_what_a_newcomer_does_is_stated_and_its_cost_counted(run):
    costs = cells(costs_table([run]))
    steps = {name: run.config.steps_of(name)[0] for name in run.methods}
    newcomer = {name: row["gradients of a newcomer"] for name, row in costs.items()}
    assert newcomer["ditto"] == f"3 + {steps['ditto']}"
    assert newcomer["hf"] == f"0 + {steps['hf']}"
    notes = dict(newcomer_notes([run]))
    assert notes["ditto"] == library.algorithms.Ditto.notes.newcomer
    page = (run.path / "report.html").read_text()
    assert all(f"{what} ({names})" in page for names, what in notes.items())


def test_metrics_have_the_global_models_score_in_every_round(run):
    """Of Ditto it is not the personal model's after 0 steps; private heads have none."""
    for name in ("ditto", "fedavg"):
        trained = run.methods[name][0]
        for group, seen in (("seen", True), ("unseen", False)):
            own = [s.global_score for s in trained.scores if s.seen == seen]
            found = trained.metrics[-1].evaluation[group]
            assert found.global_score == pytest.approx(np.mean(own))
            same = found.global_score == found.score[0]
            assert same or name == "ditto"
    without = [replace(s, global_score=None) for s in trained.scores]
    assert "global_score" not in by_group(without, 1, run.measure)["seen"]


@dataclass(frozen=True)
class WithProducts(library.algorithms.Ditto):
    """Ditto that reports Hessian-vector products for its personal models."""

    def personal_model(self, context, received, state):
        made = super().personal_model(context, received, state)
        return replace(made, cost=made.cost + Cost(hvps=5))


def test_the_cost_of_a_newcomer_without_unseen_agents(tmp_path):
    """Measured on agents that never took part; where all did, it is not known."""
    data = {**CONFIG["data"], "unseen_agents": 0, "validation": 0.2}
    config = {**CONFIG, "data": data, "methods": {"ditto": CONFIG["methods"]["ditto"]}}
    own = {"products": WithProducts(personal_steps=3, batch_size=6)}

    def newcomers(participation, name):
        settings = {**config, "participation": participation}
        run = library.run(settings, methods=own, out=tmp_path / name, figures=False)
        took_part = {agent for m in run.methods["products"][0].metrics for agent in m.cohort}
        assert all(s.newcomer == (s.agent not in took_part) for s in run.methods["ditto"][0].scores)
        costs = cells(costs_table([run]))
        sizes = run.methods["products"][0].step_sizes
        lines = run.methods["products"][0].metrics
        scored = [line.evaluation_hvps for line in lines if line.evaluation]
        assert scored[0] == 5 * 6 and scored[-1] == 5 * 6 + sizes.hvps == 2 * 5 * 6
        assert costs["products"]["gradients of evaluation"].endswith(f" and {sum(scored)} HVPs")
        return {name: row["gradients of a newcomer"] for name, row in costs.items()}

    assert newcomers(0.2, "few") == {"ditto": "3 + 0", "products": "3 and 5 HVPs + 0"}
    assert newcomers(1.0, "all") == {"ditto": "–", "products": "–"}


def test_local_training_has_a_column_among_the_agents(tmp_path):
    config = {**CONFIG, "baselines": ["local"], "methods": {"fedavg": {"algorithm": "fedavg"}}}
    run = library.run(config, ["data.agents=21"], out=tmp_path / "run", figures=False)
    table = agents_table(run)
    assert table.headings[3:] == ["local", "fedavg: global", "personal"]  # more than a few agents
    (line,) = [line for line in run.lines() if line.name == "local"]
    scores = {s.agent: f"{100 * s.score[0]:.1f} %" for s in line.seeds[0].final}
    assert [row[3] for row in table.rows] == [scores[agent] for agent in sorted(scores)]


def test_runs_with_the_same_splits_are_compared_in_pairs(run, tmp_path, nufed):
    """And where splits differ, that is said."""
    own = {**CONFIG, "methods": {name: CONFIG["methods"][name] for name in ("fedavg", "hf")}}
    more = library.run(own, ["rounds=12"], out=tmp_path / "more", figures=False)
    other = library.run(own, ["data.dirichlet=5.0"], out=tmp_path / "other", figures=False)
    table, reasons = between_runs([run, more, other], "seen")
    assert reasons == ["other − run: no paired differences, since their splits differ"]
    assert {row[0] for row in table.rows} == {"more − run: fedavg", "more − run: hf"}
    lines = [{line.label: line for line in each.lines()} for each in (run, more)]
    for row in table.rows:
        method = row[0].split(": ")[1]
        before, after = (
            {s.agent: s.score[own[method].steps] for s in own[method].seeds[0].final if s.seen}
            for own in lines
        )
        gain = 100 * np.mean([after[agent] - before[agent] for agent in before])
        shown = row[1].split(" ± ")[0].replace("−", "-").replace("equal", "0")
        assert float(shown) == pytest.approx(gain, abs=0.051)
    assert between_runs([run, other], "unseen")[1] == []  # said once
    paths = (run.path, more.path, other.path)
    said = nufed("report", *paths, "--out", "all", "--no-figures", cwd=tmp_path)
    assert said.returncode == 0 and "since their splits differ\n" in said.stdout
    assert "paired differences, agents seen in training" in said.stdout
    page = (tmp_path / "all/report.html").read_text()
    assert "Paired differences between runs, agents seen" in page and reasons[0] in page
