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
from nufed.algorithms import ALGORITHMS, fedavg
from nufed.evaluate import (
    AgentScores,
    Measure,
    Scoring,
    choose_step_sizes,
    evaluate_with_choice,
    preferred,
)
from nufed.lab.bundle import load_bundle
from nufed.lab.config import problem as build
from nufed.meta.curvature import FirstOrder
from nufed.simulation import BatchedEngine, DirectEngine, WorkerEngine
from support import federation, file_hashes, mlp

ACCURACY, LOSS = Measure("accuracy"), Measure("loss", None)


def measured(loss, score=lambda scale, step: 0.5, steps=3, agents=12, unseen=(), groups=0):
    """A function that scores agents, from loss and score as functions of scale, step and, for the
    loss, agent (and group of samples)."""

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
                    tuple(loss(scale if s else 0, s, agent) for s in range(steps + 1)),
                    tuple(score(scale, s) - 0.01 * agent for s in range(steps + 1)),
                    group_loss=tuple(
                        tuple(loss(scale if s else 0, s, 100 * agent + g) for g in range(groups))
                        for s in range(steps + 1)
                    ),
                )
                for agent in range(agents)
            ]
            for scale in scales
        ]

    validate.asked = []
    return validate


def valley(best, start=9.0):
    """A loss that rises with the distance from the best scale, which is 3^best(steps), equally for
    all agents; ``start`` without a step."""
    return lambda scale, step, agent: (
        abs(math.log(scale, 3) - best(step)) + 0.1 * agent if scale else start
    )


def noisy(losses, spread):
    """The loss of ``losses(scale)``, with agents of which about half prefer larger steps and half
    smaller ones: on average steps of three times the size seem better by spread/10."""

    def loss(scale, step, agent):
        slope = (-1) ** agent - 0.1
        return losses(scale) + (spread * slope * math.log(scale, 3) if scale else 0)

    return loss


def choices(validate, steps=(1,), prefer="trained", measure=ACCURACY):
    return choose_step_sizes(validate, list(steps), measure, prefer)


def test_every_number_of_steps_gets_its_own_scale():
    validate = measured(valley(lambda step: 2 - step))
    sizes = choices(validate, [1, 2, 3])
    assert [choice.scale for choice in sizes.chosen] == [3.0, 1.0, 3.0**-1]
    assert [sizes.scale(s) for s in (0, 1, 2, 3)] == [1.0, 3.0, 1.0, 3.0**-1]
    assert {3.0**k for k in range(-2, 3)} < set(sizes.tried)
    assert sorted(validate.asked) == list(sizes.tried)  # each once
    assert sizes.gradients == 12 * 3 * len(sizes.tried)  # agents, steps, scales
    assert not any(choice.at_edge for choice in sizes.chosen)
    assert sizes.chosen[0].loss == pytest.approx(0.55)  # the mean over agents
    assert (sizes.agents, sizes.samples) == (12, 60)


@pytest.mark.parametrize(("best", "last"), [(4, 5), (-5, -6), (9, 6), (-9, -6)])
def test_the_grid_is_extended_until_the_best_lies_inside_or_at_six_factors(best, last):
    validate = measured(valley(lambda step: best, start=99))
    sizes = choices(validate, [1, 2, 3])
    assert {choice.scale for choice in sizes.chosen} == {3.0 ** max(-6, min(6, best))}
    assert {choice.at_edge for choice in sizes.chosen} == {abs(best) > 6}
    tried = [sizes.tried[0], sizes.tried[-1]]
    assert tried == ([3.0**-2, 3.0**last] if last > 0 else [3.0**last, 3.0**2])


def test_the_grid_is_refined_to_factors_of_a_half_around_the_best():
    sizes = choices(measured(valley(lambda step: math.log(2.25, 3))))
    assert sizes.chosen[0].scale == 2.0  # of 1.33, 2, 3 and 4.5
    near = [scale for scale in sizes.tried if 1 < scale < 9]
    ratios = np.divide(near[1:], near[:-1])
    assert ratios.max() <= 1.5 + 1e-12


def test_the_grid_is_refined_where_instability_begins():
    """A narrow optimum beyond the coarse grid's best, below the first scale that diverges."""

    def loss(scale, step, agent):
        return math.inf if scale > 5 else 0.1 if scale > 4 else 1 if scale > 1 else 0.5 + scale / 9

    sizes = choices(measured(lambda scale, step, agent: loss(scale, step, agent) if scale else 2.0))
    assert sizes.chosen[0].scale == 4.5


def test_divergence_stops_the_extension():
    def loss(scale, step, agent):
        return math.nan if scale > 9 else 5 - math.log(scale or 1e-9, 3)

    sizes = choices(measured(loss))
    assert sizes.tried[-1] == 27.0 and sizes.chosen[0].scale == 9.0
    assert not sizes.chosen[0].at_edge


def test_a_scale_with_a_diverging_agent_ranks_last():
    def loss(scale, step, agent):
        return math.inf if agent == 1 and scale > 1 else 3 - scale / 100

    assert choices(measured(loss), [3]).chosen[0].scale == 1.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("prefer", ["trained", "smallest", "best"])
def test_a_model_that_diverged_at_every_scale_has_a_choice(prefer, value):
    diverged = measured(lambda scale, step, agent: value)
    assert choices(diverged, [1, 2], prefer).scale(2) in (0.0, 3.0**-6)


def test_the_loss_decides_and_the_score_breaks_ties():
    higher = measured(valley(lambda step: -1), lambda scale, step: scale / 100)
    assert choices(higher).chosen[0].scale == 3.0**-1
    flat = measured(lambda scale, step, agent: 1.0 if scale else 2.0, lambda c, s: -abs(c - 3))
    (choice,) = choose_step_sizes(flat, [1], ACCURACY, "best").chosen
    assert choice.scale == 3.0
    (choice,) = choose_step_sizes(flat, [1], LOSS, "best").chosen  # lower is better
    assert choice.scale == 3.0**-6 or choice.scale == 3.0**6


def test_within_one_standard_error_the_trained_step_size_is_kept():
    """A lower loss by luck, in a part of the agents, does not move the choice; a clear one does."""
    lucky = measured(noisy(lambda scale: 1.0 if scale else 9.0, spread=0.3))
    assert choices(lucky).scale(1) == 1.0
    assert choices(lucky, prefer="best").scale(1) == 3.0**6
    clear = measured(noisy(lambda c: 1 + abs(math.log(c, 3) - 1) if c else 9.0, spread=0.3))
    assert choices(clear).scale(1) == 3.0


def test_a_model_that_was_not_trained_for_a_step_size_takes_the_smallest_good_one():
    """Between 1/3 and 3 losses differ by less than their noise; beyond they are higher."""

    def losses(scale):
        return 9.0 if not scale else 1 + 5 * max(0, abs(math.log(scale, 3)) - 1)

    flat = measured(noisy(losses, spread=0.1), agents=40)
    assert choices(flat, prefer="best").scale(1) == 3.0
    assert choices(flat, prefer="smallest").scale(1) == 3.0**-1
    assert choices(flat, prefer="trained").scale(1) == 1.0


@pytest.mark.parametrize("prefer", ["trained", "smallest"])
def test_no_step_is_taken_where_none_gains(prefer):
    harm = measured(noisy(lambda scale: 1 + scale, spread=0.001))
    sizes = choices(harm, [2], prefer=prefer)
    assert sizes.scale(2) == 0 and 0.0 not in sizes.tried
    assert sizes.chosen[0].loss == pytest.approx(1, abs=0.01)
    assert list(sizes.notes(2)) == [
        "no step size clearly lowers the loss on validation samples: no step is taken."
    ]


def test_a_trained_step_size_that_harms_is_never_chosen():
    """The trained one harms a little, within noise, and a smaller one may gain."""

    def losses(scale):
        return {0: 1.0}.get(scale, 1.02 if scale == 1 else 0.99 if scale < 1 else 3.0)

    assert choices(measured(noisy(losses, 0.001))).scale(1) < 1
    assert choices(measured(noisy(losses, 0.2))).scale(1) == 0  # it can't be told


def test_too_few_samples_keep_what_was_trained_and_say_so():
    few = measured(noisy(lambda scale: 1.0 - 0.01 * (scale > 0), spread=1.0), agents=3)
    sizes = choices(few, [1])
    (note,) = [note for note in sizes.notes(1) if "edge" not in note]
    assert sizes.chosen[0].undecided and sizes.scale(1) == 1.0
    assert "too small to choose a step size: on 15 samples of 3 agents" in note


def test_below_ten_agents_the_standard_error_is_over_samples():
    """Agents that differ widely, whose samples all agree that 3 is better than 1."""

    def loss(scale, step, unit):
        agent = unit if unit < 100 else unit // 100
        return 5 - (0.1 + 0.5 * (agent == 1)) * (scale == 3) - (scale > 0) - abs(scale - 3) / 1e6

    alone = choices(measured(loss, agents=2))  # the agents' differences alone are too uncertain
    assert alone.scale(1) == 1.0
    assert choices(measured(loss, agents=2, groups=10)).scale(1) == 3.0


def test_where_less_is_better_the_lowest_loss_is_chosen():
    assert choices(measured(valley(lambda step: -1)), [2], measure=LOSS).scale(2) == 3.0**-1


def test_unseen_agents_and_those_without_every_reply_are_excluded():
    right = measured(valley(lambda step: 1), agents=12)

    def validate(scales):
        scores = right(scales)
        liars = measured(valley(lambda step: -6), agents=14, unseen=[12])(scales)
        for scale, own, lies in zip(scales, scores, liars, strict=True):
            own.append(lies[12])  # unseen
            if scale >= 1 / 9:
                own.append(lies[13])  # seen, and missing when the grid is extended
        return scores

    assert choices(validate).chosen[0].scale == 3.0
    nobody = measured(valley(lambda step: 1), agents=1, unseen=[0])
    assert choices(nobody) is None
    kept = evaluate_with_choice(right, nobody, 3, ACCURACY, "trained")
    assert kept.chosen is None and len(kept.as_trained) == 12


def test_scores_of_no_step_are_those_before_fine_tuning():
    def score(scale, step):
        return 0.9 - 0.1 * step * scale

    harm = measured(lambda scale, step, agent: 1 + scale * step, score, steps=2)
    found = evaluate_with_choice(harm, harm, 2, ACCURACY, "trained")
    assert [found.scale(s) for s in (1, 2)] == [0, 0]
    assert found.chosen[0].score == (0.9, 0.9, 0.9)
    assert found.as_trained[0].score == pytest.approx((0.9, 0.8, 0.7))


def test_methods_say_whether_their_training_uses_the_step_size():
    trained = {name for name in ALGORITHMS if preferred(ALGORITHMS[name]()) == "trained"}
    assert trained == {"gmeta", "per_fedavg", "anil", "fedl2p"}


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
        algorithm, server, states, Scoring(2, ACCURACY, [1.0, 3.0], "validation")
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
    how = Scoring(2, ACCURACY, [1 / 3, 9.0], "validation")
    alone = engine.evaluate_scales(algorithm, server, states, how)
    with WorkerEngine(engine, 2) as workers:
        assert workers.evaluate_scales(algorithm, server, states, how) == alone


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

            def mean(scale, s=s, validation=validation):
                seen = [agent.loss[s] for agent in validation[scale] if agent.seen]
                return np.nan_to_num(np.mean(seen), nan=np.inf)

            start = np.mean([a.loss[0] for a in validation[1.0] if a.seen])
            best = min(sizes.tried, key=mean)
            assert own.gain == pytest.approx(start - mean(best), rel=1e-4)
            assert own.scale == 0 or mean(own.scale) < start
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
