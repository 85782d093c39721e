"""MOON: μ = 0 and first rounds are FedAvg's, and the contrastive gradient is autograd's."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Objective, fedavg
from nufed.algorithms import MOON, Cost
from nufed.errors import TrainingError
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}


def history(algorithm, engine, rounds=4):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def random_like(w, seed):
    return torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=w.dtype)


def features_by_hand(w, x):
    """What the last layer of `mlp` gets."""
    return torch.tanh(x.double() @ w[:35].reshape(7, 5).T + w[35:42])


def loss_by_hand(y, batch, w, v, mu=0.7, temperature=0.3):
    """f(y) + μℓ with a softmax over the two similarities."""
    z, z_w, z_v = (features_by_hand(each, batch.inputs) for each in (y, w, v))
    s_w, s_v = ((z * o).sum(1) / (z.norm(dim=1) * o.norm(dim=1)) for o in (z_w, z_v))
    contrast = -torch.stack([s_w, s_v], dim=1).div(temperature).log_softmax(dim=1)[:, 0]
    outputs = z @ y[42:63].reshape(3, 7).T + y[63:]
    return F.cross_entropy(outputs, batch.targets) + mu * contrast.sum() / len(contrast)


def gradient_by_hand(y, batch, w, v):
    y = y.detach().requires_grad_()
    return torch.autograd.grad(loss_by_hand(y, batch, w, v), y)[0]


def check_without_the_term_it_is_fedavg(cls):
    """μ = 0, to the bit; and no feature is computed."""

    class NoContrast(cls):
        def contrastive_gradient(self, *arguments):
            raise AssertionError("the term is not skipped")

    engine = DirectEngine(Objective(mlp()), federation(), 5)
    both = [history(a, engine) for a in (NoContrast(weight=0.0, **SHARED), fedavg(**SHARED))]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_the_gradient_is_that_of_autograd(cls):
    """Of the loss written out by hand, at three different models."""
    objective, data = Objective(mlp()), federation()
    (batch,) = data.batches(2, 0, "train", 1).draw("outer", 6)
    y, w, v = (random_like(objective.initial(), seed) for seed in (1, 2, 3))
    algorithm = cls(weight=0.7, temperature=0.3, **SHARED)
    found = algorithm.contrastive_gradient(objective, y, batch, w, v)
    right = gradient_by_hand(y, batch, w, v)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-13)
    assert float((right - objective.grad(y, batch)).norm()) > 0.01


def check_a_first_round_is_fedavg(cls):
    """To the bit, of every agent, whenever it takes part for the first time."""
    objective, data = Objective(mlp()), federation()
    w = random_like(objective.initial(), 1)
    algorithm = cls(weight=5.0, **SHARED)
    for round in (1, 7):
        own = agent_context(objective, data.batches(2, 0, "train", round), round)
        state = algorithm.agent_init(objective, {"model": w})
        found = algorithm.agent_update(own, {"model": w}, state).vectors["model"]
        right = fedavg(**SHARED).agent_update(own, {"model": w}, {}).vectors["model"]
        assert torch.equal(found, right)


def check_rounds_are_the_formula(cls):
    """Against a loop in which agents remember the end of their last round."""
    data, algorithm = federation(), cls(weight=0.7, temperature=0.3, **SHARED)
    engine = DirectEngine(Objective(mlp()), data, 5)
    rounds, last, contrasted = history(algorithm, engine, 5), {}, 0
    for before, progress in pairwise(rounds):
        w, ends = before.server["model"], []
        for agent in progress.cohort:
            y, v, source = w, last.get(agent, w), data.batches(agent, 5, "train", progress.round)
            contrasted += agent in last
            for t in range(3):
                (batch,) = source.draw("outer", 6, step=t)
                y = y - 0.1 * gradient_by_hand(y, batch, w, v)
            ends.append(y)
            last[agent] = y
        right = torch.stack(ends).mean(0)
        torch.testing.assert_close(progress.server["model"], right, rtol=0, atol=1e-12)
    assert contrasted > 3
    for agent, v in last.items():
        found = rounds[-1].states.get(agent)["previous"]
        torch.testing.assert_close(found, v, rtol=0, atol=1e-12)


def check_small_temperatures_are_finite(cls):
    """Also in float32, where exp(1/T) overflows."""
    objective, data = Objective(mlp(torch.float32)), federation()
    (batch,) = data.batches(2, 0, "train", 1).draw("outer", 6)
    y, w, v = (random_like(objective.initial(), seed) for seed in (1, 2, 3))
    algorithm = cls(weight=0.7, temperature=1e-3, **SHARED)
    assert algorithm.contrastive_gradient(objective, y, batch, w, v).isfinite().all()


CHECKS = (
    check_without_the_term_it_is_fedavg,
    check_the_gradient_is_that_of_autograd,
    check_a_first_round_is_fedavg,
    check_rounds_are_the_formula,
    check_small_temperatures_are_finite,
)
FEDAVG, GRADIENT, FIRST, ROUNDS, FINITE = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(MOON)


def test_one_model_is_sent_and_the_last_is_kept():
    objective, data = Objective(mlp()), federation()
    own, w = agent_context(objective, data.batches(2, 0, "train", 1)), objective.initial()
    result = MOON(**SHARED).agent_update(own, {"model": w}, {"previous": random_like(w, 1)})
    assert set(result.vectors) == {"model"} and result.cost == Cost(3)
    assert torch.equal(result.state["previous"], result.vectors["model"])


def test_dropout_masks_are_those_of_the_batch():
    """The features of y are those of its training pass: T → ∞ leaves the plain gradient."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    objective, data = Objective(net), federation()
    (batch,) = data.batches(2, 0, "train", 1).draw("outer", 6)
    y, w, v = (random_like(objective.initial(), seed) for seed in (1, 2, 3))
    algorithm = MOON(weight=0.7, temperature=1e9, **SHARED)
    found = algorithm.contrastive_gradient(objective, y, batch, w, v)
    torch.testing.assert_close(found, objective.grad(y, batch), rtol=0, atol=1e-8)


# wrong implementations


class Exchanged(MOON):
    def contrastive_loss(self, z, z_w, z_v):
        return super().contrastive_loss(z, z_v, z_w)


class WithoutTemperature(MOON):
    def contrastive_loss(self, z, z_w, z_v):
        return MOON.contrastive_loss(replace(self, temperature=1.0), z, z_w, z_v)


class SumOverTheBatch(MOON):
    def contrastive_loss(self, z, z_w, z_v):
        return len(z) * super().contrastive_loss(z, z_w, z_v)


class OverflowsBeforeTheQuotient(MOON):
    """−log(e^a/(e^a + e^b)), as in PFLlib."""

    def contrastive_loss(self, z, z_w, z_v):
        a, b = ((F.cosine_similarity(z, o) / self.temperature).exp() for o in (z_w, z_v))
        return -(a / (a + b)).log().mean()


class OfOutputs(MOON):
    """The model's outputs are compared instead of its features."""

    def contrastive_gradient(self, objective, y, batch, w, v):
        head = objective.part("head")

        def logits(z, vector):
            weight, bias = head.take(vector)[:21].view(3, 7), head.take(vector)[21:]
            return F.linear(z, weight, bias)

        other = Wrong(self.weight, self.temperature, logits=logits, at=(y, w, v), **SHARED)
        return MOON.contrastive_gradient(other, objective, y, batch, w, v)


class Wrong(MOON):
    def __init__(self, weight, temperature, logits, at, **shared):
        super().__init__(weight, temperature, **shared)
        object.__setattr__(self, "logits", logits)
        object.__setattr__(self, "at", at)

    def contrastive_loss(self, *features):
        outputs = [self.logits(z, w) for z, w in zip(features, self.at, strict=True)]
        return super().contrastive_loss(*outputs)


class PreviousIsNeverUpdated(MOON):
    def agent_update(self, context, received, state):
        return replace(super().agent_update(context, received, state), state=state)


class PreviousIsTheReceived(MOON):
    """v is replaced whenever parameters are set, as it was in FL4Health."""

    def agent_update(self, context, received, state):
        return super().agent_update(context, received, {"previous": received["model"]})


class PreviousIsTheLastReceived(MOON):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return replace(result, state={"previous": received["model"]})


class InitialModelIsPrevious(MOON):
    """Agents that never took part contrast with the initial model."""

    def agent_init(self, objective, received):
        return {"previous": objective.base.initial()}


class AlwaysSome(MOON):
    """The term is computed for μ = 0, too."""

    def agent_update(self, context, received, state):
        return super(AlwaysSome, replace(self, weight=max(self.weight, 1e-3))).agent_update(
            context, received, state
        )


MUTANTS = {
    Exchanged: (GRADIENT, ROUNDS),
    WithoutTemperature: (GRADIENT, ROUNDS),
    SumOverTheBatch: (GRADIENT, ROUNDS),
    OverflowsBeforeTheQuotient: (FINITE,),
    OfOutputs: (GRADIENT, ROUNDS),
    PreviousIsNeverUpdated: (ROUNDS,),
    PreviousIsTheReceived: (ROUNDS,),
    PreviousIsTheLastReceived: (ROUNDS,),
    InitialModelIsPrevious: (FIRST,),
    AlwaysSome: (FEDAVG,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises((AssertionError, TrainingError)):
            check(mutant)
