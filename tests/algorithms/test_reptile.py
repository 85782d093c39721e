"""Reptile: ε = 1 is FedAvg, and a round is its formula."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nufed import Objective, fedavg
from nufed.algorithms import Cost, Reptile
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}


def history(algorithm, engine, rounds=4):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def check_one_is_fedavg(cls):
    """ε = 1, to rounding."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    both = [history(a, engine) for a in (cls(server_lr=1.0, **SHARED), fedavg(**SHARED))]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one.server["model"], other.server["model"], rtol=0, atol=1e-14)


def check_rounds_are_the_formula(cls):
    """w + ε·mean(w̃_i − w), with w̃_i from plain steps."""
    data, epsilon = federation(), 0.3
    engine = DirectEngine(Objective(mlp()), data, 5)
    for before, progress in pairwise(history(cls(server_lr=epsilon, **SHARED), engine)):
        w, changes = before.server["model"], []
        for agent in progress.cohort:
            trained, source = w, data.batches(agent, 5, "train", progress.round)
            for t in range(3):
                (batch,) = source.draw("outer", 6, step=t)
                trained = trained - 0.1 * engine.objective.grad(trained, batch)
            changes.append(trained - w)
        right = w + epsilon * torch.stack(changes).mean(0)
        torch.testing.assert_close(progress.server["model"], right, rtol=0, atol=1e-14)


CHECKS = (check_one_is_fedavg, check_rounds_are_the_formula)


@pytest.mark.parametrize("check", CHECKS)
def test_proof(check):
    check(Reptile)


def test_agents_keep_nothing_and_fine_tune_the_global_model():
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    algorithm, received = Reptile(**SHARED), {"model": objective.initial()}
    result = algorithm.agent_update(own, received, {})
    assert not result.state and result.cost == Cost(3)
    personal = algorithm.personal_model(own, received, None)
    *_, tuned = algorithm.fine_tune(own, received, personal.tensors, 2)
    right = received["model"]
    for batch in own.batches.draw("adapt", 6, 2):
        right = right - 0.1 * objective.grad(right, batch)
    torch.testing.assert_close(tuned["model"], right, rtol=0, atol=1e-14)


# wrong implementations


class Wrong(Reptile):
    def server_update(self, context, server, updates):
        w = server["model"]
        ends = torch.stack([update.vectors["model"] for update in updates])
        return {"model": self.moved(w, ends)}


class OtherSign(Wrong):
    def moved(self, w, ends):
        return w - self.server_lr * (ends.mean(0) - w)


class Sum(Wrong):
    def moved(self, w, ends):
        return w + self.server_lr * (ends - w).sum(0)


class Shrinking(Wrong):
    def moved(self, w, ends):
        return self.server_lr * ends.mean(0)


class WithoutEpsilon(Wrong):
    def moved(self, w, ends):
        return ends.mean(0)


class Turned(Wrong):
    def moved(self, w, ends):
        return self.server_lr * w + (1 - self.server_lr) * ends.mean(0)


class AtTheAgentToo(Reptile):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        w = received["model"]
        return replace(
            result, vectors={"model": w + self.server_lr * (result.vectors["model"] - w)}
        )


class LastGradient(Reptile):
    """First-order MAML: the last gradient instead of the whole way."""

    def agent_update(self, context, received, state):
        w, last = received["model"], None
        for batch in self.local_batches(context):
            last = context.objective.grad(w, batch)
            w = w - self.meta_lr * last
        result = super().agent_update(context, received, state)
        return replace(result, vectors={"model": received["model"] - self.meta_lr * last})


ONE, ROUNDS = CHECKS
MUTANTS = {
    OtherSign: CHECKS,
    Sum: CHECKS,
    Shrinking: (ROUNDS,),
    WithoutEpsilon: (ROUNDS,),
    Turned: CHECKS,
    AtTheAgentToo: (ROUNDS,),
    LastGradient: CHECKS,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
