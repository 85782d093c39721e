"""FedPAC: its quadratic program, its statistics and its alignment; without them it is FedRep."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from nufed import Objective
from nufed.algorithms import AgentUpdate, FedPAC, FedRep
from nufed.algorithms.agent_rows import row_of
from nufed.algorithms.fedpac import simplex_minimum
from nufed.errors import InputError
from nufed.evaluate import Measure
from nufed.objective.objective import features_of
from nufed.server import Downlink, to_send
from nufed.simulation import DirectEngine, train
from support import agent_context, context, federation, mlp, same, states_of

SHARED = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.1}
OWN = {"weight": 0.7, "head_steps": 3, **SHARED}
C, D = 3, 7  # classes and features of the module


def history(algorithm, engine, rounds=5):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.6))


def objective_of(q):
    return lambda a: float(a @ q @ a)


@pytest.mark.parametrize("rank", [1, 3, 6, 9])
def test_the_quadratic_program_against_another_solver(rank):
    """Its value is no higher than scipy's, and it fulfils the conditions of a minimum."""
    rng, corners = np.random.default_rng(rank), 0
    for _ in range(30):
        root, noise = rng.normal(size=(6, rank)), rng.uniform(0, 0.3, size=6)
        q = root @ root.T + np.diag(noise)
        a = simplex_minimum(torch.from_numpy(q)).numpy()
        assert a.min() >= 0 and a.sum() == pytest.approx(1, abs=1e-12)
        right = minimize(
            objective_of(q),
            np.full(6, 1 / 6),
            jac=lambda x, q=q: 2 * q @ x,
            bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        value = objective_of(q)(a)
        assert value <= right.fun + 1e-7 and a == pytest.approx(right.x, abs=1e-4)
        slopes = q @ a
        assert (slopes >= value - 1e-7).all() and slopes[a > 0] == pytest.approx(value, abs=1e-7)
        corners += int((a == 0).any())
    assert corners > 5


@pytest.mark.parametrize("q", [torch.zeros(4, 4), torch.eye(4), 7 + torch.zeros(4, 4)], ids=str)
def test_equal_agents_get_equal_weights(q):
    assert simplex_minimum(q).tolist() == pytest.approx([0.25] * 4, abs=1e-6)
    assert simplex_minimum(q[:1, :1]).tolist() == [1]


def sent(agent, moments, variance, head, shares=(0.5, 0.25, 0.25), prototypes=None, samples=8):
    """An update with these vectors, of agents with heads of one number."""
    zeros = torch.zeros(C * D, dtype=torch.float64)
    filled = zeros.clone()
    filled[: len(moments)] = torch.tensor(moments).double()
    vectors = {
        "shared": torch.zeros(5).double(),
        "private": torch.tensor([head]).double(),
        "prototypes": zeros if prototypes is None else prototypes,
        "shares": torch.tensor(shares).double(),
        "moments": filled,
        "variance": torch.tensor([variance]).double(),
    }
    return AgentUpdate(agent, 1, samples, vectors)


def check_heads_of_two_agents_by_hand(cls):
    """a_12 = V_1/(V_1 + V_2 + ‖M_1 − M_2‖²)."""
    rows = cls(**OWN).combined([sent(4, [1.0, 2.0], 0.5, 10.0), sent(9, [3.0, 1.0], 1.5, 20.0)])
    for agent, a in ((4, 0.5 / 7), (9, 1 - 1.5 / 7)):  # of the second head
        assert rows[agent]["heads"].tolist() == pytest.approx([10 + 10 * a], rel=1e-7)
    alike = [sent(i, [1.0, 2.0], 0.5, 10.0 * i) for i in range(4)]
    means = [row["heads"].tolist() for row in cls(**OWN).combined(alike).values()]
    assert means == [pytest.approx([15.0], rel=1e-9)] * 4


def check_statistics_by_hand(cls):
    """μ, p and V of agents, some of whom lack a class, from features one by one."""
    data, objective = federation(samples=9, seed=4), Objective(mlp())
    algorithm, w, lacking = cls(**OWN), objective.initial(), 0
    for agent in data.split.agents:
        source = data.batches(agent, 5, "train", 1)
        batch = source.whole()
        z, n = features_of(objective, w, batch.inputs), len(batch.targets)
        means, shares, variance = algorithm.statistics(agent_context(objective, source), w)
        v = 0.0
        for k in range(C):
            mine = [z[i] for i in range(n) if int(batch.targets[i]) == k]
            lacking += not mine
            mean = sum(mine) / len(mine) if mine else torch.zeros(D, dtype=w.dtype)
            p = len(mine) / n
            assert torch.allclose(means[k], mean, atol=1e-14) and float(shares[k]) == p
            if mine:  # as in the authors' code: a trace of second moments
                second = sum(torch.outer(each, each) for each in mine) / len(mine)
                v += p * float(second.trace()) - p**2 * float(mean @ mean)
        assert float(variance) == pytest.approx(v / n, rel=1e-10)
    assert lacking


def known_prototypes(known=(1.0, 0.0, 1.0)):
    generator = torch.Generator().manual_seed(3)
    c = torch.randn(C * D, generator=generator, dtype=torch.float64)
    return {"prototypes": c, "known": torch.tensor(known).double()}


def check_alignment_by_central_differences(cls):
    """Of f + λ·mean over samples of known classes, of the mean square over features."""
    objective, received = Objective(mlp()), known_prototypes()
    w, (batch,) = objective.initial(), federation().batches(2, 0, "train", 1).draw("outer", 12)
    c = received["prototypes"].view(C, D)

    def value(w):
        z, loss = features_of(objective, w, batch.inputs), float(objective.value(w, batch))
        far = [((z[i] - c[y]) ** 2).mean() for i, y in enumerate(batch.targets.tolist()) if y != 1]
        return loss + 0.7 * float(sum(far)) / len(batch.targets)

    gradient = cls(**OWN).aligned(objective, received)(w, batch)
    for place in range(0, len(w), 5):
        step = torch.zeros_like(w)
        step[place] = 1e-5
        slope = (value(w + step) - value(w - step)) / 2e-5
        assert float(gradient[place]) == pytest.approx(slope, abs=1e-8)


def check_a_round_of_an_agent(cls):
    """Statistics before training, prototypes after it, the term in the steps of the body alone."""
    data, objective, algorithm = federation(), Objective(mlp()), cls(**OWN)
    source = data.batches(2, 5, "train", 1)
    own, (private, shared) = agent_context(objective, source), algorithm.parts(objective)
    generator = torch.Generator().manual_seed(8)
    head = torch.randn(private.size, generator=generator, dtype=torch.float64)
    phi = shared.take(objective.initial()).clone()
    received = {"shared": phi, "private": head, **known_prototypes()}
    result = algorithm.agent_update(own, received, {"private": torch.zeros_like(head)})
    w = algorithm.join(objective, phi, head)
    means, shares, variance = algorithm.statistics(own, w)
    align, batches = FedPAC(**OWN).aligned(objective, received), []
    for t in range(3):
        batches += source.draw("outer", 6, step=t)
        g = objective.grad(w, batches[-1])
        w = private.put(w, private.take(w) - 0.1 * private.take(g))
    for batch in batches[:2]:
        w = shared.put(w, shared.take(w) - 0.1 * shared.take(align(w, batch)))
    right = {
        "shared": shared.take(w),
        "private": private.take(w),
        "prototypes": algorithm.statistics(own, w)[0].flatten(),
        "shares": shares,
        "moments": (shares.view(C, 1) * means).flatten(),
        "variance": variance,
    }
    assert result.vectors.keys() == right.keys() and result.cost.gradients == 5
    for name, vector in right.items():
        assert torch.allclose(result.vectors[name], vector, rtol=0, atol=1e-12), name
    assert torch.equal(result.state["private"], result.vectors["private"])


def check_prototypes_are_weighted_by_samples(cls):
    """A class without samples keeps its prototype, and is unknown while there was none."""
    objective, algorithm = Objective(mlp()), cls(**OWN)
    server = dict(algorithm.server_init(objective, objective.initial()))
    ones, old = torch.ones(C, D).double(), torch.full((C * D,), 7.0).double()
    given = [
        (0, (0.25, 0.75, 0.0), 1 * ones, 8),
        (1, (0.5, 0.5, 0.0), 4 * ones, 4),
    ]
    like = {name: server[name] for name in ("shared", "private")}
    updates = [
        replace(u, vectors={**u.vectors, **like})
        for u in (sent(a, [1.0], 1.0, 0.0, p, c.flatten(), n) for a, p, c, n in given)
    ]
    for before, left in ((server, 0.0), ({**server, "prototypes": old}, 7.0)):
        after = algorithm.server_update(context(), before, updates)
        rows = after["prototypes"].view(C, D)
        for k, right in enumerate(((2 * 1 + 2 * 4) / 4, (6 * 1 + 2 * 4) / 8, left)):
            assert torch.allclose(rows[k], torch.full_like(rows[k], right))
        assert after["known"].tolist() == [1, 1, 0]
        later = algorithm.server_update(context(2), after, updates)
        assert later["known"].tolist() == [1, 1, 0]


def check_every_agent_gets_its_combination(cls):
    """The head that an agent receives is the one that was combined for it, others the mean."""
    engine = DirectEngine(Objective(mlp()), federation(unseen=1), 5)
    algorithm, heads = cls(**OWN), {}
    for before, progress in pairwise(history(algorithm, engine)):
        down, of_round = to_send(algorithm, before.server), context(progress.round, 5)
        unused = {"private": torch.zeros(algorithm.parts(engine.objective)[0].size).double()}
        states = dict.fromkeys(progress.cohort, unused)  # heads come from the server
        results = engine.agent_updates(algorithm, down, states, of_round)
        updates = [AgentUpdate(a, progress.round, 18, r.vectors) for a, r in results.items()]
        heads |= {a: row["heads"] for a, row in FedPAC(**OWN).combined(updates).items()}
        down = Downlink.of(to_send(algorithm, progress.server))
        for agent in engine.federation.split.agents:
            right = heads.get(agent, progress.server["private"])
            assert torch.allclose(down.to(agent)["private"], right, rtol=0, atol=1e-12)
    assert len(heads) > 3 and row_of(progress.server, engine.federation.split.unseen[0]) is None


def check_without_both_parts_it_is_fedrep(cls):
    """λ = 0 and no combination: shared bodies, heads and scores to the bit."""
    engine = DirectEngine(Objective(mlp()), federation(unseen=1), 5)
    rep = FedRep(head_steps=3, **SHARED)
    pac = cls(**{**OWN, "weight": 0.0, "combine": False})
    one, other = history(pac, engine), history(rep, engine)
    for mine, right in zip(one, other, strict=True):
        assert torch.equal(mine.server["shared"], right.server["shared"])
    for agent, state in states_of(engine, other[-1]).items():
        assert same(one[-1].states.get(agent) or {}, state or {})
    scores = [
        engine.evaluate(
            a,
            to_send(a, last.server),
            states_of(engine, last),
            steps=2,
            measure=Measure("accuracy"),
        )
        for a, last in ((pac, one[-1]), (rep, other[-1]))
    ]
    assert scores[0] == scores[1]


CHECKS = (
    check_heads_of_two_agents_by_hand,
    check_statistics_by_hand,
    check_alignment_by_central_differences,
    check_a_round_of_an_agent,
    check_prototypes_are_weighted_by_samples,
    check_every_agent_gets_its_combination,
    check_without_both_parts_it_is_fedrep,
)
HEADS, STATISTICS, ALIGNMENT, ROUND, PROTOTYPES, OWN_HEAD, REP = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedPAC)


# wrong implementations


class MeansForMoments(FedPAC):
    """M without the shares of classes."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        head = received["private"] if self.combine else state["private"]
        w = self.join(context.objective, received["shared"], head)
        means = self.statistics(context, w)[0].flatten()
        return replace(result, vectors={**result.vectors, "moments": means})


class VarianceOfOneSample(FedPAC):
    """V is not divided by the number of samples."""

    def statistics(self, context, w):
        means, shares, variance = super().statistics(context, w)
        return means, shares, variance * len(context.batches.targets())


class UniformHeads(FedPAC):
    def combined(self, updates):
        equal = {"moments": torch.zeros(1), "variance": torch.ones(1)}
        return super().combined([replace(u, vectors={**u.vectors, **equal}) for u in updates])


class AlignsUnknownClasses(FedPAC):
    """To a prototype of 0."""

    def aligned(self, objective, received):
        return super().aligned(objective, {**received, "known": torch.ones(C)})


class AlignsTwice(FedPAC):
    """A square is summed over features."""

    def aligned(self, objective, received):
        return replace(self, weight=self.weight * D).aligned_once(objective, received)

    def aligned_once(self, objective, received):
        return super().aligned(objective, received)


class PrototypesBeforeTraining(FedPAC):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        w = self.join(context.objective, received["shared"], received["private"])
        means = self.statistics(context, w)[0].flatten()
        return replace(result, vectors={**result.vectors, "prototypes": means})


class StartsFromItsOwnHead(FedPAC):
    """The combined head is not used in training."""

    def agent_update(self, context, received, state):
        return super().agent_update(context, {**received, **state}, state)


class UnweightedPrototypes(FedPAC):
    """As in PFLlib."""

    def server_update(self, context, server, updates):
        plain = [
            replace(u, samples=1, vectors={**u.vectors, "shares": u.vectors["shares"].sign()})
            for u in updates
        ]
        return super().server_update(context, server, plain)


class HeadOfAnother(FedPAC):
    """Heads are found by their place in the cohort, as in PFLlib."""

    def combined(self, updates):
        rows = list(super().combined(updates).values())
        return {u.agent: rows[(i + 1) % len(rows)] for i, u in enumerate(updates)}


class ForgetsHeads(FedPAC):
    """Everyone gets the mean."""

    def downlink(self, context, server, agent):
        return super().downlink(context, server, None)


MUTANTS = [
    (MeansForMoments, ROUND),
    (VarianceOfOneSample, STATISTICS),
    (UniformHeads, HEADS),
    (AlignsUnknownClasses, ALIGNMENT),
    (AlignsTwice, ALIGNMENT),
    (PrototypesBeforeTraining, ROUND),
    (StartsFromItsOwnHead, ROUND),
    (UnweightedPrototypes, PROTOTYPES),
    (HeadOfAnother, HEADS),
    (ForgetsHeads, OWN_HEAD),
]


@pytest.mark.parametrize(("wrong", "rejects"), MUTANTS)
def test_a_wrong_copy_is_rejected(wrong, rejects):
    with pytest.raises(AssertionError):
        rejects(wrong)


def test_models_and_targets_that_it_can_not_use():
    head = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    objective = Objective(head, running_stats="frozen")
    with pytest.raises(InputError, match=r"last layer \(1\) is a BatchNorm1d.*torch.nn.Linear"):
        FedPAC().server_init(objective, objective.initial())
    regression = Objective(nn.Linear(5, 3).double(), nn.functional.mse_loss)
    data = federation()
    floats = replace(data, samples=replace(data.samples, targets=torch.zeros(144, 3), classes=()))
    own = agent_context(regression, floats.batches(2, 0, "train", 1))
    with pytest.raises(InputError, match="fedpac needs classes"):
        FedPAC().statistics(own, regression.initial())
