"""Ditto: w is FedAvg's, and v is what its formula says."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nufed import Objective, fedavg
from nufed.algorithms import Cost, Ditto, Personal
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import Point, agent_context, federation, mlp, quadratic_loss, quadratics

SHARED = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.1}
OWN = {"weight": 0.7, "personal_lr": 0.2, "personal_steps": 3, **SHARED}


def history(algorithm, engine, rounds=5, participation=0.5):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=participation))


def check_the_global_model_is_fedavg(cls):
    """To the bit, on both engines."""
    for kind in (DirectEngine, BatchedEngine):
        engine = kind(Objective(mlp()), federation(), 5)
        both = [history(a, engine) for a in (cls(**OWN), fedavg(**SHARED))]
        for one, other in zip(*both, strict=True):
            assert torch.equal(one.server["model"], other.server["model"])
        assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_without_the_proximal_term_v_is_plain_sgd(cls):
    """From the initial model, in the rounds in which the agent took part, on the same draws, to
    the bit."""
    algorithm = cls(**{**OWN, "weight": 0.0})
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    rounds = history(algorithm, engine)
    for agent in data.split.agents:
        v, took_part = engine.objective.initial(), 0
        for progress in rounds[1:]:
            if agent in progress.cohort:
                took_part += 1
                for t in range(3):
                    source = data.batches(agent, 5, "train", progress.round)
                    (batch,) = source.draw("personal", 6, step=t)
                    v = torch.sub(v, engine.objective.grad(v, batch), alpha=0.2)
        state = rounds[-1].states.get(agent)
        assert (state is None) == (took_part == 0)
        assert state is None or torch.equal(state["personal"], v)


def check_with_w_fixed_v_reaches_the_proximal_point(cls):
    """(A + λ)⁻¹(Ab + λw) for f = ½(v − b)ᵀA(v − b), with η < 2/(L + λ)."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for agent, (a, b) in enumerate(pairs):
        for weight in (0.3, 3.0):
            largest = float(torch.linalg.eigvalsh(a)[-1])
            lr = 1.9 / (largest + weight)
            algorithm = cls(weight, lr, 300, batch_size=3)  # the error shrinks by 0.9 in a step
            own = agent_context(objective, data.batches(agent, 0, "train", 1))
            v = algorithm.personal_update(own, torch.zeros_like(w), w)
            eye = torch.eye(3, dtype=torch.float64)
            right = torch.linalg.solve(a + weight * eye, a @ b + weight * w)
            assert torch.allclose(v, right, rtol=1e-9, atol=1e-9)


def check_with_w_moving_against_an_independent_loop(cls):
    """v of every agent after five rounds, to 1e-12."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    objective, rounds = engine.objective, history(cls(**OWN), engine)
    v = dict.fromkeys(data.split.agents, objective.initial())
    for before, progress in pairwise(rounds):
        w = before.server["model"]
        for agent in progress.cohort:
            source = data.batches(agent, 5, "train", progress.round)
            for t in range(3):
                (batch,) = source.draw("personal", 6, step=t)
                gradient = objective.grad(v[agent], batch) + 0.7 * (v[agent] - w)
                v[agent] = v[agent] - 0.2 * gradient
    for agent in {a for p in rounds for a in p.cohort}:
        found = rounds[-1].states.get(agent)["personal"]
        assert torch.allclose(found, v[agent], rtol=0, atol=1e-12)


def check_the_personal_model_is_v(cls):
    """And a newcomer makes one, at its cost."""
    algorithm = cls(**OWN)
    data, objective = federation(), Objective(mlp())
    own = agent_context(objective, data.batches(2, 0, "evaluate"))
    received, v = {"model": objective.initial()}, torch.ones(objective.size, dtype=torch.float64)
    known = algorithm.personal_model(own, received, {"personal": v})
    assert known.model is v and known.cost.gradients == 0
    new = algorithm.personal_model(own, received, None)
    assert new.cost.gradients == 3 and not torch.equal(new.model, received["model"])
    right = received["model"]
    for t in range(3):
        (batch,) = own.batches.draw("personal", 6, step=t)
        gradient = objective.grad(right, batch) + 0.7 * (right - received["model"])
        right = right - 0.2 * gradient
    assert torch.allclose(new.model, right, rtol=0, atol=1e-13)


CHECKS = (
    check_the_global_model_is_fedavg,
    check_without_the_proximal_term_v_is_plain_sgd,
    check_with_w_fixed_v_reaches_the_proximal_point,
    check_with_w_moving_against_an_independent_loop,
    check_the_personal_model_is_v,
)
FEDAVG, ALONE, POINT, MOVING, PERSONAL = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(Ditto)


# wrong implementations


class TowardsTheTrainedModel(Ditto):
    """v is held near the agent's own w after local training instead of the one it received."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        v = self.personal_update(context, state["personal"], result.vectors["model"])
        return replace(result, state={"personal": v})


class RestartsFromTheGlobalModel(Ditto):
    """v starts anew from w in every round."""

    def agent_update(self, context, received, state):
        return super().agent_update(context, received, {"personal": received["model"]})


class WithoutProximalTerm(Ditto):
    def personal_update(self, context, v, w, memory=None):
        return (
            super().personal_update(context, v, v) if self.weight == 0 else self.alone(context, v)
        )

    def alone(self, context, v):
        for t in range(self.personal_steps):
            (batch,) = context.batches.draw("personal", self.batch_size, step=t)
            v = v - self.personal_lr * context.objective.grad(v, batch)
        return v


class PullsAway(Ditto):
    """λ with the other sign."""

    def personal_update(self, context, v, w, memory=None):
        for t in range(self.personal_steps):
            (batch,) = context.batches.draw("personal", self.batch_size, step=t)
            g = context.objective.grad(v, batch) - self.weight * (v - w)
            v = v - self.personal_lr * g
        return v


class SendsThePersonalModel(Ditto):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return replace(result, vectors={"model": result.state["personal"]})


class TestsTheGlobalModel(Ditto):
    __test__ = False

    def personal_model(self, context, received, state):
        return Personal({"model": received["model"]})


class NewcomerIsFree(Ditto):
    def personal_model(self, context, received, state):
        return replace(super().personal_model(context, received, state), cost=Cost())


MUTANTS = {
    TowardsTheTrainedModel: (MOVING,),
    RestartsFromTheGlobalModel: (ALONE, MOVING),
    WithoutProximalTerm: (POINT, MOVING),
    PullsAway: (POINT, MOVING),
    SendsThePersonalModel: (FEDAVG,),
    TestsTheGlobalModel: (PERSONAL,),
    NewcomerIsFree: (PERSONAL,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
