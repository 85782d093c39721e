"""FedDyn: h is the mean of all corrections, its fixed point is the optimum, and its formulas."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nufed import Objective, fedavg
from nufed.algorithms import FedDyn
from nufed.algorithms.aggregation import Median
from nufed.algorithms.protocol import AgentUpdate, Context
from nufed.errors import TrainingError
from nufed.server import Rules
from nufed.simulation import DirectEngine, Faults, train
from support import Point, agent_context, context, federation, mlp, quadratic_loss, quadratics

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6}
NAN = Faults(corruption=0.4, attack="nan")


def check_h_is_the_mean_of_all_corrections(cls, participation=0.5, faults=NAN):
    """After every round, over all N agents, also those that never took part or were rejected."""
    algorithm = cls(weight=0.7, **SHARED)
    data = federation(agents=7, unseen=1)
    engine = DirectEngine(Objective(mlp()), data, seed=5)
    settings = {"rules": Rules(attempts=9), "faults": faults}
    w, rejected = engine.objective.initial(), 0
    for progress in train(algorithm, engine, w, rounds=6, participation=participation, **settings):
        h, states = progress.server["h"], [progress.states.get(a) for a in data.split.seen]
        kept = [state["correction"] for state in states if state]
        mean = sum(kept, torch.zeros_like(h)) / len(data.split.seen)
        assert float((h - mean).norm()) <= 1e-12 * max(1.0, float(h.norm()))
        rejected += len(progress.rejected)
    assert float(h.norm()) > 0.01 and (rejected > 0) == (faults is NAN)


def check_one_update_is_the_formulas(cls):
    """y and g_i⁺, against the formulas written out."""
    algorithm = cls(weight=0.7, **SHARED)
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, seed=0, use="train", round=3), round=3)
    w = objective.initial()
    g_i = 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1), dtype=w.dtype)
    result = algorithm.agent_update(own, {"model": w}, {"correction": g_i})
    y = w
    for t in range(3):
        (batch,) = own.batches.draw("outer", 6, step=t)
        y = y - 0.1 * (objective.grad(y, batch) - g_i + 0.7 * (y - w))
    assert set(result.vectors) == {"model"} and result.cost.gradients == 3
    torch.testing.assert_close(result.vectors["model"], y, rtol=0, atol=1e-14)
    torch.testing.assert_close(result.state["correction"], g_i - 0.7 * (y - w), rtol=0, atol=1e-13)


def check_the_minimum_of_the_risk_has_gradient_g(cls):
    """After many steps g_i⁺ = ∇f_i(y): the first-order condition from which the update follows."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    g_i = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64)
    for agent, (a, b) in enumerate(pairs[:3]):
        lr = 1.0 / (float(torch.linalg.eigvalsh(a)[-1]) + 0.7)
        algorithm = cls(weight=0.7, meta_lr=lr, local_steps=300, batch_size=3)
        own = agent_context(objective, data.batches(agent, 0, "train", 1))
        result = algorithm.agent_update(own, {"model": w}, {"correction": g_i})
        right = a @ (result.vectors["model"] - b)
        torch.testing.assert_close(result.state["correction"], right, rtol=1e-9, atol=1e-9)


def check_the_server_step(cls):
    """From h = 0 and full participation w + 2·mean Δ; else by N and h, whatever rule combines."""
    w = torch.ones(2, dtype=torch.float64)
    updates = [AgentUpdate(i, 1, 9, {"model": w + i}) for i in (1, 2, 6)]
    algorithm, zero = cls(weight=0.5), torch.zeros_like(w)
    after = algorithm.server_update(context(agents=3), {"model": w, "h": zero}, updates)
    torch.testing.assert_close(after["model"], w + 2 * 3.0)
    for rule, mean in ((algorithm, 3.0), (replace(algorithm, aggregation=Median()), 2.0)):
        after = rule.server_update(context(agents=12), {"model": w, "h": zero + 4}, updates)
        h = 4 - 0.5 * 9 / 12
        torch.testing.assert_close(after["h"], zero + h)
        torch.testing.assert_close(after["model"], w + mean - h / 0.5)


def check_it_reaches_the_optimum_where_fedavg_stays_biased(cls):
    """To 1e-8, on heterogeneous quadratics with full participation and full batches."""
    data, pairs = quadratics()
    best = torch.linalg.solve(sum(a for a, _ in pairs), sum(a @ b for a, b in pairs))
    engine = DirectEngine(Objective(Point(3), quadratic_loss), data, seed=0)
    w = engine.objective.initial()
    settings = {"meta_lr": 0.05, "local_steps": 10, "batch_size": 3}

    def error(algorithm):
        *_, last = train(algorithm, engine, w, rounds=100, participation=1.0)
        return float((last.server["model"] - best).norm() / best.norm())

    assert error(cls(weight=2.0, **settings)) < 1e-8
    assert error(fedavg(**settings)) > 1e-2


def check_running_statistics_have_no_correction(cls):
    """They are averaged, at the agent and at the server."""
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    objective, data = Objective(net, running_stats="tracked"), federation()
    w, counted = objective.initial(), objective.counted()
    own = agent_context(objective, data.batches(2, seed=0, use="train", round=1))
    algorithm, zero = cls(weight=0.7, **SHARED), torch.zeros_like(w)
    result = algorithm.agent_update(own, {"model": w}, {"correction": zero})
    moved = result.vectors["model"] - w
    assert moved[counted:].any() and not result.state["correction"][counted:].any()
    server = Context(1, 6, 1, counted={"model": counted})
    update = AgentUpdate(2, 1, 9, result.vectors)
    after = algorithm.server_update(server, {"model": w, "h": zero}, [update])
    assert not after["h"][counted:].any() and after["h"][:counted].any()
    torch.testing.assert_close(after["model"][counted:], result.vectors["model"][counted:])


CHECKS = (
    check_h_is_the_mean_of_all_corrections,
    check_one_update_is_the_formulas,
    check_the_minimum_of_the_risk_has_gradient_g,
    check_the_server_step,
    check_it_reaches_the_optimum_where_fedavg_stays_biased,
    check_running_statistics_have_no_correction,
)
INVARIANT, FORMULAS, CONDITION, SERVER, OPTIMUM, STATISTICS = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedDyn)


@pytest.mark.parametrize("participation", [1.0, 0.2])
def test_h_is_the_mean_whoever_takes_part(participation):
    check_h_is_the_mean_of_all_corrections(FedDyn, participation, Faults())


# wrong implementations


class Server(FedDyn):
    """A server's step with another change of h: ``sum_change``, and ``step`` from y and h."""

    def sum_change(self, w, updates):
        return sum(update.vectors["model"] - w for update in updates)

    def step(self, w, y, h):
        return y - h / self.weight

    def server_update(self, context, server, updates):
        w = server["model"]
        y = self.aggregate(context, updates, "model", w)
        change = self.sum_change(w, list(updates)) / context.agents
        h = server["h"] - self.weight * change
        return {"model": self.step(w, y, h), "h": h}


class SumWithoutCohort(Server):
    """Σy_i − w as the paper's line 11 can be read, as in FedLab."""

    def sum_change(self, w, updates):
        return sum(update.vectors["model"] for update in updates) - w


class MeanOverTheCohort(FedDyn):
    def server_update(self, context, server, updates):
        return super().server_update(replace(context, agents=len(updates)), server, updates)


class OtherSignOfH(Server):
    def step(self, w, y, h):
        return y + h / self.weight


class WithoutH(Server):
    def step(self, w, y, h):
        return y


class CorrectionIsNeverStored(FedDyn):
    def agent_update(self, context, received, state):
        return replace(super().agent_update(context, received, state), state=state)


class OtherSignOfG(FedDyn):
    """+⟨g_i, y⟩ in the risk, with g_i⁺ = g_i − α(y − w)."""

    def agent_update(self, context, received, state):
        g_i = state["correction"]
        result = super().agent_update(context, received, {"correction": -g_i})
        return replace(result, state={"correction": result.state["correction"] + 2 * g_i})


class Agent(FedDyn):
    """Local steps with another penalty."""

    def agent_update(self, context, received, state):
        w, g_i = received["model"], state["correction"]
        result = super().agent_update(context, received, state)
        y = self.descend(
            context,
            w,
            lambda y, batch: context.objective.grad(y, batch) - g_i + self.penalty(y - w),
        )
        correction = {"correction": g_i - self.weight * (y - w)}
        return replace(result, vectors={"model": y}, state=correction)


class WithoutSquare(Agent):
    """α/2·‖y − w‖, as in PFLlib."""

    def penalty(self, difference):
        return self.weight / 2 * difference / difference.norm().clamp_min(1e-300)


class WithoutPenalty(Agent):
    def penalty(self, difference):
        return torch.zeros_like(difference)


class StatisticsAreCorrected(Server):
    """Running statistics move like parameters, at both ends."""


MUTANTS = {
    SumWithoutCohort: (INVARIANT, SERVER),
    MeanOverTheCohort: (INVARIANT, SERVER),
    OtherSignOfH: (SERVER, OPTIMUM),
    WithoutH: (SERVER, OPTIMUM),
    CorrectionIsNeverStored: (INVARIANT, FORMULAS, OPTIMUM),
    OtherSignOfG: (FORMULAS, CONDITION),
    WithoutSquare: (FORMULAS, CONDITION),
    WithoutPenalty: (FORMULAS, CONDITION),
    StatisticsAreCorrected: (STATISTICS,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises((AssertionError, TrainingError)):
            check(mutant)
