"""FedAMP: the server's mixtures and the agents' proximal steps are what their formulas say."""

import math
from dataclasses import replace

import pytest
import torch

from nufed import Objective
from nufed.algorithms import AgentResult, FedAMP
from nufed.algorithms.agent_rows import no_rows, row_of, with_rows
from nufed.meta.fine_tuning import proximal
from nufed.server import Downlink, server_model, to_send
from nufed.simulation import DirectEngine, train
from support import Point, agent_context, context, federation, mlp, quadratic_loss, quadratics

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6}
OWN = {"weight": 0.7, "mixing": 0.4, "width": 2.0, **SHARED}


def models(agents=5, size=4, spread=0.6):
    generator = torch.Generator().manual_seed(2)
    return spread * torch.randn(agents, size, generator=generator, dtype=torch.float64)


def server_with(algorithm, table):
    objective = Objective(Point(table.shape[1]), quadratic_loss)
    server = algorithm.server_init(objective, objective.initial())
    return with_rows(server, {2 * i: {"models": w} for i, w in enumerate(table)})


def received(algorithm, table, agent):
    return Downlink.of(to_send(algorithm, server_with(algorithm, table))).to(agent)["model"]


def check_the_mixture_of_two_by_hand(cls):
    """ξ_12 = α·exp(−d²/σ)/σ; and 1, not more, where that exceeds 1."""
    w = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)  # d² = 5
    xi = 0.4 * math.exp(-5 / 2.0) / 2.0
    u = received(cls(**OWN), w, 0)
    assert torch.allclose(u, (1 - xi) * w[0] + xi * w[1], rtol=1e-14, atol=0)
    near = torch.tensor([[1.0], [1.001]], dtype=torch.float64)
    assert torch.allclose(received(cls(**{**OWN, "mixing": 9.0}), near, 2), near[0])


def check_the_weights_sum_to_one(cls):
    for table, mixing in ((models(), 0.4), (models(spread=0.01), 7.0), (models(1), 1.0)):
        algorithm = cls(**{**OWN, "mixing": mixing})
        for row in range(len(table)):
            xi = algorithm.attention(table, row)
            assert float(xi.sum()) == pytest.approx(1, abs=1e-15) and float(xi.min()) >= -1e-15


def check_a_step_on_the_attraction(cls):
    """U = W − (α/2)·∇A(W), of all agents at once, against autograd."""
    table = models()
    leaf = table.clone().requires_grad_()
    pairs = [(i, j) for i in range(5) for j in range(i)]
    loss = sum(1 - torch.exp(-(leaf[i] - leaf[j]).square().sum() / 2.0) for i, j in pairs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    for row in range(5):
        u = received(cls(**OWN), table, 2 * row)
        assert torch.allclose(u, table[row] - 0.2 * gradient[row], rtol=0, atol=1e-14)


def check_without_mixing_every_agent_keeps_its_own(cls):
    table = models()
    for row in range(5):
        u = received(cls(**{**OWN, "mixing": 1e-30}), table, 2 * row)
        assert torch.equal(u, table[row])
    assert torch.equal(received(cls(**OWN), table, 3), torch.zeros(4))  # unheard of: the server's


def check_the_steps_reach_the_proximal_point(cls):
    """(A + λ/α)⁻¹(Ab + λ/α·u) for F = ½(w − b)ᵀA(w − b)."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    u = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for agent, (a, b) in enumerate(pairs):
        pull = 0.7 / 0.4
        lr = 1.9 / (float(torch.linalg.eigvalsh(a)[-1]) + pull)
        algorithm = cls(**{**OWN, "meta_lr": lr, "local_steps": 400, "batch_size": 3})
        own = agent_context(objective, data.batches(agent, 0, "train", 1))
        result = algorithm.agent_update(own, {"model": u}, {"personal": torch.zeros_like(u)})
        right = torch.linalg.solve(a + pull * torch.eye(3, dtype=u.dtype), a @ b + pull * u)
        assert torch.allclose(result.vectors["model"], right, rtol=1e-9, atol=1e-9)


def check_training_against_an_independent_loop(cls):
    """Every agent's model after six rounds of three agents each, to 1e-12."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    algorithm = cls(**{**OWN, "width": 0.5})
    rounds = list(train(algorithm, engine, engine.objective.initial(), rounds=6, participation=0.5))
    last, mean, w0 = {}, engine.objective.initial(), engine.objective
    for progress in rounds[1:]:
        sent = {}
        for i in progress.cohort:
            u = mean
            if i in last:
                far = {j: float(((last[i] - w) ** 2).sum()) for j, w in last.items() if j != i}
                xi = {j: 0.4 * math.exp(-d / 0.5) / 0.5 for j, d in far.items()}
                most = max(1.0, sum(xi.values()))
                u = (1 - sum(xi.values()) / most) * last[i]
                u = u + sum(xi[j] / most * last[j] for j in xi)
            w = u
            for t in range(3):
                (batch,) = data.batches(i, 5, "train", progress.round).draw("outer", 6, step=t)
                w = w - 0.1 * (w0.grad(w, batch) + 0.7 / 0.4 * (w - u))
            sent[i] = w
        last |= sent
        mean = sum(sent.values()) / len(sent)
    server = rounds[-1].server
    assert server["agents"].tolist() == sorted(last) and len(last) > 3
    for i, w in last.items():
        assert torch.allclose(server["models"][row_of(server, i)], w, rtol=0, atol=1e-12)
        assert torch.equal(
            rounds[-1].states.get(i)["personal"], server["models"][row_of(server, i)]
        )


CHECKS = (
    check_the_mixture_of_two_by_hand,
    check_the_weights_sum_to_one,
    check_a_step_on_the_attraction,
    check_without_mixing_every_agent_keeps_its_own,
    check_the_steps_reach_the_proximal_point,
    check_training_against_an_independent_loop,
)
BY_HAND, SUM, ATTRACTION, ALONE, POINT, LOOP = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedAMP)


# wrong implementations


class PenaltyForItsDerivative(FedAMP):
    """A in place of A'."""

    def attention(self, models, row):
        weights = self.mixing * (
            1 - torch.exp(-(models - models[row]).square().sum(1) / self.width)
        )
        weights[row] = 1 - weights.sum()
        return weights


class DistancesNotSquared(FedAMP):
    def attention(self, models, row):
        near = torch.exp(-(models - models[row]).norm(dim=1) / self.width) / self.width
        weights = self.mixing * near
        weights[row] = 0
        weights /= weights.sum().clamp(min=1)
        weights[row] = 1 - weights.sum()
        return weights


class OwnModelCountsOnce(FedAMP):
    """ξ_ii = 1 beside the others."""

    def attention(self, models, row):
        weights = super().attention(models, row)
        weights[row] = 1
        return weights


class NegativeWeights(FedAMP):
    """Weights are not bounded, as in PFLlib."""

    def attention(self, models, row):
        distances = (models - models[row]).square().sum(dim=1)
        weights = self.mixing / self.width * torch.exp(-distances / self.width)
        weights[row] = 0
        weights[row] = 1 - weights.sum()
        return weights


class ProductForQuotient(FedAMP):
    """λα in place of λ/α."""

    def proximal_steps(self, context, u):
        def gradient(w, batch):
            g = context.objective.grad(w, batch)
            return proximal(g, self.weight * self.mixing, w, centre=u)

        return self.descend(context, u, gradient)


class TermAroundItself(FedAMP):
    """PFLlib #4: the term is between the model and itself."""

    def proximal_steps(self, context, u):
        return self.descend(context, u)


class TermAroundItsLast(FedAMP):
    def agent_update(self, context, received, state):
        def gradient(w, batch):
            g = context.objective.grad(w, batch)
            return proximal(g, self.weight / self.mixing, w, centre=state["personal"])

        w = self.descend(context, received["model"], gradient)
        result = super().agent_update(context, received, state)
        return AgentResult({"model": w}, {"personal": w}, result.cost)


class LastCohortOnly(FedAMP):
    """The server forgets agents outside of the last cohort, as in PFLlib."""

    def server_update(self, context, server, updates):
        empty = {**server, **no_rows(models=server["model"])}
        return super().server_update(context, empty, updates)


class ModelsOfTheFirstRound(FedAMP):
    """The server never replaces a model."""

    def server_update(self, context, server, updates):
        after = super().server_update(context, server, updates)
        old = {
            int(a): {"models": w} for a, w in zip(server["agents"], server["models"], strict=True)
        }
        return with_rows(after, old)


MUTANTS = [
    (PenaltyForItsDerivative, BY_HAND),
    (PenaltyForItsDerivative, ATTRACTION),
    (DistancesNotSquared, BY_HAND),
    (OwnModelCountsOnce, SUM),
    (NegativeWeights, SUM),
    (ProductForQuotient, POINT),
    (TermAroundItself, POINT),
    (TermAroundItsLast, POINT),
    (LastCohortOnly, LOOP),
    (ModelsOfTheFirstRound, LOOP),
]


@pytest.mark.parametrize(("wrong", "rejects"), MUTANTS)
def test_a_wrong_copy_is_rejected(wrong, rejects):
    with pytest.raises(AssertionError):
        rejects(wrong)


def test_clusters_that_are_far_apart_do_not_mix():
    near, far = models(3, spread=0.1), 100 + models(2, spread=0.1)
    algorithm = FedAMP(**{**OWN, "mixing": 9.0})
    xi = torch.stack([algorithm.attention(torch.cat([near, far]), row) for row in range(5)])
    assert xi[:3, 3:].abs().max() == 0 == xi[3:, :3].abs().max()
    assert (xi[:3, :3].sum(1) - 1).abs().max() < 1e-14 and xi[0, 1] > 0.1


def test_it_has_no_global_model_and_a_newcomer_is_trained_from_the_servers():
    objective, algorithm = Objective(mlp()), FedAMP(**OWN)
    server = algorithm.server_init(objective, objective.initial())
    down = Downlink.of(to_send(algorithm, server, context()))
    assert server_model(algorithm) == "model" and algorithm.shipped(objective, down) is None
    own = agent_context(objective, federation().batches(2, 0, "evaluate"))
    new = algorithm.personal_model(own, down.to(2), None)
    assert new.cost.gradients == 3
    w = algorithm.agent_update(own, down.to(2), algorithm.agent_init(objective, down)).vectors
    assert torch.equal(new.model, w["model"])
    alone = replace(algorithm, weight=0.0)
    assert torch.equal(
        alone.personal_model(own, down.to(2), None).model, alone.descend(own, objective.initial())
    )
