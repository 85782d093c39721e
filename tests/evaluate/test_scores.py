import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nufed import Federation, InputError, Objective, fedavg
from nufed.algorithms.protocol import Cost
from nufed.data import Samples, Split
from nufed.evaluate import AgentScores, Measure, accuracy, majority_class, score_agent, summarise
from nufed.evaluate.scores import Outputs
from nufed.lab.runs.records import SCORES
from nufed.simulation import DirectEngine
from support import agent_context, federation, mlp

ALGORITHM = fedavg(adapt_lr=0.5, batch_size=6)


def test_scores_equal_a_hand_written_evaluation():
    objective, data = Objective(mlp(torch.float32)), federation(unseen=2)
    engine = DirectEngine(objective, data, seed=4)
    w = objective.initial()
    scores = engine.evaluate(
        ALGORITHM, {"model": w}, {a: {} for a in data.split.agents}, steps=3, measure=Measure("a")
    )
    for agent, got in enumerate(scores):
        x, y = data.samples.take(data.split.test[agent])
        model = w
        batches = data.batches(agent, 4, "evaluate").draw("adapt", 6, 3)
        for step in range(4):
            outputs = objective.predict(model, x)
            assert got.loss[step] == float(torch.nn.functional.cross_entropy(outputs, y))
            assert got.score[step] == (outputs.argmax(1) == y).double().mean()
            if step < 3:
                model = model - 0.5 * objective.grad(model, batches[step])
        assert (got.train_samples, got.test_samples) == (18, 6)
        assert got.seen == (agent not in data.split.unseen)


def test_replacing_test_inputs_changes_no_adapted_model():
    """Adaptation never receives test data."""
    objective, clean = Objective(mlp(torch.float32)), federation()
    inputs = clean.samples.inputs.clone()
    inputs[np.concatenate(clean.split.test)] = float("nan")
    spoiled = Federation(
        type(clean.samples)(inputs, clean.samples.targets, clean.samples.classes), clean.split
    )
    for agent in clean.split.agents:
        models = [
            [
                own["model"]
                for own in ALGORITHM.fine_tune(
                    agent_context(objective, data.batches(agent, 0, "evaluate")),
                    {"model": objective.initial()},
                    {"model": objective.initial()},
                    3,
                )
            ]
            for data in (clean, spoiled)
        ]
        assert all(map(torch.equal, *models))


def test_accuracy_of_a_model_that_is_not_a_classifier():
    nothing = torch.full((4, 3), float("nan"))
    assert math.isnan(accuracy(nothing, torch.zeros(4, dtype=torch.long)))  # argmax returns class 0
    with pytest.raises(InputError, match=r"one output per class.*\(4, 1\)"):
        accuracy(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))


def agent(score, samples=10):
    return AgentScores(
        0, "0", True, 5, samples, loss=(1.0, 2.0), score=score, global_loss=1.0, global_score=0.5
    )


def test_summaries():
    scores = [agent((0.5, 0.1 * i), samples=1 + i) for i in range(11)]
    summary = summarise(scores, 1, Measure("accuracy"))
    assert summary.mean == pytest.approx(0.5)
    assert summary.weighted_mean == pytest.approx(
        np.average(np.arange(11) / 10, weights=np.arange(1, 12))
    )
    assert summary.std == pytest.approx(np.std(np.arange(11) / 10))
    assert summary.deciles == pytest.approx(np.arange(11) / 10)
    assert summary.worst_tenth == pytest.approx(0.05)  # the worst two of eleven
    assert summary.harmed == pytest.approx(5 / 11)
    assert summary.loss == 2.0
    assert summary.global_mean == 0.5
    private = [replace(s, global_loss=None, global_score=None) for s in scores]
    undefined = summarise(private, 1, Measure("accuracy"))
    assert math.isnan(undefined.harmed) and math.isnan(undefined.global_mean)
    assert undefined.mean == summary.mean
    broken = summarise([*scores, agent((0.5, math.nan))], 1, Measure("accuracy"))
    assert broken.worst_tenth == -math.inf and broken.harmed == pytest.approx(6 / 12)
    as_loss = summarise(scores, 1, Measure("loss", None))  # less is better
    assert as_loss.worst_tenth == pytest.approx(0.95) and as_loss.harmed == pytest.approx(5 / 11)


def test_the_majority_baseline():
    data = federation()
    for a in data.split.agents:
        targets = data.samples.targets.numpy()
        most = np.bincount(targets[data.split.train[a]]).argmax()
        right = (targets[data.split.test[a]] == most).mean()
        found = majority_class(data, a, steps=2)
        assert found.score == (right,) * 3
        held = len(set(targets[data.split.test[a]].tolist()))
        most_tested = most in targets[data.split.test[a]]
        assert found.balanced == pytest.approx((most_tested / held,) * 3)
        assert all(x == 0 or math.isnan(x) for x in found.minority)


def uneven(train, test):
    """One agent with these training and test classes, of three."""
    targets = torch.tensor([*train, *test])
    rows = np.arange(len(targets))
    split = Split([rows[: len(train)]], [rows[:0]], [rows[len(train) :]], ("0",), ())
    samples = Samples(torch.zeros(len(targets), 5), targets, ("a", "b", "c"))
    return Federation(samples, split)


def scores_of(objective, data, outputs, measure):
    """The scores of agent 0, whose models' outputs after 0, 1, … steps are given."""
    (found,) = score_agent(objective, data, 0, Outputs(None, [outputs], Cost(), False), measure)
    return found


def predicting(classes):
    """Outputs of a model that predicts these classes."""
    return torch.eye(3)[torch.tensor(classes)]


def test_balanced_and_minority_accuracy():
    data = uneven(train=[2, 2, 2, 0, 1], test=[2, 2, 2, 2, 0, 0, 1])
    objective = Objective(mlp(torch.float32))
    outputs = [predicting([2] * 7), predicting([2, 2, 2, 0, 0, 2, 1])]
    found = scores_of(objective, data, outputs, Measure("accuracy"))
    assert found.score == pytest.approx((4 / 7, 5 / 7))
    assert found.balanced == pytest.approx((1 / 3, (3 / 4 + 1 / 2 + 1) / 3))
    assert found.minority == pytest.approx((0, 2 / 3)) and found.minority_samples == 3


def test_many_outputs_are_scored_as_each_alone():
    """Bit by bit, for every number of steps and scale, with one that is not finite among them."""
    rng = torch.Generator().manual_seed(0)
    data = uneven(train=[2, 2, 0, 1], test=torch.randint(3, (41,), generator=rng).tolist())
    objective, measure = Objective(mlp(torch.float32)), Measure("accuracy")
    every = torch.randn(7, 41, 3, generator=rng)
    every[4, 3, 1] = math.nan
    *personal, shared = every.unbind()
    outputs = Outputs(shared, [personal[:3], personal[3:]], Cost(5, 6), True)
    records = score_agent(objective, data, 0, outputs, measure)
    for record, part in zip(records, (personal[:3], personal[3:]), strict=True):
        alone = [scores_of(objective, data, [one], measure) for one in part]
        for field in ("loss", "score", "balanced", "minority"):
            assert str(getattr(record, field)) == str(sum((getattr(a, field) for a in alone), ()))
        whole = scores_of(objective, data, [shared], measure)
        assert (record.global_score, record.global_loss) == (whole.score[0], whole.loss[0])
        assert (record.personal_gradients, record.personal_hvps, record.newcomer) == (5, 6, True)
    assert math.isnan(records[1].score[1]) and math.isfinite(records[1].score[0])


def test_an_agent_of_one_class_has_no_minority():
    data = uneven(train=[1, 1, 1], test=[1, 1])
    objective = Objective(mlp(torch.float32))
    found = scores_of(objective, data, [predicting([1, 0])], Measure("accuracy"))
    assert found.minority_samples == 0 and math.isnan(found.minority[0])
    assert found.balanced == (0.5,)
    assert math.isnan(summarise([found], 0, Measure("accuracy")).minority)


def test_minority_accuracy_counts_samples_not_agents():
    few = AgentScores(0, "0", True, 5, 10, (1.0,), (0.9,), None, None, (0.5,), (1.0,), 1)
    many = AgentScores(1, "1", True, 5, 10, (1.0,), (0.9,), None, None, (0.7,), (0.0,), 3)
    none = AgentScores(2, "2", True, 5, 10, (1.0,), (1.0,), None, None, (1.0,), (math.nan,), 0)
    summary = summarise([few, many, none], 0, Measure("accuracy"))
    assert summary.minority == pytest.approx(1 / 4)
    assert summary.balanced == pytest.approx(2.2 / 3)


def test_outputs_that_are_not_finite_have_no_score():
    data = uneven(train=[1, 1, 0], test=[1, 0])
    outputs = torch.full((2, 3), math.nan)
    objective = Objective(mlp(torch.float32))
    found = scores_of(objective, data, [outputs], Measure("accuracy"))
    assert all(math.isnan(x[0]) for x in (found.score, found.balanced, found.minority))


def test_other_metrics_and_losses_have_no_classes():
    data = uneven(train=[1, 1, 0], test=[1, 0])
    objective = Objective(mlp(torch.float32))
    for measure in (Measure("loss", None), Measure("own", lambda outputs, targets: 0.5)):
        found = scores_of(objective, data, [predicting([1, 0])], measure)
        assert found.balanced == found.minority == ()
        assert math.isnan(summarise([found], 0, measure).balanced)


def test_choices_are_scored_on_validation_data_and_never_read_the_test_part():
    objective, data = Objective(mlp(torch.float32)), federation(validation=0.25)
    inputs = data.samples.inputs.clone()
    inputs[np.concatenate(data.split.test)] = math.nan
    spoiled = Samples(inputs, data.samples.targets, data.samples.classes)
    choosing = Federation(spoiled, data.split, scored_on="validation")
    engine = DirectEngine(objective, choosing, seed=0)
    states = {a: {} for a in data.split.agents}
    scores = engine.evaluate(
        ALGORITHM, {"model": objective.initial()}, states, steps=1, measure=Measure("accuracy")
    )
    for agent, got in enumerate(scores):
        x, y = data.samples.take(data.split.validation[agent])
        answers = objective.predict(objective.initial(), x).argmax(1)
        assert got.score[0] == (answers == y).double().mean() and got.test_samples == len(y)
        assert math.isfinite(got.loss[1])


def test_resamples_have_the_spread_of_a_bootstrap():
    """Its closed form, of a mean over n samples: their standard deviation over √n."""
    objective, data = Objective(mlp(torch.float32)), federation()
    targets = data.samples.targets[data.scored_rows(0)]
    outputs = torch.nn.functional.one_hot(targets, int(data.samples.targets.max()) + 1).float()
    outputs[:2] = outputs[:2].roll(1, dims=1)  # two of six are wrong
    losses = [
        float(objective.loss(o[None], y[None])) for o, y in zip(outputs, targets, strict=True)
    ]
    wanted = {accuracy: np.array([0, 0, 1, 1, 1, 1]), None: np.array(losses)}
    for metric, values in wanted.items():
        measure = replace(Measure("m", metric), resamples=4000)
        found = scores_of(objective, data, [outputs, outputs], measure)
        (first, second) = found.resampled
        assert first == second and len(first) == 4000
        assert np.std(first) == pytest.approx(np.std(values) / math.sqrt(6), rel=0.05)
        assert np.mean(first) == pytest.approx(0, abs=0.1 * np.std(first))
        assert "resampled" not in SCORES.record(found)
    null = majority_class(data, 0, 1, 4000)
    share = null.score[0]
    assert np.std(null.resampled[1]) == pytest.approx(math.sqrt(share * (1 - share) / 6), rel=0.05)
    assert not scores_of(objective, data, [outputs], Measure("m")).resampled


def test_a_metric_that_fails_on_resamples_has_no_interval():
    def whole(outputs, targets):
        if len(set(targets.tolist())) < len(seen):
            raise ValueError("a class is missing")
        return 0.5

    objective, data = Objective(mlp(torch.float32)), federation()
    seen = set(data.samples.targets[data.scored_rows(0)].tolist())
    outputs = torch.zeros(6, int(data.samples.targets.max()) + 1)
    found = scores_of(objective, data, [outputs], Measure("m", whole).resampled(4))
    assert found.score == (0.5,) and found.resampled == ()
