"""FedALA: its formulas against autograd and loops, its limits, and wrong implementations."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from nufed import Objective, fedavg
from nufed.algorithms import AgentResult, FedALA
from nufed.algorithms.protocol import AgentUpdate, Cost, Personal
from nufed.simulation import DirectEngine, train
from support import agent_context, context, federation, mlp, same

PLAIN = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.1}
SEED, LR, ETA = 5, 0.1, 3.0
MLP, DATA = mlp(), federation()
DEEP = nn.Sequential(
    nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
).double()
HEAD = 4 * 3 + 3  # numbers of its last layer
TWO = HEAD + 6 * 4 + 4  # and of its last two


def make(cls, **settings):
    return cls(**{**PLAIN, "weights_lr": ETA, "first_passes": 4, **settings})


def history(algorithm, objective, rounds=5, data=DATA):
    w = objective.initial()
    engine = DirectEngine(objective, data, SEED)
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.6))


def some_state(objective, size, rounds, seed=0):
    """A received model, and the state of an agent that differs from it."""
    generator = torch.Generator().manual_seed(seed)
    w, theta = (
        objective.initial() + 0.5 * torch.randn(objective.size, generator=generator).double()
        for _ in range(2)
    )
    weights = torch.rand(size, generator=generator).double()
    return w, {"local": theta, "weights": weights, "rounds": w.new_full((1,), rounds)}


def share_of(source, share=0.8):
    """The samples on which W is trained, in batches: a random share, rounded up."""
    batches = source.epoch("weights", 6, share=share)
    assert sum(len(b.targets) for b in batches) == -int(-share * source.samples // 1)
    return batches


def trained_weights(objective, w, state, batches, passes, tolerance=1e-4, eta=ETA):
    """W after the passes, by autograd through θ + (w − θ)⊙W; how many steps; whether it stopped."""
    weights, size, steps = state["weights"], len(state["weights"]), 0
    low, own, new = w[:-size], state["local"][-size:], w[-size:]
    for _ in range(passes):
        before = weights
        for batch in batches:
            leaf = weights.clone().requires_grad_()
            value = objective.forward(torch.cat([low, own + (new - own) * leaf]), batch)
            (slope,) = torch.autograd.grad(value, leaf)
            weights, steps = (weights - eta * slope).clamp(0, 1), steps + 1
        if (weights - before).abs().max() <= tolerance:
            break
    return weights, torch.cat([low, own + (new - own) * weights]), steps


# the proofs


def check_a_round_is_the_formulas(cls):
    """θ̂, W and θ in every phase, for p = 1, 2 and all layers, to 1e-12; W stays in [0, 1]."""
    objective = Objective(DEEP)
    source = DATA.batches(2, SEED, "train", 3)
    moved = []
    for layers, size in ((1, HEAD), (2, TWO), (9, objective.size)):
        for rounds, passes in ((0, 0), (1, 4), (2, 1), (7, 1)):
            algorithm = make(cls, layers=layers)
            w, state = some_state(objective, size, rounds)
            result = algorithm.agent_update(agent_context(objective, source), {"model": w}, state)
            right, start, steps = trained_weights(objective, w, state, share_of(source), passes)
            theta = start
            for t in range(2):
                (batch,) = source.draw("outer", 6, step=t)
                theta = theta - LR * objective.grad(theta, batch)
            assert torch.allclose(result.state["weights"], right, rtol=0, atol=1e-12)
            assert torch.allclose(result.vectors["model"], theta, rtol=0, atol=1e-12)
            assert torch.equal(result.state["local"], result.vectors["model"])
            assert float(result.state["rounds"]) == rounds + 1
            assert result.cost == Cost(steps + 2)
            assert float(right.min()) >= 0 and float(right.max()) <= 1
            moved.append(float((right - state["weights"]).abs().max()))
    assert sum(m > 0.01 for m in moved) == 9


def check_the_personal_model_is_mixed_and_not_yet_trained(cls):
    """θ̂ for the model that is received now, with weights trained for it; lower layers are w's."""
    objective, algorithm = Objective(DEEP), make(cls)
    source = DATA.batches(2, SEED, "evaluate")
    w, state = some_state(objective, HEAD, 3)
    own = agent_context(objective, source)
    personal = algorithm.personal_model(own, {"model": w}, state)
    _, right, steps = trained_weights(objective, w, state, share_of(source), 1)
    assert torch.allclose(personal.model, right, rtol=0, atol=1e-12)
    assert torch.equal(personal.model[:-HEAD], w[:-HEAD]) and personal.cost == Cost(steps)
    newcomer = algorithm.personal_model(own, {"model": w}, None)
    assert torch.equal(newcomer.model, w) and newcomer.cost == Cost()


def check_an_agent_starts_from_the_received_model_with_weights_of_one(cls):
    objective, algorithm = Objective(DEEP), make(cls)
    w, _ = some_state(objective, HEAD, 0)
    state = algorithm.agent_init(objective, {"model": w})
    assert torch.equal(state["weights"], torch.ones(HEAD, dtype=torch.float64))
    start, weights, cost = algorithm.initialise(
        agent_context(objective, DATA.batches(2, 0, "train")), w, state
    )
    assert torch.equal(start, w) and bool((weights == 1).all()) and cost == Cost()


def check_weights_of_one_are_fedavg(cls):
    """To rounding on mixed layers; with no layers mixed to the bit."""
    objective = Objective(MLP)
    right = history(fedavg(**PLAIN), objective)
    for settings, most in (({"weights_lr": 0.0, "layers": 9}, 1e-14), ({"layers": 0}, 0.0)):
        for mine, other in zip(history(make(cls, **settings), objective), right, strict=True):
            gap = (mine.server["model"] - other.server["model"]).abs().max()
            assert float(gap) <= most
    assert not torch.equal(other.server["model"], objective.initial())


def check_weights_of_zero_on_all_layers_are_local(cls):
    """Each agent's model is local SGD from what it first received, to the bit."""

    class Zero(cls):
        def agent_init(self, objective, received):
            state = super().agent_init(objective, received)
            return {**state, "weights": torch.zeros_like(state["weights"])}

    objective = Objective(MLP)
    rounds = history(make(Zero, weights_lr=0.0, layers=9), objective)
    for agent in {a for p in rounds for a in p.cohort}:
        theta = None
        for before, progress in pairwise(rounds):
            if agent in progress.cohort:
                theta = before.server["model"] if theta is None else theta
                source = DATA.batches(agent, SEED, "train", progress.round)
                for t in range(2):
                    (batch,) = source.draw("outer", 6, step=t)
                    theta = torch.sub(theta, objective.grad(theta, batch), alpha=LR)
        assert torch.equal(rounds[-1].states.get(agent)["local"], theta)


def check_the_order_of_agents_changes_no_bit(cls):
    """One object serves all agents, forwards and backwards."""
    objective, algorithm = Objective(DEEP), make(cls)
    w, _ = some_state(objective, HEAD, 0)
    states = {agent: some_state(objective, HEAD, 1 + agent % 2, agent)[1] for agent in range(4)}

    def results(agents):
        return {
            agent: algorithm.agent_update(
                agent_context(objective, DATA.batches(agent, SEED, "train", 2)),
                {"model": w},
                states[agent],
            )
            for agent in agents
        }

    there, back, alone = results([0, 1, 2, 3]), results([3, 2, 1, 0]), results([2])
    for agent in states:
        assert same(there[agent].state, back[agent].state)
        assert same(there[agent].vectors, back[agent].vectors)
    assert same(there[2].state, alone[2].state)


def check_weights_are_first_trained_to_convergence(cls):
    """Many passes at first, until none changes W by more than the tolerance; at a fixed point."""
    objective, source = Objective(DEEP), DATA.batches(2, SEED, "train", 3)
    algorithm = make(
        cls, first_passes=3000, tolerance=1e-3, share=1.0, batch_size=18, weights_lr=1.0
    )
    w, state = some_state(objective, HEAD, 1)
    start, weights, cost = algorithm.initialise(agent_context(objective, source), w, state)
    (batch,) = source.epoch("weights", 18)
    slope = objective.grad(start, batch)[-HEAD:] * (w - state["local"])[-HEAD:]
    assert 5 < cost.gradients < 3000
    free = (weights > 0) & (weights < 1)
    assert float(slope[free].abs().max() if free.any() else 0) < 1.1e-3
    assert bool((slope[weights == 0] >= -1.1e-3).all() and (slope[weights == 1] <= 1.1e-3).all())
    again = {**state, "weights": weights, "rounds": state["rounds"] + 1}
    assert algorithm.initialise(agent_context(objective, source), w, again)[2] == Cost(1)


PROOFS = [
    check_a_round_is_the_formulas,
    check_the_personal_model_is_mixed_and_not_yet_trained,
    check_an_agent_starts_from_the_received_model_with_weights_of_one,
    check_weights_of_one_are_fedavg,
    check_weights_of_zero_on_all_layers_are_local,
    check_the_order_of_agents_changes_no_bit,
    check_weights_are_first_trained_to_convergence,
]


@pytest.mark.parametrize("check", PROOFS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedALA)


# wrong implementations


class OwnInitialise(FedALA):
    """FedALA's loop with places to go wrong."""

    def slope(self, objective, w, theta, weights, upper, batch):
        mixed = self.mixture(w, theta, weights, upper)
        return upper.take(objective.grad(mixed, batch)) * upper.take(w - theta)

    def mixture(self, w, theta, weights, upper):
        own = upper.take(theta)
        return upper.put(w, own + (upper.take(w) - own) * weights)

    def passes(self, rounds):
        return (0, self.first_passes, 1)[min(rounds, 2)]

    def clipped(self, weights):
        return weights.clamp(0, 1)

    def batches(self, context):
        return context.batches.epoch("weights", self.batch_size, share=self.share)

    def initialise(self, context, w, state):
        upper, theta, weights = self.upper(context.objective), state["local"], state["weights"]
        cost = Cost()
        for _ in range(self.passes(int(state["rounds"])) if upper.size else 0):
            before = weights
            for batch in self.batches(context):
                slope = self.slope(context.objective, w, theta, weights, upper, batch)
                weights = self.clipped(weights - self.weights_lr * slope)
                cost += Cost(1)
            if float((weights - before).abs().max()) <= self.tolerance:
                break
        return self.mixture(w, theta, weights, upper), weights, cost


class GradientAtTheLocalModel(OwnInitialise):
    def slope(self, objective, w, theta, weights, upper, batch):
        return upper.take(objective.grad(theta, batch)) * upper.take(w - theta)


class GradientAtTheGlobalModel(OwnInitialise):
    def slope(self, objective, w, theta, weights, upper, batch):
        return upper.take(objective.grad(w, batch)) * upper.take(w - theta)


class WithoutTheDifference(OwnInitialise):
    def slope(self, objective, w, theta, weights, upper, batch):
        return upper.take(objective.grad(self.mixture(w, theta, weights, upper), batch))


class WrongSign(OwnInitialise):
    def slope(self, *arguments):
        return -super().slope(*arguments)


class NotClipped(OwnInitialise):
    def clipped(self, weights):
        return weights


class LowerLayersStayLocal(OwnInitialise):
    def mixture(self, w, theta, weights, upper):
        return upper.put(theta, upper.take(super().mixture(w, theta, weights, upper)))


class Swapped(OwnInitialise):
    def mixture(self, w, theta, weights, upper):
        return super().mixture(w, theta, 1 - weights, upper)


class AlwaysOnePass(OwnInitialise):
    def passes(self, rounds):
        return min(rounds, 1)


class AlwaysToConvergence(OwnInitialise):
    def passes(self, rounds):
        return self.first_passes if rounds else 0


class AllSamples(OwnInitialise):
    def batches(self, context):
        return context.batches.epoch("weights", self.batch_size)


class LayersAreTensors(FedALA):
    """p counts parameter tensors: p = 1 is a bias."""

    def upper(self, objective):
        size = sum(objective.base.sizes[-self.layers :]) if self.layers else 0
        return objective.base.part("all").__class__("last", slice(-size, None), size)


class WeightsAreForgotten(FedALA):
    def initialise(self, context, w, state):
        fresh = {**state, "weights": torch.ones_like(state["weights"])}
        return super().initialise(context, w, fresh)


class WeightsStartAtZero(FedALA):
    def agent_init(self, objective, received):
        state = super().agent_init(objective, received)
        return {**state, "weights": torch.zeros_like(state["weights"])}


class MixtureIsKept(FedALA):
    """Keeps θ̂ instead of the trained model."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        start, _, _ = self.initialise(context, received["model"], state)
        return AgentResult(result.vectors, {**result.state, "local": start}, result.cost)


class PersonalModelIsLocal(FedALA):
    """After local training, of the agent's last round."""

    def personal_model(self, context, received, state):
        if state is None:
            return super().personal_model(context, received, None)
        return Personal({"model": state["local"]})


class PersonalModelIsGlobal(FedALA):
    def personal_model(self, context, received, state):
        return Personal({"model": received["model"]})


class StaleWeights(FedALA):
    """Mixes for use with the weights of the last round."""

    def personal_model(self, context, received, state):
        if state is None:
            return super().personal_model(context, received, None)
        still = {**state, "rounds": torch.zeros_like(state["rounds"])}
        return super().personal_model(context, received, still)


class LeaksToTheNextAgent(FedALA):
    """W and the local model belong to the object, which serves all agents."""

    def agent_update(self, context, received, state):
        kept = self.__dict__.get("kept", state)
        result = super().agent_update(context, received, kept)
        object.__setattr__(self, "kept", result.state)
        return result


FORMULAS = check_a_round_is_the_formulas
USE = check_the_personal_model_is_mixed_and_not_yet_trained
MUTANTS = [
    (GradientAtTheLocalModel, FORMULAS),
    (GradientAtTheGlobalModel, FORMULAS),
    (WithoutTheDifference, FORMULAS),
    (WrongSign, FORMULAS),
    (WrongSign, check_weights_are_first_trained_to_convergence),
    (NotClipped, FORMULAS),
    (LowerLayersStayLocal, FORMULAS),
    (LowerLayersStayLocal, USE),
    (Swapped, FORMULAS),
    (Swapped, check_weights_of_one_are_fedavg),
    (Swapped, check_weights_of_zero_on_all_layers_are_local),
    (AlwaysOnePass, FORMULAS),
    (AlwaysOnePass, check_weights_are_first_trained_to_convergence),
    (AlwaysToConvergence, FORMULAS),
    (AllSamples, FORMULAS),
    (LayersAreTensors, check_an_agent_starts_from_the_received_model_with_weights_of_one),
    (WeightsAreForgotten, FORMULAS),
    (WeightsStartAtZero, check_an_agent_starts_from_the_received_model_with_weights_of_one),
    (WeightsStartAtZero, check_weights_of_one_are_fedavg),
    (MixtureIsKept, FORMULAS),
    (MixtureIsKept, check_weights_of_zero_on_all_layers_are_local),
    (PersonalModelIsLocal, USE),
    (PersonalModelIsGlobal, USE),
    (StaleWeights, USE),
    (LeaksToTheNextAgent, check_the_order_of_agents_changes_no_bit),
]


def test_the_loop_that_wrong_implementations_change_is_right():
    for check in PROOFS:
        check(OwnInitialise)


@pytest.mark.parametrize(
    "mutant, check", [pytest.param(m, c, id=f"{m.__name__}-{c.__name__}") for m, c in MUTANTS]
)
def test_a_wrong_copy_is_rejected(mutant, check):
    with pytest.raises(AssertionError):
        check(mutant)


# what is around it


def test_an_agent_that_was_left_out_keeps_its_weights():
    """Only the cohort mixes; nothing else changes a state."""
    rounds = history(make(FedALA), Objective(MLP), rounds=2)
    out = set(DATA.split.agents) - {a for p in rounds for a in p.cohort}
    assert out and all(rounds[-1].states.get(agent) is None for agent in out)


def test_the_server_averages_trained_models():
    algorithm = make(FedALA)
    vectors = [torch.full((3,), float(i), dtype=torch.float64) for i in (1, 2, 6)]
    updates = [AgentUpdate(i, 1, 9, {"model": v}) for i, v in enumerate(vectors)]
    after = algorithm.server_update(context(), {"model": vectors[0]}, updates)
    assert after["model"].tolist() == [3.0] * 3
