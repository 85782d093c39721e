"""Step sizes of fine-tuning chosen at evaluation: the rule, and that it reads no test data."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nufed
from nufed import GMeta, InputError, Objective
from nufed.algorithms import fedavg
from nufed.bundle import load_bundle
from nufed.config import build
from nufed.evaluate import AgentScores, Measure, choose_step_sizes, evaluate_with_choice
from nufed.meta.curvature import FirstOrder
from nufed.simulation import BatchedEngine, DirectEngine, WorkerEngine
from support import federation, file_hashes, mlp

ACCURACY, LOSS = Measure("accuracy"), Measure("loss", None)


def measured(score, loss=lambda scale, step: 1.0, steps=3, agents=2, unseen=()):
    """A function that scores agents, from score and loss as functions of scale and step."""

    def validate(scales):
        validate.asked += scales
        return [
            [
                AgentScores(
                    agent,
                    str(agent),
                    agent not in unseen,
                    9,
                    5,
                    tuple(loss(scale, s) for s in range(steps + 1)),
                    tuple(score(scale, s) - 0.01 * agent for s in range(steps + 1)),
                )
                for agent in range(agents)
            ]
            for scale in scales
        ]

    validate.asked = []
    return validate


def peak(best):
    """A score that falls with the distance from the best scale, which is 3^best(steps)."""
    return lambda scale, step: 1 - abs(math.log(scale, 3) - best(step)) / 100


def test_every_number_of_steps_gets_its_own_scale():
    validate = measured(peak(lambda step: 2 - step))
    sizes = choose_step_sizes(validate, [1, 2, 3], ACCURACY)
    assert [own.scale for own in sizes.chosen] == [3.0, 1.0, 3.0**-1]
    assert [sizes.scale(s) for s in (0, 1, 2, 3)] == [1.0, 3.0, 1.0, 3.0**-1]
    assert sizes.tried == tuple(3.0**k for k in range(-2, 3))
    assert sizes.gradients == 2 * 3 * 5  # agents, steps, scales
    assert not any(own.at_edge for own in sizes.chosen)
    assert sizes.chosen[0].score == pytest.approx(1 - 0.005)  # the mean over both agents


@pytest.mark.parametrize(("best", "last"), [(4, 5), (-5, -6), (9, 6), (-9, -6)])
def test_the_grid_is_extended_until_the_best_lies_inside_or_at_six_factors(best, last):
    validate = measured(peak(lambda step: best))
    sizes = choose_step_sizes(validate, [1, 2, 3], ACCURACY)
    assert {own.scale for own in sizes.chosen} == {3.0 ** max(-6, min(6, best))}
    assert {own.at_edge for own in sizes.chosen} == {abs(best) > 6}
    tried = [round(math.log(scale, 3)) for scale in sizes.tried]
    assert tried == (list(range(-2, last + 1)) if last > 0 else list(range(last, 3)))
    assert sorted(validate.asked) == list(sizes.tried)  # each once


def test_divergence_stops_the_extension():
    def score(scale, step):
        return math.nan if scale > 9 else math.log(scale, 3) / 10

    sizes = choose_step_sizes(measured(score), [1], ACCURACY)
    assert sizes.tried[-1] == 27.0 and sizes.chosen[0].scale == 9.0
    assert not sizes.chosen[0].at_edge


def test_a_scale_with_a_diverging_agent_ranks_worst():
    def validate(scales):
        scores = measured(lambda scale, step: 0.5 + scale / 100)(scales)
        for scale, own in zip(scales, scores, strict=True):
            if scale > 1:
                own[1] = replace(own[1], score=(math.nan,) * 4, loss=(math.inf,) * 4)
        return scores

    assert choose_step_sizes(validate, [3], ACCURACY).chosen[0].scale == 1.0


def test_ties_go_to_the_lower_loss_and_then_to_the_smaller_step():
    flat = measured(lambda scale, step: 0.5, lambda scale, step: abs(math.log(scale, 3) - 1))
    assert choose_step_sizes(flat, [1], ACCURACY).chosen[0].scale == 3.0
    equal = choose_step_sizes(measured(lambda scale, step: 0.5), [1], ACCURACY)
    assert equal.chosen[0].scale == 3.0**-6 and equal.chosen[0].at_edge


def test_where_less_is_better_the_lowest_loss_is_chosen():
    def loss(scale, step):
        return 1 + abs(math.log(scale, 3) + 1)

    assert choose_step_sizes(measured(loss, loss), [2], LOSS).chosen[0].scale == 3.0**-1


def test_unseen_agents_and_those_without_every_reply_are_excluded():
    right = measured(peak(lambda step: 1), agents=2)

    def validate(scales):
        scores = right(scales)
        liars = measured(peak(lambda step: -6), agents=4, unseen=[2])(scales)
        for scale, own, lies in zip(scales, scores, liars, strict=True):
            own.append(lies[2])  # unseen
            if scale >= 1 / 9:
                own.append(lies[3])  # seen, and missing when the grid is extended
        return scores

    assert choose_step_sizes(validate, [1], ACCURACY).chosen[0].scale == 3.0
    nobody = measured(peak(lambda step: 1), agents=1, unseen=[0])
    assert choose_step_sizes(nobody, [1], ACCURACY) is None
    kept = evaluate_with_choice(right, nobody, 3, ACCURACY)
    assert kept.chosen is None and len(kept.as_trained) == 2


def engine_of(kind, algorithm, data):
    torch.manual_seed(1)
    return kind(Objective(mlp()), data, 3)


@pytest.mark.parametrize("kind", [DirectEngine, BatchedEngine])
@pytest.mark.parametrize(
    "algorithm",
    [
        fedavg(adapt_lr=0.1, batch_size=6),
        GMeta(adapt_steps=1, adapt_lr=0.1, rates_lr=0.1, batch_size=6),
    ],
)
def test_a_scale_multiplies_the_step_size(kind, algorithm):
    data = federation(validation=0.25, dtype=np.float64)
    engine = engine_of(kind, algorithm, data)
    server = algorithm.server_init(engine.objective, engine.objective.initial())
    states = {agent: {} for agent in data.split.agents}
    found = engine.evaluate_scales(
        algorithm,
        server,
        states,
        steps=2,
        measure=ACCURACY,
        scales=[1.0, 3.0],
        part="validation",
    )
    plain = [fedavg(adapt_lr=lr, batch_size=6) for lr in (0.1, 3.0 * 0.1)]
    for scores, own in zip(found, plain, strict=True):
        other = DirectEngine(engine.objective, data.scoring("validation"), 3)
        right = other.evaluate(own, server, states, steps=2, measure=ACCURACY)
        for a, b in zip(scores, right, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-12) and a.score == b.score
    assert found[0] != found[1]


def test_workers_give_the_same_scores_by_scale():
    algorithm, data = fedavg(adapt_lr=0.1, batch_size=6), federation(validation=0.25)
    engine = engine_of(DirectEngine, algorithm, data)
    server = {"model": engine.objective.initial()}
    states = {agent: {} for agent in data.split.agents}
    how = {"steps": 2, "measure": ACCURACY, "scales": [1 / 3, 9.0], "part": "validation"}
    alone = engine.evaluate_scales(algorithm, server, states, **how)
    with WorkerEngine(engine, 2) as workers:
        assert workers.evaluate_scales(algorithm, server, states, **how) == alone


CONFIG = {
    "rounds": 4,
    "eval_every": 2,
    "participation": 0.5,
    "data": {
        "dirichlet": 0.3,
        "agents": 8,
        "samples_per_agent": 40,
        "validation": 0.2,
        "test": 0.2,
        "unseen_agents": 2,
    },
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.02, "meta_lr": 0.2, "batch_size": 8},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("chosen") / "run")


def test_a_run_shows_both_and_says_what_was_chosen(run):
    results = json.loads((run.path / "results.json").read_text())
    assert results["eval_lr"] == "chosen" and results["notes"] == []
    page = (run.path / "report.html").read_text("utf-8")
    assert (
        "As trained: fine-tuned with the step size of training" in page
        and "as trained</th>" in page
    )
    for row in run.rows():
        if row.kind != "method":
            continue
        (trained,) = run.methods[row.name].values()
        scale = trained.step_sizes.scale(2)
        group = [s for s in trained.chosen if s.seen == (row.group == "seen")]
        assert row.personal.mean == pytest.approx(np.mean([s.score[2] for s in group]))
        group = [s for s in trained.scores if s.seen == (row.group == "seen")]
        assert row.as_trained.mean == pytest.approx(np.mean([s.score[2] for s in group]))
        assert row.lr_scale == (scale,) and row.adapt_lr == (scale * 0.02,)
    costs = run.costs("fedavg")
    sizes = run.methods["fedavg"][0].step_sizes
    scales = {1.0, *(own.scale for own in sizes.chosen)}
    assert sizes.gradients == 6 * 2 * len(sizes.tried)  # seen agents, steps, scales
    evaluations = 8 * 2 * 2 + sizes.gradients + 8 * 2 * len(scales)  # rounds 0 and 2, and 4
    assert costs["evaluation_gradients"] == evaluations


def test_the_chosen_scores_are_those_of_that_step_size(run):
    """What was chosen, from the saved model and an algorithm with that very step size."""
    samples = build.build_samples(run.config.data)
    federation = build.build_federation(run.config, samples, 0)
    module = build.build_module(run.config, samples, 0)
    objective = build.build_objective(run.config, module, build.build_loss(run.config, samples))
    states = {agent: {} for agent in federation.split.agents}

    def scored(model, lr, part):
        engine = DirectEngine(objective, federation.scoring(part), 0)
        own = GMeta(
            adapt_steps=0,
            adapt_lr=lr,
            meta_lr=0.2,
            local_steps=4,
            batch_size=8,
            curvature=FirstOrder(),
        )
        return engine.evaluate(own, model, states, steps=2, measure=ACCURACY)

    for name, part in run.methods.items():
        model = load_file(run.path / "methods" / name / "seed-0" / "model.safetensors")
        sizes = part[0].step_sizes
        validation = {c: scored(model, 0.02 * c, "validation") for c in sizes.tried}
        for own in sizes.chosen:
            s = own.steps

            def rank(scale, s=s, validation=validation):
                seen = [agent for agent in validation[scale] if agent.seen]
                means = np.mean([(agent.score[s], -agent.loss[s]) for agent in seen], axis=0)
                return *np.nan_to_num(means, nan=-np.inf), -scale

            assert own.scale == max(sizes.tried, key=rank)
            right = scored(model, 0.02 * own.scale, "test")
            for mine, other in zip(part[0].chosen, right, strict=True):
                assert mine.score[s] == other.score[s]
                assert mine.loss[s] == pytest.approx(other.loss[s], rel=1e-4)


def test_spoiling_every_test_sample_changes_no_choice(run, tmp_path):
    samples = build.build_samples(run.config.data)
    inputs, targets = samples.inputs.clone(), samples.targets.clone()
    rows = np.concatenate(build.build_federation(run.config, samples, 0).split.test)
    inputs[rows], targets[rows] = 255 - inputs[rows], (targets[rows] + 5) % 10
    spoiled = replace(samples, inputs=inputs, targets=targets)
    split = str(run.path / "splits" / "seed-{seed}.safetensors")
    other = nufed.run(CONFIG, [f"data.split_file={split}"], data=spoiled, out=tmp_path / "other")
    for kind in ("methods", "baselines"):
        for file in sorted((run.path / kind).rglob("step-sizes.json")):
            there = other.path / file.relative_to(run.path)
            assert there.read_bytes() == file.read_bytes()
    assert other.methods["fo"][0].chosen != run.methods["fo"][0].chosen


def test_workers_and_a_repetition_give_the_same_files(run, tmp_path):
    other = nufed.run(CONFIG, ["workers=1"], out=tmp_path / "again")
    right = {n: h for n, h in file_hashes(run.path).items() if n != "config.toml"}
    assert {n: h for n, h in file_hashes(other.path).items() if n != "config.toml"} == right
    assert "methods/fo/seed-0/agents-chosen.jsonl" in right


def test_bundles_and_their_cards_use_what_was_chosen(run):
    bundle = load_bundle(run.path / "bundles" / "fedavg.nufed")
    scale = run.methods["fedavg"][0].step_sizes.scale(2)
    assert bundle.about.adapt.lr == scale * 0.02 and bundle.about.adapt.lr_scale == scale
    assert f"{scale:.3g} times that of training" in bundle.card
    seen = [s.score[2] for s in run.methods["fedavg"][0].chosen if s.seen]
    assert bundle.about.measured["groups"]["seen"]["personal"] == pytest.approx(np.mean(seen))


@pytest.mark.parametrize(
    ("override", "why"),
    [("data.validation=0.0", "no validation samples"), ("eval_lr=as_trained", "eval_lr is as_tra")],
)
def test_without_a_choice_fedavgs_step_size_is_called_arbitrary(override, why, tmp_path):
    run = nufed.run(CONFIG, [override, "rounds=1"], out=tmp_path / "run")
    (note,) = run.to_json()["notes"]
    assert why in note and "arbitrary" in note
    assert why in (run.path / "report.html").read_text("utf-8")
    assert run.to_json()["eval_lr"] == "as_trained"
    assert not list(run.path.rglob("step-sizes.json"))
    assert load_bundle(run.path / "bundles" / "fo.nufed").about.adapt.lr_scale is None


def test_it_can_be_chosen_in_every_evaluated_round(tmp_path):
    run = nufed.run(CONFIG, ["eval_lr=chosen_by_round"], out=tmp_path / "run")
    lines = [m for m in run.methods["fo"][0].metrics if m.evaluation]
    assert [m.round for m in lines] == [0, 2, 4]
    assert all(len(m.scales) == 2 and "seen" in m.evaluation_chosen for m in lines)
    last = run.methods["fo"][0]
    seen = [s.score[2] for s in last.chosen if s.seen]
    assert lines[-1].evaluation_chosen["seen"].score[2] == pytest.approx(np.mean(seen))
    assert "chosen in every round" in (run.path / "report.html").read_text("utf-8")


def test_training_alone_is_tuned_on_validation_samples(tmp_path):
    overrides = ["tune_local=true", "method.meta_lr=0.002"]
    tuned = nufed.run(CONFIG, overrides, out=tmp_path / "tuned")
    (trained,) = tuned.baselines["local"].values()
    (own,) = trained.step_sizes.chosen
    assert own.scale > 1 and own.steps == 0  # 0.002 is much too small
    overrides = [f"method.meta_lr={0.002 * own.scale!r}"]
    plain = nufed.run(CONFIG, overrides, out=tmp_path / "plain")
    assert [s.score[0] for s in plain.baselines["local"][0].scores] == [
        s.score[0] for s in trained.scores
    ]
    row = next(row for row in tuned.rows() if row.name == "local")
    assert row.adapt_lr == (pytest.approx(0.002 * own.scale),)
    with pytest.raises(InputError, match="tune_local = true: agents have no validation part"):
        nufed.run(CONFIG, ["tune_local=true", "data.validation=0.0"], out=tmp_path / "none")
