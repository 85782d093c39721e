"""FedProx: μ = 0 is FedAvg, the proximal point on quadratics, and a loop by its formula."""

from itertools import pairwise

import pytest
import torch

from nufed import Objective, fedavg
from nufed.algorithms import AgentResult, Cost, FedProx
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import Point, agent_context, federation, mlp, quadratic_loss, quadratics

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}


def history(algorithm, engine, rounds=4):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def check_without_the_term_it_is_fedavg(cls, kind=DirectEngine):
    """μ = 0, to the bit."""
    engine = kind(Objective(mlp()), federation(), 5)
    both = [history(a, engine) for a in (cls(weight=0.0, **SHARED), fedavg(**SHARED))]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_many_steps_reach_the_proximal_point(cls):
    """(A + μ)⁻¹(Ab + μw) for f = ½(y − b)ᵀA(y − b)."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    for agent, (a, b) in enumerate(pairs[:3]):
        for mu in (0.3, 3.0):
            lr = 1.0 / (float(torch.linalg.eigvalsh(a)[-1]) + mu)
            algorithm = cls(weight=mu, meta_lr=lr, local_steps=300, batch_size=3)
            own = agent_context(objective, data.batches(agent, 0, "train", 1))
            y = algorithm.agent_update(own, {"model": w}, {}).vectors["model"]
            right = torch.linalg.solve(a + mu * eye, a @ b + mu * w)
            torch.testing.assert_close(y, right, rtol=1e-9, atol=1e-9)


def check_rounds_are_the_formula(cls):
    """Against a loop over rounds, agents and steps, with the term at every step."""
    data, mu = federation(), 0.7
    engine = DirectEngine(Objective(mlp()), data, 5)
    objective = engine.objective
    rounds = history(cls(weight=mu, **SHARED), engine)
    for before, progress in pairwise(rounds):
        w, ends = before.server["model"], []
        for agent in progress.cohort:
            y, source = w, data.batches(agent, 5, "train", progress.round)
            for t in range(3):
                (batch,) = source.draw("outer", 6, step=t)
                y = y - 0.1 * (objective.grad(y, batch) + mu * (y - w))
            ends.append(y)
        torch.testing.assert_close(
            progress.server["model"], torch.stack(ends).mean(0), rtol=0, atol=1e-13
        )


CHECKS = (
    check_without_the_term_it_is_fedavg,
    check_many_steps_reach_the_proximal_point,
    check_rounds_are_the_formula,
)


@pytest.mark.parametrize("check", CHECKS)
def test_proof(check):
    check(FedProx)


def test_without_the_term_it_is_fedavg_on_a_stack_too():
    check_without_the_term_it_is_fedavg(FedProx, BatchedEngine)


def test_agents_keep_nothing_and_steps_are_counted():
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    result = FedProx(**SHARED).agent_update(own, {"model": objective.initial()}, {})
    assert not result.state and result.cost == Cost(3)


# wrong implementations


class Wrong(FedProx):
    """Local steps along ∇f + ``term``."""

    def agent_update(self, context, received, state):
        w, seen = received["model"], [received["model"]]

        def gradient(y, batch):
            found = context.objective.grad(y, batch) + self.term(y, w, seen, context)
            seen.append(y)
            return found

        return AgentResult({"model": self.descend(context, w, gradient)}, state, Cost(3))


class WithoutSquare(Wrong):
    def term(self, y, w, seen, context):
        parts = torch.split(y - w, context.objective.base.sizes)
        return self.weight / 2 * torch.cat([p / p.norm().clamp_min(1e-300) for p in parts])


class FirstBatchOnly(Wrong):
    """The generator of global parameters is used up."""

    def term(self, y, w, seen, context):
        return self.weight * (y - w) * (len(seen) == 1)


class NoGradient(Wrong):
    def term(self, y, w, seen, context):
        return torch.zeros_like(y)


class Twice(Wrong):
    def term(self, y, w, seen, context):
        return 2 * self.weight * (y - w)


class MovingCentre(Wrong):
    def term(self, y, w, seen, context):
        return self.weight * (y - seen[-1])


class InitialCentre(Wrong):
    def term(self, y, w, seen, context):
        return self.weight * (y - context.objective.base.initial())


class OtherSign(Wrong):
    def term(self, y, w, seen, context):
        return self.weight * (w - y)


class AlwaysSome(Wrong):
    def term(self, y, w, seen, context):
        return max(self.weight, 1e-3) * (y - w)


POINT, ROUNDS = check_many_steps_reach_the_proximal_point, check_rounds_are_the_formula
MUTANTS = {
    WithoutSquare: (POINT, ROUNDS),
    FirstBatchOnly: (POINT, ROUNDS),
    NoGradient: (POINT, ROUNDS),
    Twice: (POINT, ROUNDS),
    MovingCentre: (POINT, ROUNDS),
    InitialCentre: (POINT, ROUNDS),
    OtherSign: (POINT, ROUNDS),
    AlwaysSome: (check_without_the_term_it_is_fedavg,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
