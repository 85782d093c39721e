"""FedDBE: without bias and regulariser it is FedAvg; its gradients and rounds by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import InputError, Objective, fedavg
from nufed.algorithms import Cost, FedDBE
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}
ALL = {"weight": 3.0, "mean_momentum": 0.4, **SHARED}


def history(algorithm, engine, rounds=4):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def random_like(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def features_by_hand(w, x):
    """What the last layer of `mlp` gets."""
    return torch.tanh(x.double() @ w[:35].reshape(7, 5).T + w[35:42])


def outputs_by_hand(w, b, x):
    return (features_by_hand(w, x) + b) @ w[42:63].reshape(3, 7).T + w[63:]


def gradients_by_hand(w, b, batch, m, consensus, weight=3.0, momentum=0.4):
    w, b = (vector.detach().requires_grad_() for vector in (w, b))
    loss = F.cross_entropy(outputs_by_hand(w, b, batch.inputs), batch.targets)
    mean = features_by_hand(w, batch.inputs).sum(0) / len(batch.targets)
    mean = mean if m is None else (1 - momentum) * m.detach() + momentum * mean
    if consensus is not None:
        loss = loss + weight / 2 * ((mean - consensus) ** 2).sum() / 7
    return (*torch.autograd.grad(loss, (w, b)), mean.detach())


def check_without_both_it_is_fedavg(cls):
    """κ = 0 and the bias fixed at 0, to the bit."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    algorithm = cls(weight=0.0, bias_lr=0.0, **SHARED)
    both = [history(a, engine) for a in (algorithm, fedavg(**SHARED))]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_gradients_are_those_of_autograd(cls):
    """By the model and by the bias, of the loss written out by hand."""
    objective, data = Objective(mlp()), federation()
    (batch,) = data.batches(2, 0, "train", 1).draw("outer", 6)
    y, b, m, consensus = (random_like(n, seed) for seed, n in enumerate((66, 7, 7, 7)))
    for before in (None, m):
        found = cls(**ALL).gradients(objective, (y, b), batch, before, consensus)
        right = gradients_by_hand(y, b, batch, before, consensus)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
            assert not one.requires_grad


def check_the_consensus_is_of_the_first_round(cls):
    """That round is FedAvg's; its mean of running means stays, and b is 0 until then."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    rounds = history(cls(**ALL), engine)
    plain = history(fedavg(**SHARED), engine)
    torch.testing.assert_close(
        rounds[1].server["model"], plain[1].server["model"], rtol=0, atol=1e-14
    )
    means = []
    for agent in rounds[1].cohort:
        y, m = rounds[0].server["model"], None
        for t in range(3):
            (batch,) = engine.federation.batches(agent, 5, "train", 1).draw("outer", 6, step=t)
            by_y, _, m = gradients_by_hand(y, torch.zeros(7), batch, m, None)
            y = y - 0.1 * by_y
        means.append(m)
    for progress in rounds[1:]:
        found = progress.server["mean"]
        torch.testing.assert_close(found, torch.stack(means).mean(0), rtol=0, atol=1e-13)


def check_rounds_are_the_formula(cls):
    """Against a loop over rounds, agents and steps, with one step size and with two."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    for algorithm, bias_lr in ((cls(**ALL), 0.1), (cls(bias_lr=0.5, **ALL), 0.5)):
        rounds, biases = history(algorithm, engine, 5), {}
        for before, progress in pairwise(rounds):
            w, consensus, ends = before.server["model"], before.server["mean"], []
            first = progress.round == 1
            for agent in progress.cohort:
                y, m = w, None
                b = biases.get(agent, torch.zeros(7, dtype=torch.float64))
                source = data.batches(agent, 5, "train", progress.round)
                for t in range(3):
                    (batch,) = source.draw("outer", 6, step=t)
                    known = None if first else consensus
                    by_y, by_b, m = gradients_by_hand(y, b, batch, m, known)
                    y, b = y - 0.1 * by_y, b - bias_lr * by_b * (not first)
                ends.append(y)
                biases[agent] = b
            right = torch.stack(ends).mean(0)
            torch.testing.assert_close(progress.server["model"], right, rtol=0, atol=1e-12)
        for agent, b in biases.items():
            found = rounds[-1].states.get(agent)["bias"]
            torch.testing.assert_close(found, b, rtol=0, atol=1e-12)
        assert max(float(b.norm()) for b in biases.values()) > 0.01


def check_the_personal_model_has_the_bias(cls):
    """Its outputs are those of the head at z + b; a newcomer's are the global model's."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "evaluate"))
    w, b, x = random_like(66, 1), random_like(7, 2), own.batches.whole().inputs
    received, algorithm = {"model": w, "mean": random_like(7, 3)}, cls(**ALL)
    known = algorithm.personal_model(own, received, {"bias": b})
    found = algorithm.predict(objective, known.tensors, x)
    torch.testing.assert_close(found, outputs_by_hand(w, b, x), rtol=0, atol=1e-13)
    new = algorithm.personal_model(own, received, None)
    assert torch.equal(algorithm.predict(objective, new.tensors, x), objective.predict(w, x))
    assert known.cost == new.cost == Cost()


def check_fine_tuning_takes_steps_under_the_bias(cls):
    """Of w alone, with gradients of the head at z + b."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "evaluate"))
    w, b = random_like(66, 1), random_like(7, 2)
    received, algorithm = {"model": w, "mean": random_like(7, 3)}, cls(**ALL)
    personal = algorithm.personal_model(own, received, {"bias": b}).tensors
    *_, last = algorithm.fine_tune(own, received, personal, 2, scale=0.5)
    for batch in own.batches.draw("adapt", 6, 2):
        w = w - 0.05 * gradients_by_hand(w, b, batch, None, None)[0]
    torch.testing.assert_close(last["model"], w, rtol=0, atol=1e-13)
    assert torch.equal(last["bias"], b)


CHECKS = (
    check_without_both_it_is_fedavg,
    check_gradients_are_those_of_autograd,
    check_the_consensus_is_of_the_first_round,
    check_rounds_are_the_formula,
    check_the_personal_model_has_the_bias,
    check_fine_tuning_takes_steps_under_the_bias,
)
FEDAVG, GRADIENTS, CONSENSUS, ROUNDS, PERSONAL, TUNED = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedDBE)


def test_the_bias_stays_with_the_agent():
    """Sent are the model and, in the first round, the mean of features."""
    objective, data = Objective(mlp()), federation()
    received = {"model": objective.initial(), "mean": torch.zeros(7, dtype=torch.float64)}
    for round, names in ((1, {"model", "mean"}), (2, {"model"})):
        own = agent_context(objective, data.batches(2, 0, "train", round), round)
        result = FedDBE(**ALL).agent_update(own, received, {"bias": random_like(7, 1)})
        assert set(result.vectors) == names and result.cost == Cost(3)
        assert set(result.state) == {"bias"}


def test_a_last_layer_that_is_not_linear_is_refused():
    objective = Objective(nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)))
    with pytest.raises(InputError, match=r"last layer \(1\) is a LayerNorm: this algorithm needs"):
        FedDBE(**ALL).server_init(objective, objective.initial())


# wrong implementations


class SumOverFeatures(FedDBE):
    def gradients(self, *arguments):
        return super(SumOverFeatures, replace(self, weight=7 * self.weight)).gradients(*arguments)


class WithoutMomentum(FedDBE):
    """The mean of the batch alone."""

    def gradients(self, objective, at, batch, m, consensus):
        return super().gradients(objective, at, batch, None, consensus)


class RegularisesShiftedFeatures(FedDBE):
    """(m + b − m̄)² instead of (m − m̄)²."""

    def gradients(self, objective, at, batch, m, consensus):
        shifted = None if consensus is None else consensus - at[1]
        return super().gradients(objective, at, batch, m, shifted)


class RegularisesTowardsZero(FedDBE):
    def gradients(self, objective, at, batch, m, consensus):
        zero = None if consensus is None else torch.zeros_like(consensus)
        return super().gradients(objective, at, batch, m, zero)


class WholeGradientOfTheMean(FedDBE):
    """The regulariser's gradient without the factor μ."""

    def gradients(self, objective, at, batch, m, consensus):
        if m is None or consensus is None:
            return super().gradients(objective, at, batch, m, consensus)
        scaled = replace(self, weight=self.weight / self.mean_momentum)
        return FedDBE.gradients(scaled, objective, at, batch, m, consensus)


class ConsensusFollows(FedDBE):
    """Agents send m in every round, and the server follows."""

    def sent_in(self, round):
        return ("model", "mean")

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        mean = result.vectors.get("mean", received["mean"] + 1)
        return replace(result, vectors={**result.vectors, "mean": mean})


class RegularisesInTheFirstRound(FedDBE):
    def agent_update(self, context, received, state):
        result = super().agent_update(replace(context, round=2), received, state)
        if context.round > 1:
            return result
        mean = super().agent_update(context, received, state).vectors["mean"]
        return replace(result, vectors={**result.vectors, "mean": mean})


class BiasIsLost(FedDBE):
    """b starts at 0 in every round."""

    def agent_update(self, context, received, state):
        return super().agent_update(context, received, self.agent_init(None, received))


class PersonalModelIsGlobal(FedDBE):
    def personal_model(self, context, received, state):
        return super().personal_model(context, received, None)


class TunesWithoutBias(FedDBE):
    def fine_tune(self, context, received, personal, steps, scale=1.0):
        zero = torch.zeros_like(personal["bias"])
        models = super().fine_tune(context, received, {**personal, "bias": zero}, steps, scale)
        return ({**each, "bias": personal["bias"]} for each in models)


class BiasIsNeverFixed(FedDBE):
    def agent_update(self, context, received, state):
        moving = replace(self, bias_lr=self.bias_lr or 1e-3)
        return super(BiasIsNeverFixed, moving).agent_update(context, received, state)


MUTANTS = {
    SumOverFeatures: (GRADIENTS, ROUNDS),
    WithoutMomentum: (GRADIENTS, ROUNDS),
    RegularisesShiftedFeatures: (GRADIENTS, ROUNDS),
    RegularisesTowardsZero: (GRADIENTS, ROUNDS),
    WholeGradientOfTheMean: (GRADIENTS, ROUNDS),
    ConsensusFollows: (CONSENSUS,),
    RegularisesInTheFirstRound: (CONSENSUS, ROUNDS),
    BiasIsLost: (ROUNDS,),
    PersonalModelIsGlobal: (PERSONAL,),
    TunesWithoutBias: (TUNED,),
    BiasIsNeverFixed: (FEDAVG,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
