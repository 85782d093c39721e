"""APFL: w is FedAvg's, the gradients of v and α are autograd's, and its two ends α = 0 and 1."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nufed import Objective, fedavg
from nufed.algorithms import APFL, AgentResult, Cost, Personal
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import agent_context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}


def history(algorithm, engine, rounds=4):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def random_like(w, seed):
    return torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=w.dtype)


def close(found, right, atol=1e-12):
    torch.testing.assert_close(found, right, rtol=0, atol=atol)


def check_w_is_fedavg(cls, kind=DirectEngine):
    """To the bit."""
    engine = kind(Objective(mlp()), federation(), 5)
    both = [history(a, engine) for a in (cls(mixing=0.3, **SHARED), fedavg(**SHARED))]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_gradients_are_those_of_autograd(cls):
    """∂f/∂v and ∂f/∂α of f(αv + (1 − α)w) at α = 0.3, and ∂f/∂w of f(w), in one step."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    (batch,) = own.batches.draw("outer", 6, step=0)
    w, v = (random_like(objective.initial(), seed).requires_grad_() for seed in (1, 2))
    alpha = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    mixed = objective.forward(alpha * v + (1 - alpha) * w, batch)
    by_v, by_alpha = torch.autograd.grad(mixed, (v, alpha))
    (by_w,) = torch.autograd.grad(objective.forward(w, batch), w)
    algorithm = cls(mixing_lr=0.01, **{**SHARED, "local_steps": 1})
    state = {"personal": v.detach(), "mixing": alpha.detach()}
    result = algorithm.agent_update(own, {"model": w.detach()}, state)
    close((v - result.state["personal"]).detach() / 0.1, by_v)
    close((w - result.vectors["model"]).detach() / 0.1, by_w)
    close((alpha - result.state["mixing"]).detach() / 0.01, by_alpha)
    assert abs(float(by_alpha)) > 0.1


def check_rounds_are_the_formula(cls):
    """Against a loop: α learned once per round, with the first batch."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    grad, rounds = engine.objective.grad, history(cls(mixing=0.4, mixing_lr=2.0, **SHARED), engine)
    own = {a: (engine.objective.initial(), 0.4) for a in data.split.agents}
    for before, progress in pairwise(rounds):
        for agent in progress.cohort:
            w, (v, alpha) = before.server["model"], own[agent]
            source = data.batches(agent, 5, "train", progress.round)
            for t in range(3):
                (batch,) = source.draw("outer", 6, step=t)
                g = grad(alpha * v + (1 - alpha) * w, batch)
                product = float(g @ (v - w))
                v, w = v - 0.1 * alpha * g, w - 0.1 * grad(w, batch)
                if t == 0:
                    alpha = min(1.0, max(0.0, alpha - 2.0 * product))
            own[agent] = v, alpha
    moved = 0
    for agent in {a for p in rounds for a in p.cohort}:
        v, alpha = own[agent]
        state = rounds[-1].states.get(agent)
        close(state["personal"], v)
        assert float(state["mixing"]) == pytest.approx(alpha, abs=1e-12)
        moved += abs(alpha - 0.4) > 1e-3
    assert moved >= 2


def check_alpha_one_is_local_training(cls):
    """On the draws of w, from the initial model, to the bit."""
    algorithm, data = cls(mixing=1.0, mixing_lr=0.0, **SHARED), federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    rounds = history(algorithm, engine)
    received = {"model": rounds[-1].server["model"]}
    for agent in {a for p in rounds for a in p.cohort}:
        v = engine.objective.initial()
        for progress in rounds[1:]:
            for t in range(3 * (agent in progress.cohort)):
                source = data.batches(agent, 5, "train", progress.round)
                (batch,) = source.draw("outer", 6, step=t)
                v = torch.sub(v, engine.objective.grad(v, batch), alpha=0.1)
        state = rounds[-1].states.get(agent)
        assert torch.equal(state["personal"], v) and float(state["mixing"]) == 1
        own = agent_context(engine.objective, data.batches(agent, 5, "evaluate"))
        assert torch.equal(algorithm.personal_model(own, received, state).model, v)


def check_alpha_zero_is_the_global_model(cls):
    """To the bit, whatever v is."""
    algorithm, data = cls(mixing=0.0, mixing_lr=0.0, **SHARED), federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    rounds = history(algorithm, engine)
    w = rounds[-1].server["model"]
    for agent in {a for p in rounds for a in p.cohort}:
        state = {**rounds[-1].states.get(agent), "personal": random_like(w, agent)}
        own = agent_context(engine.objective, data.batches(agent, 5, "evaluate"))
        assert torch.equal(algorithm.personal_model(own, {"model": w}, state).model, w)


def check_the_personal_model_mixes_with_the_received_w(cls):
    """After training, with the w of now."""
    objective, data = Objective(mlp()), federation()
    algorithm = cls(mixing=0.3, mixing_lr=0.0, **SHARED)
    w, v, now = (random_like(objective.initial(), seed) for seed in (1, 2, 3))
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    state = {"personal": v, "mixing": torch.tensor([0.3], dtype=torch.float64)}
    after = algorithm.agent_update(own, {"model": w}, state).state
    personal = algorithm.personal_model(own, {"model": now}, after)
    close(personal.model, 0.3 * after["personal"] + 0.7 * now, 1e-15)
    assert personal.cost == Cost()


def check_alpha_stays_within_its_bounds(cls):
    """0 and 1 are reached, and never passed."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    w = objective.initial()
    (batch,) = own.batches.draw("outer", 6, step=0)
    alpha, ends = torch.tensor([0.5], dtype=torch.float64), set()
    for sign in (1, -1):
        v = w + sign * objective.grad(w, batch)
        state = {"personal": v, "mixing": alpha}
        result = cls(mixing_lr=1e4, **SHARED).agent_update(own, {"model": w}, state)
        ends.add(float(result.state["mixing"]))
    assert ends == {0.0, 1.0}


def check_a_newcomer_trains_v_from_w(cls):
    """For one round's steps with w and α fixed; they are counted."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "evaluate"))
    w = objective.initial()
    new = cls(mixing=0.3, **SHARED).personal_model(own, {"model": w}, None)
    v = w
    for t in range(3):
        (batch,) = own.batches.draw("outer", 6, step=t)
        v = v - 0.1 * 0.3 * objective.grad(0.3 * v + 0.7 * w, batch)
    close(new.model, 0.3 * v + 0.7 * w, 1e-14)
    assert new.cost == Cost(3) and not torch.equal(new.model, w)


CHECKS = (
    check_w_is_fedavg,
    check_gradients_are_those_of_autograd,
    check_rounds_are_the_formula,
    check_alpha_one_is_local_training,
    check_alpha_zero_is_the_global_model,
    check_the_personal_model_mixes_with_the_received_w,
    check_alpha_stays_within_its_bounds,
    check_a_newcomer_trains_v_from_w,
)


@pytest.mark.parametrize("check", CHECKS)
def test_proof(check):
    check(APFL)


def test_w_is_fedavg_on_a_stack_too():
    check_w_is_fedavg(APFL, BatchedEngine)


def test_both_gradients_of_a_step_are_counted():
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    received = {"model": objective.initial()}
    algorithm = APFL(**SHARED)
    result = algorithm.agent_update(own, received, algorithm.agent_init(objective, received))
    assert result.cost == Cost(2 * 3)


# wrong implementations


class Loop(APFL):
    """The right loop, of which wrong implementations change one line each."""

    def agent_update(self, context, received, state):
        w, v, alpha = received["model"], state["personal"], state["mixing"]
        self_grad = context.objective.grad
        for t, batch in enumerate(self.local_batches(context)):
            g = self_grad(self.point(alpha, v, w), batch)
            slope = self.slope(self_grad, g, alpha, v, w, batch)
            v, w = self.step(self_grad, g, alpha, v, w, batch)
            if self.learns(t):
                alpha = self.bounded(alpha - self.mixing_lr * slope)
        state = {"personal": self.kept(alpha, v, w), "mixing": alpha}
        return AgentResult({"model": w}, state, Cost(2 * self.local_steps))

    def point(self, alpha, v, w):
        return alpha * v + (1 - alpha) * w

    def slope(self, grad, g, alpha, v, w, batch):
        return (g * (v - w)).sum(-1, keepdim=True)

    def step(self, grad, g, alpha, v, w, batch):
        return v - 0.1 * alpha * g, torch.sub(w, grad(w, batch), alpha=0.1)

    def learns(self, t):
        return t == 0

    def bounded(self, alpha):
        return alpha.clamp(0, 1)

    def kept(self, alpha, v, w):
        return v


class TrainedAlone(Loop):
    """v is trained on f(v) and then overwritten by the mixture."""

    def point(self, alpha, v, w):
        return v

    def step(self, grad, g, alpha, v, w, batch):
        return v - 0.1 * g, w - 0.1 * grad(w, batch)

    def kept(self, alpha, v, w):
        return alpha * v + (1 - alpha) * w


class MixedGradients(Loop):
    """The slope from ∇f(v) and ∇f(w) instead of ∇f(v̄)."""

    def slope(self, grad, g, alpha, v, w, batch):
        g = alpha * grad(v, batch) + (1 - alpha) * grad(w, batch)
        return (g * (v - w)).sum(-1, keepdim=True)


class Regularised(Loop):
    """The authors' 0.02·α."""

    def slope(self, grad, g, alpha, v, w, batch):
        return (g * (v - w)).sum(-1, keepdim=True) + 0.02 * alpha


class TwoStepsOfW(Loop):
    """One optimiser for both models, whose gradients are not cleared."""

    def step(self, grad, g, alpha, v, w, batch):
        return v - 0.1 * alpha * g, w - 2 * 0.1 * grad(w, batch)


class WFirst(Loop):
    """The gradient of v at the w_i after its step."""

    def step(self, grad, g, alpha, v, w, batch):
        w = w - 0.1 * grad(w, batch)
        return v - 0.1 * alpha * grad(self.point(alpha, v, w), batch), w


class WithoutAlpha(Loop):
    def step(self, grad, g, alpha, v, w, batch):
        return v - 0.1 * g, torch.sub(w, grad(w, batch), alpha=0.1)


class OtherSign(Loop):
    def slope(self, grad, g, alpha, v, w, batch):
        return (g * (w - v)).sum(-1, keepdim=True)


class EveryStep(Loop):
    def learns(self, t):
        return True


class NeverLearned(Loop):
    def learns(self, t):
        return False


class Unbounded(Loop):
    def bounded(self, alpha):
        return alpha


class AlphaTurned(Loop):
    def point(self, alpha, v, w):
        return (1 - alpha) * v + alpha * w


class KeepsItsMixture(Loop):
    """The mixture with w_i of training is the personal model."""

    def kept(self, alpha, v, w):
        return alpha * v + (1 - alpha) * w

    def personal_model(self, context, received, state):
        return Personal({"model": state["personal"]})


class PlainV(APFL):
    """The personal model is v."""

    def personal_model(self, context, received, state):
        return Personal({"model": received["model"] if state is None else state["personal"]})


class LearnsFromTheGlobalModel(APFL):
    """v starts anew from w in every round."""

    def agent_update(self, context, received, state):
        return super().agent_update(context, received, {**state, "personal": received["model"]})


class SendsTheMixture(APFL):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        alpha, v, w = result.state["mixing"], result.state["personal"], result.vectors["model"]
        return replace(result, vectors={"model": alpha * v + (1 - alpha) * w})


W, GRADIENTS, ROUNDS, ONE, ZERO, RECEIVED, BOUNDS, NEW = CHECKS
MUTANTS = {
    TrainedAlone: (GRADIENTS, ROUNDS),
    MixedGradients: (GRADIENTS, ROUNDS),
    Regularised: (GRADIENTS, ROUNDS),
    TwoStepsOfW: (W, GRADIENTS, ROUNDS),
    WFirst: (GRADIENTS, ROUNDS),
    WithoutAlpha: (GRADIENTS, ROUNDS),
    OtherSign: (GRADIENTS, ROUNDS),
    EveryStep: (ROUNDS,),
    NeverLearned: (GRADIENTS, ROUNDS, BOUNDS),
    Unbounded: (BOUNDS,),
    AlphaTurned: (GRADIENTS, ROUNDS, ONE),
    KeepsItsMixture: (ROUNDS, ZERO, RECEIVED),
    PlainV: (ZERO, RECEIVED, NEW),
    LearnsFromTheGlobalModel: (GRADIENTS, ROUNDS, ONE),
    SendsTheMixture: (W, GRADIENTS),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)


def test_the_loop_that_wrong_implementations_change_is_right():
    for check in (W, GRADIENTS, ROUNDS, BOUNDS):
        check(Loop)
