"""SCAFFOLD: the invariant of its control variates, its fixed point, and its formulas."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from nufed import Objective, fedavg
from nufed.algorithms import Scaffold
from nufed.algorithms.aggregation import Median
from nufed.algorithms.local_optimizer import SGD
from nufed.algorithms.protocol import AgentContext, AgentUpdate
from nufed.errors import TrainingError
from nufed.server import Rules, to_send
from nufed.simulation import DirectEngine, Faults, train
from support import Point, agent_context, context, federation, mlp, quadratic_loss, quadratics

NO_FAULTS = Faults()
ALGORITHM = Scaffold(meta_lr=0.1, local_steps=3, batch_size=6)


def control_gap(progress, agents):
    """‖c − mean of all c_i‖, where agents without a state have c_i = 0."""
    c = progress.server["control"]
    own = [progress.states.get(agent) for agent in agents]
    total = sum((state["control"] for state in own if state), torch.zeros_like(c))
    return float((c - total / len(agents)).norm()), float(c.norm())


@pytest.mark.parametrize("participation", [1.0, 0.5, 0.2])
@pytest.mark.parametrize(
    "faults", [Faults(), Faults(dropout=0.3, stragglers=0.3), Faults(corruption=0.4, attack="nan")]
)
def test_c_is_the_mean_of_all_c_i_after_every_round(participation, faults):
    """To 1e-12, also with agents that are lost, late, or rejected."""
    check_the_invariant(Scaffold, participation, faults)


def check_the_invariant(cls, participation=0.5, faults=NO_FAULTS):
    """c is the mean of all c_i after every round."""
    algorithm = cls(meta_lr=0.1, local_steps=3, batch_size=6)
    data = federation(agents=7, unseen=1)
    engine = DirectEngine(Objective(mlp()), data, seed=5)
    settings = {"rules": Rules(attempts=9), "faults": faults}
    w, rejected = engine.objective.initial(), 0
    for progress in train(algorithm, engine, w, rounds=8, participation=participation, **settings):
        gap, length = control_gap(progress, data.split.seen)
        assert gap <= 1e-12 * max(1.0, length)
        rejected += len(progress.rejected)
    assert length > 0.01 and (rejected > 0) == (faults != Faults())


def test_too_long_updates_keep_their_old_control_variate():
    @dataclass(frozen=True)
    class Stretching(DirectEngine):
        def chunks(self, algorithm, agents):
            return [list(agents)]  # a whole round at once

        def agent_updates(self, algorithm, received, states, context):
            results = super().agent_updates(algorithm, received, states, context)
            agent = max(results)
            longer = {k: received[k] + 99 * (v - received[k]) for k, v in
                      results[agent].vectors.items()}  # fmt: skip
            return {**results, agent: replace(results[agent], vectors=longer)}

    data = federation()
    engine = Stretching(Objective(mlp()), data, seed=5)
    settings = {"rules": Rules(max_update_norm=5.0)}
    w = engine.objective.initial()
    for progress in train(ALGORITHM, engine, w, rounds=4, participation=0.6, **settings):
        assert control_gap(progress, data.split.seen)[0] <= 1e-12
    assert len(progress.rejected) == 1


def check_one_update_is_the_formulas(cls):
    """y, c_i⁺ and what is sent, against the formulas written out."""
    algorithm = cls(meta_lr=0.1, local_steps=3, batch_size=6)
    objective, data = Objective(mlp()), federation()
    batches = data.batches(2, seed=0, use="train", round=3)
    x = objective.initial()
    c, c_i = (0.1 * torch.randn_like(x) for _ in range(2))
    received = {"model": x, "control": c}
    own = agent_context(objective, batches, round=3)
    result = algorithm.agent_update(own, received, {"control": c_i})
    y = x
    for t in range(3):
        (batch,) = batches.draw("outer", 6, step=t)
        y = y - 0.1 * (objective.grad(y, batch) - c_i + c)
    new = c_i - c + (x - y) / (3 * 0.1)
    assert torch.allclose(result.vectors["model"], y, rtol=0, atol=1e-14)
    assert torch.allclose(result.state["control"], new, rtol=0, atol=1e-13)
    assert torch.allclose(result.vectors["control"] - c, new - c_i, rtol=0, atol=1e-13)
    assert result.cost.gradients == 3


def check_the_actual_steps_and_step_size_of_a_round(cls):
    """With epochs τ is the agent's own number of steps, with a schedule η that of the round."""
    sgd = SGD(schedule="inverse", schedule_rounds=2)
    algorithm = cls(meta_lr=0.1, local_epochs=2, batch_size=6, optimizer=sgd)
    objective, data = Objective(mlp()), federation()
    x = objective.initial()
    received = {"model": x, "control": torch.zeros_like(x)}
    for agent in (1, 2):
        batches = data.batches(agent, seed=0, use="train", round=3)
        own = AgentContext(3, 6, 6, objective, batches, batches.samples)
        result = algorithm.agent_update(own, received, {"control": torch.zeros_like(x)})
        drawn = [b for epoch in range(2) for b in batches.epoch("outer", 6, epoch)]
        y, eta, raw = x, 0.1 / (1 + (3 - 1) / 2), torch.zeros_like(x)
        for batch in drawn:
            g = objective.grad(y, batch)
            y, raw = y - eta * g, raw + g
        assert len(drawn) != algorithm.local_steps and result.cost.gradients == len(drawn)
        assert torch.allclose(result.vectors["model"], y, rtol=0, atol=1e-14)
        assert torch.allclose(result.state["control"], raw / len(drawn), rtol=0, atol=1e-13)


def check_running_statistics_have_no_control_variate(cls):
    """They move without gradients; those of parameters are the mean of the gradients."""
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    objective, data = Objective(net, running_stats="tracked"), federation()
    x = objective.initial()
    own = agent_context(objective, data.batches(2, seed=0, use="train", round=1))
    control = torch.full_like(x, 0.01)
    for sgd in (SGD(), SGD(momentum=0.5)):
        algorithm = cls(meta_lr=0.1, local_steps=1, batch_size=6, optimizer=sgd)
        result = algorithm.agent_update(own, {"model": x, "control": control}, {"control": control})
        (batch,) = own.batches.draw("outer", 6, step=0)
        right = objective.grad(x, batch)
        assert not right[-14:].any() and not torch.equal(result.vectors["model"][-14:], x[-14:])
        assert torch.allclose(result.state["control"], right, rtol=0, atol=1e-13)


def check_the_server_knows_n_and_its_step_size(cls):
    """x ← x + η_g·mean(Δy) and c ← c + (1/N)·ΣΔc_i, whatever rule combines the models."""
    x, c = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    updates = [AgentUpdate(i, 1, 9, {"model": x + i, "control": c + 10 * i}) for i in (1, 2, 3)]
    algorithm = cls(meta_lr=0.1, server_lr=0.5)
    server = {"model": x, "control": c}
    after = algorithm.server_update(context(agents=12, cohort=3), server, updates)
    assert after["model"].tolist() == [1.0, 1.0]  # half of the mean change 2
    assert after["control"].tolist() == [1 + 60 / 12] * 2
    robust = replace(algorithm, aggregation=Median())
    assert torch.equal(
        robust.server_update(context(agents=12), server, updates)["control"], after["control"]
    )


def check_it_reaches_the_optimum_where_fedavg_stays_biased(cls):
    """On heterogeneous quadratics, full participation, full batches, η_g = 1."""
    data, pairs = quadratics()
    total = sum(a for a, _ in pairs)
    best = torch.linalg.solve(total, sum(a @ b for a, b in pairs))
    engine = DirectEngine(Objective(Point(3), quadratic_loss), data, seed=0)
    w = engine.objective.initial()
    settings = {"meta_lr": 0.05, "local_steps": 4, "batch_size": 3}

    def error(algorithm):
        *_, last = train(algorithm, engine, w, rounds=60, participation=1.0)
        return float((last.server["model"] - best).norm() / best.norm())

    assert error(cls(**settings)) < 1e-9
    assert error(fedavg(**settings)) > 1e-2


def test_a_newcomer_has_no_control_variate():
    objective = Objective(mlp())
    received = to_send(ALGORITHM, ALGORITHM.server_init(objective, objective.initial()))
    own = agent_context(objective, federation().batches(0, 0, "evaluate"))
    personal = ALGORITHM.personal_model(own, received, None)
    assert personal.model is received["model"] and personal.cost.gradients == 0


CHECKS = (
    check_the_invariant,
    check_one_update_is_the_formulas,
    check_the_server_knows_n_and_its_step_size,
    check_it_reaches_the_optimum_where_fedavg_stays_biased,
    check_the_actual_steps_and_step_size_of_a_round,
    check_running_statistics_have_no_control_variate,
)
INVARIANT, FORMULAS, SERVER, OPTIMUM, ACTUAL, STATISTICS = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(Scaffold)


# wrong implementations


class ControlIsNeverStored(Scaffold):
    """c_i stays 0, as in FL-bench, whose server never stores it."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return replace(result, state=state)


class ControlOfTheServerStaysZero(Scaffold):
    def server_update(self, context, server, updates):
        return {**super().server_update(context, server, updates), "control": server["control"]}


class MeanOverTheCohort(Scaffold):
    """c moves by the mean over the cohort instead of 1/N of the sum."""

    def server_update(self, context, server, updates):
        return super().server_update(replace(context, agents=len(updates)), server, updates)


class WithoutSteps(Scaffold):
    """(x − y)/η without τ."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        x, c, c_i = received["model"], received["control"], state["control"]
        new = c_i - c + (x - result.vectors["model"]) / self.meta_lr
        sent = {**result.vectors, "control": c + (new - c_i)}
        return replace(result, vectors=sent, state={"control": new})


class SettingsInsteadOfActualSteps(Scaffold):
    """c_i⁺ by local_steps and meta_lr, whatever steps the agent took."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        x, c, c_i = received["model"], received["control"], state["control"]
        path = (x - result.vectors["model"]) / (self.local_steps * self.meta_lr)
        new = c_i - c + path
        return replace(
            result, vectors={**result.vectors, "control": c + path}, state={"control": new}
        )


class StatisticsHaveControl(Scaffold):
    """c_i⁺ by the path of the whole model, in which running statistics moved, too."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        if self.optimizer != SGD():
            return result
        x, c, c_i = received["model"], received["control"], state["control"]
        path = (x - result.vectors["model"]) / (self.steps_per_round(context) * self.meta_lr)
        return replace(result, state={"control": c_i - c + path})


class OtherSign(Scaffold):
    """The correction + c_i − c."""

    def agent_update(self, context, received, state):
        turned = {**received, "control": -received["control"]}
        result = super().agent_update(context, turned, {"control": -state["control"]})
        x, y, c, c_i = (
            received["model"],
            result.vectors["model"],
            received["control"],
            state["control"],
        )
        new = c_i - c + (x - y) / (self.local_steps * self.meta_lr)
        return replace(
            result, vectors={"model": y, "control": c + (new - c_i)}, state={"control": new}
        )


class WithoutCorrection(Scaffold):
    """Local steps are FedAvg's."""

    def agent_update(self, context, received, state):
        zero = torch.zeros_like(received["control"])
        return super().agent_update(context, {**received, "control": zero}, {"control": zero})


class WithoutServerLr(Scaffold):
    def server_update(self, context, server, updates):
        return Scaffold.server_update(replace(self, server_lr=1.0), context, server, updates)


MUTANTS = {
    ControlIsNeverStored: (INVARIANT, FORMULAS, OPTIMUM),
    ControlOfTheServerStaysZero: (INVARIANT, SERVER),
    MeanOverTheCohort: (INVARIANT, SERVER),
    WithoutSteps: (FORMULAS,),
    OtherSign: (FORMULAS,),
    WithoutCorrection: (FORMULAS,),
    WithoutServerLr: (SERVER,),
    SettingsInsteadOfActualSteps: (ACTUAL,),
    StatisticsHaveControl: (STATISTICS,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises((AssertionError, TrainingError)):
            check(mutant)
