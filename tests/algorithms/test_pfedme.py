"""pFedMe: the gradient of Moreau envelopes, its inner loop, and which vector is tested."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nufed import Objective
from nufed.algorithms import AgentResult, AgentUpdate, Cost, Personal, PFedMe
from nufed.evaluate import Measure
from nufed.server import to_send
from nufed.simulation import DirectEngine, train
from support import (
    Point,
    agent_context,
    context,
    federation,
    mlp,
    quadratic_loss,
    quadratics,
    states_of,
)

SETTINGS = {
    "weight": 3.0,
    "inner_lr": 0.15,
    "inner_steps": 4,
    "server_lr": 0.8,
    "meta_lr": 0.1,
    "local_steps": 3,
    "batch_size": 6,
}


def history(algorithm, engine, rounds=4, participation=0.5):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=participation))


def inner_loop(objective, w, batch, weight=3.0, lr=0.15, steps=4):
    """θ by its formula."""
    theta = w
    for _ in range(steps):
        theta = theta - lr * (objective.grad(theta, batch) + weight * (theta - w))
    return theta


def local_loop(objective, source, w):
    """θ and w_i after three local iterations, one batch each."""
    for t in range(3):
        (batch,) = source.draw("outer", 6, step=t)
        theta = inner_loop(objective, w, batch)
        w = w - 0.1 * 3.0 * (w - theta)
    return theta, w


def check_step_is_the_gradient_of_the_envelope(cls):
    """(w − w_i)/η = ∇F(w) = λ(w − θ̂) to 1e-8, for ½(θ − b)ᵀA(θ − b)."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    eye = torch.eye(3, dtype=torch.float64)
    for agent, (a, b) in enumerate(pairs[:3]):
        for weight in (0.5, 5.0):
            closed = torch.linalg.solve(a + weight * eye, a @ b + weight * w)
            envelope = (
                0.5 * (closed - b) @ a @ (closed - b) + weight / 2 * (closed - w).square().sum()
            )
            (by_w,) = torch.autograd.grad(envelope, w)
            right = weight * (w - closed).detach()
            torch.testing.assert_close(by_w, right, rtol=1e-8, atol=1e-8)
            algorithm = cls(
                weight=weight,
                inner_lr=1 / (float(torch.linalg.eigvalsh(a)[-1]) + weight),
                inner_steps=300,
                meta_lr=0.01,
                local_steps=1,
                batch_size=3,
            )
            own = agent_context(objective, data.batches(agent, 0, "train", 1))
            state = {"personal": torch.zeros(3, dtype=torch.float64)}
            result = algorithm.agent_update(own, {"model": w.detach()}, state)
            found = (w.detach() - result.vectors["model"]) / 0.01
            torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-8)
            theta = result.state["personal"]
            torch.testing.assert_close(theta, closed.detach(), rtol=1e-8, atol=1e-8)


def check_rounds_are_the_formula(cls):
    """θ, w_i and w against independent loops, one batch for the K steps of an iteration."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    rounds, thetas = history(cls(**SETTINGS), engine), {}
    for before, progress in pairwise(rounds):
        w, ends = before.server["model"], []
        for agent in progress.cohort:
            source = data.batches(agent, 5, "train", progress.round)
            thetas[agent], own = local_loop(engine.objective, source, w)
            ends.append(own)
        right = 0.2 * w + 0.8 * torch.stack(ends).mean(0)
        torch.testing.assert_close(progress.server["model"], right, rtol=0, atol=1e-12)
    for agent, theta in thetas.items():
        found = rounds[-1].states.get(agent)["personal"]
        torch.testing.assert_close(found, theta, rtol=0, atol=1e-12)


def check_theta_nears_w_like_one_over_lambda(cls):
    """λ‖θ − w‖ is ‖∇f(w)‖ but for a share L/λ."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    a, b = pairs[0]
    largest = float(torch.linalg.eigvalsh(a)[-1])
    slope = float((a @ (w - b)).norm())
    own = agent_context(objective, data.batches(0, 0, "train", 1))
    for weight in (1e2, 1e4, 1e6):
        algorithm = cls(
            weight=weight, inner_lr=1 / (largest + weight), inner_steps=20, meta_lr=1e-9,
            local_steps=1, batch_size=3,
        )  # fmt: skip
        theta = algorithm.agent_update(own, {"model": w}, {"personal": w}).state["personal"]
        assert weight * float((theta - w).norm()) == pytest.approx(slope, rel=2 * largest / weight)


def check_the_tested_vector_is_theta(cls):
    """Evaluation of trained agents reads θ of their last local iteration, not w and not w_i."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    algorithm = cls(**SETTINGS)
    rounds = history(algorithm, engine, 3, participation=1.0)
    before, last = rounds[-2:]
    states, received = states_of(engine, last), to_send(algorithm, last.server)
    scores = engine.evaluate(
        algorithm, received, states, steps=0, measure=Measure("accuracy")
    )  # fmt: skip
    for score in scores:
        source = data.batches(score.agent, 5, "train", last.round)
        theta, w_i = local_loop(engine.objective, source, before.server["model"])
        tested = data.scored(score.agent)
        at = {
            name: float(engine.objective.value(vector, tested))
            for name, vector in (("θ", theta), ("w", last.server["model"]), ("w_i", w_i))
        }
        assert score.loss[0] == pytest.approx(at["θ"], rel=1e-9)
        assert score.loss[0] != pytest.approx(at["w"], rel=1e-4)
        assert score.loss[0] != pytest.approx(at["w_i"], rel=1e-4)


def check_a_newcomer_takes_inner_steps_from_w(cls):
    """On one batch; they are counted."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "evaluate"))
    w = objective.initial()
    new = cls(**SETTINGS).personal_model(own, {"model": w}, None)
    (batch,) = own.batches.draw("personal", 6)
    right = inner_loop(objective, w, batch)
    torch.testing.assert_close(new.model, right, rtol=0, atol=1e-13)
    assert new.cost == Cost(4)


def check_the_server_weighs_the_mean(cls):
    """(1 − β)w + β·mean, with β beyond 1 too; β = 1 is the mean to the bit."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    ends = (torch.tensor([2.0, 0.3]).double(), torch.tensor([4.0, -1.0]).double())
    updates = [AgentUpdate(i, 1, 5, {"model": end}) for i, end in enumerate(ends)]
    for beta in (0.25, 1.0, 2.0):
        algorithm = replace(cls(**SETTINGS), server_lr=beta)
        after = algorithm.server_update(context(), {"model": w}, updates)["model"]
        right = (1 - beta) * w + beta * (ends[0] + ends[1]) / 2
        torch.testing.assert_close(after, right, rtol=0, atol=0 if beta == 1 else 1e-15)


CHECKS = (
    check_step_is_the_gradient_of_the_envelope,
    check_rounds_are_the_formula,
    check_theta_nears_w_like_one_over_lambda,
    check_the_tested_vector_is_theta,
    check_a_newcomer_takes_inner_steps_from_w,
    check_the_server_weighs_the_mean,
)


@pytest.mark.parametrize("check", CHECKS)
def test_proof(check):
    check(PFedMe)


def test_inner_steps_are_counted():
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    w = objective.initial()
    result = PFedMe(**SETTINGS).agent_update(own, {"model": w}, {"personal": w})
    assert result.cost == Cost(3 * 4)


# wrong implementations


class LocalIsTested(PFedMe):
    """θ is the live list of parameters, into which w_i is copied at the end."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return replace(result, state={"personal": result.vectors["model"]})


class GlobalIsTested(PFedMe):
    def personal_model(self, context, received, state):
        return Personal({"model": received["model"]})


class InitialIsTested(PFedMe):
    def agent_update(self, context, received, state):
        return replace(super().agent_update(context, received, state), state=state)


class CentreIsTheModel(PFedMe):
    """λ(θ − θ): the term is identically 0."""

    def proximal_point(self, objective, w, batch):
        theta = w
        for _ in range(self.inner_steps):
            theta = theta - self.inner_lr * objective.grad(theta, batch)
        return theta


class WeightDecay(PFedMe):
    """The authors' optimiser."""

    def proximal_point(self, objective, w, batch):
        theta = w
        for _ in range(self.inner_steps):
            g = objective.grad(theta, batch) + self.weight * (theta - w) + 1e-3 * theta
            theta = theta - self.inner_lr * g
        return theta


class Loop(PFedMe):
    """Local iterations with ``theta_of`` and ``step``."""

    def agent_update(self, context, received, state):
        w, theta = received["model"], received["model"]
        for t in range(self.local_steps):
            theta = self.theta_of(context, received["model"], w, theta, t)
            w = w - self.step() * (w - theta)
        cost = Cost(self.local_steps * self.inner_steps)
        return AgentResult({"model": w}, {"personal": theta}, cost)

    def step(self):
        return self.meta_lr * self.weight

    def theta_of(self, context, received, w, theta, t):
        (batch,) = context.batches.draw("outer", self.batch_size, step=t)
        return self.proximal_point(context.objective, w, batch)


class NewBatches(Loop):
    def theta_of(self, context, received, w, theta, t):
        theta = w
        for batch in context.batches.draw("outer", self.batch_size, self.inner_steps, step=t):
            g = context.objective.grad(theta, batch) + self.weight * (theta - w)
            theta = theta - self.inner_lr * g
        return theta


class CarriedOver(Loop):
    def theta_of(self, context, received, w, theta, t):
        (batch,) = context.batches.draw("outer", self.batch_size, step=t)
        for _ in range(self.inner_steps):
            g = context.objective.grad(theta, batch) + self.weight * (theta - w)
            theta = theta - self.inner_lr * g
        return theta


class AroundTheGlobalModel(Loop):
    """The centre is w for all iterations, instead of w_i."""

    def theta_of(self, context, received, w, theta, t):
        (batch,) = context.batches.draw("outer", self.batch_size, step=t)
        return self.proximal_point(context.objective, received, batch)


class WithoutLambda(Loop):
    def step(self):
        return self.meta_lr


class WithoutEta(Loop):
    def step(self):
        return self.weight * self.inner_lr


class SendsTheta(PFedMe):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return replace(result, vectors={"model": result.state["personal"]})


class WithoutBeta(PFedMe):
    def server_update(self, context, server, updates):
        return {"model": self.aggregation.combine(updates, "model", server["model"])}


class BetaTurned(PFedMe):
    def server_update(self, context, server, updates):
        mean = self.aggregation.combine(updates, "model", server["model"])
        return {"model": self.server_lr * server["model"] + (1 - self.server_lr) * mean}


ENVELOPE, ROUNDS, LIMIT, TESTED, NEW, SERVER = CHECKS
MUTANTS = {
    LocalIsTested: (ROUNDS, LIMIT, TESTED),
    GlobalIsTested: (TESTED, NEW),
    InitialIsTested: (ROUNDS, TESTED),
    CentreIsTheModel: (ENVELOPE, ROUNDS, LIMIT, NEW),
    WeightDecay: (ENVELOPE, ROUNDS, NEW),
    NewBatches: (ROUNDS, TESTED),
    CarriedOver: (ROUNDS,),
    AroundTheGlobalModel: (ROUNDS,),
    WithoutLambda: (ENVELOPE, ROUNDS),
    WithoutEta: (ENVELOPE, ROUNDS),
    SendsTheta: (ENVELOPE, ROUNDS),
    WithoutBeta: (ROUNDS, SERVER),
    BetaTurned: (ROUNDS, SERVER),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)


def test_the_loop_that_wrong_implementations_change_is_right():
    check_rounds_are_the_formula(Loop)
