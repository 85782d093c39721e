import math

import numpy as np
import pytest
import torch

from nufed import Federation, InputError, Objective, fedavg
from nufed.evaluate import AgentScores, Measure, accuracy, majority_class, summarise
from nufed.simulation import DirectEngine
from support import federation, mlp

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
    """What adapts is never handed test data."""
    objective, clean = Objective(mlp(torch.float32)), federation()
    inputs = clean.samples.inputs.clone()
    inputs[np.concatenate(clean.split.test)] = float("nan")
    spoiled = Federation(
        type(clean.samples)(inputs, clean.samples.targets, clean.samples.classes), clean.split
    )
    for agent in clean.split.agents:
        models = [
            list(
                ALGORITHM.personalize(
                    objective,
                    {"model": objective.initial()},
                    {},
                    data.batches(agent, 0, "evaluate"),
                    3,
                )
            )
            for data in (clean, spoiled)
        ]
        assert all(map(torch.equal, *models))


def test_accuracy_of_what_is_no_classifier():
    nothing = torch.full((4, 3), float("nan"))
    assert math.isnan(accuracy(nothing, torch.zeros(4, dtype=torch.long)))  # argmax says class 0
    with pytest.raises(InputError, match=r"one output per class.*\(4, 1\)"):
        accuracy(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))


def agent(score, samples=10):
    return AgentScores(0, "0", True, 5, samples, loss=(1.0, 2.0), score=score)


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
        assert majority_class(data, a, steps=2).score == (right,) * 3
