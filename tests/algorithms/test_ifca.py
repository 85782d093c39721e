"""IFCA: FedAvg with one model, planted clusters recovered, its server; wrong implementations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import InputError, Objective, fedavg
from nufed.algorithms import IFCA, AgentResult, AgentUpdate, Cost
from nufed.algorithms.aggregation import Mean, Median
from nufed.algorithms.protocol import SummedUpdates
from nufed.data import Federation, as_samples
from nufed.data.split import make_split
from nufed.server import next_server
from nufed.simulation import DirectEngine, train
from support import agent_context, context, federation, mlp, relative_error

PLAIN = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.1}
CLUSTER = [0, 1, 0, 1, 1, 0, 1, 0]  # of the agents of `planted`; the last two are newcomers


def planted(samples=24, dimensions=3):
    """Agents whose targets are one of two linear functions of the inputs, and these functions."""
    rng = np.random.default_rng(0)
    truth = 2 * rng.normal(size=(2, dimensions))
    x = rng.normal(size=(len(CLUSTER) * samples, dimensions))
    y = (x * truth[np.repeat(CLUSTER, samples)]).sum(axis=1, keepdims=True)
    rows = np.split(np.arange(len(x)), len(CLUSTER))
    split = make_split(rows, 0, validation=0.0, test=0.25, unseen_agents=2)
    data = Federation(as_samples((torch.from_numpy(x), torch.from_numpy(y))), split)
    torch.manual_seed(1)
    return data, Objective(nn.Linear(dimensions, 1, bias=False).double(), F.mse_loss), truth


@pytest.mark.parametrize("averaging", ["uniform", "samples"])
def test_with_one_model_it_is_fedavg_bit_for_bit(averaging):
    objective, data = Objective(mlp(torch.float32)), federation()
    trained = []
    rule = Mean(averaging)
    for made in (fedavg(aggregation=rule, **PLAIN), IFCA(models=1, aggregation=rule, **PLAIN)):
        engine = DirectEngine(objective, data, seed=3)
        *_, last = train(made, engine, objective.initial(), rounds=4, participation=0.5)
        trained.append(next(iter(last.server.values())))
    assert torch.equal(*trained)


def check_planted_clusters_are_recovered(cls):
    data, objective, truth = planted()
    algorithm = cls(**{**PLAIN, "batch_size": 9, "local_steps": 4})
    engine = DirectEngine(objective, data, seed=0)
    *_, last = train(algorithm, engine, objective.initial(), rounds=40, participation=0.7)
    models = torch.stack(algorithm.split(last.server["models"])).numpy()
    order = [int(((models - w) ** 2).sum(axis=1).argmin()) for w in truth]
    assert sorted(order) == [0, 1]
    assert np.abs(models[order] - truth).max() < 1e-3
    for agent, cluster in enumerate(CLUSTER):  # newcomers, too
        own = agent_context(objective, data.batches(agent, 0, "evaluate"))
        personal = algorithm.personal_model(own, last.server, None)
        assert torch.equal(personal.model, torch.from_numpy(models[order[cluster]]))


def test_planted_clusters_of_linear_regressions_are_recovered():
    check_planted_clusters_are_recovered(IFCA)


def check_a_round_by_hand(cls):
    """Three models, of which the last is so far off that nobody chooses it."""
    objective, data = Objective(mlp()), federation()
    algorithm = cls(models=3, aggregation=Mean("samples"), **PLAIN)
    server = algorithm.server_init(objective, objective.initial())
    models = algorithm.split(server["models"].clone())
    models[2] = 30 * models[2]
    server = {**server, "models": torch.cat(models)}
    received, updates, trained = {"models": server["models"]}, [], [[] for _ in models]
    for agent in range(6):
        own = agent_context(objective, data.batches(agent, 0, "train", 1))
        result = algorithm.agent_update(own, received, {})
        updates.append(AgentUpdate(agent, 1, agent + 2, result.vectors))
        rows = data.split.train[agent]
        x, y = data.samples.inputs[rows].double(), data.samples.targets[rows]
        losses = [F.cross_entropy(objective.module(w)(x), y).item() for w in models]
        w = models[int(np.argmin(losses))]
        for batch in own.batches.draw("outer", 6) + own.batches.draw("outer", 6, step=1):
            w = w - 0.1 * objective.grad(w, batch)
        trained[int(np.argmin(losses))].append((agent + 2, w))
        assert result.cost == Cost(2)
    after = algorithm.split(next_server(algorithm, context(), server, updates)["models"])
    assert trained[0] and trained[1] and not trained[2]
    for before, found, members in zip(models, after, trained, strict=True):
        total = sum(n for n, _ in members)
        right = sum(n / total * w for n, w in members) if members else before
        assert relative_error(found, right) < 1e-13
    means = {  # what is known with secure aggregation is enough
        name: sum(u.samples * u.vectors[name] for u in updates) / sum(u.samples for u in updates)
        for name in algorithm.sends
    }
    uniform = cls(models=3, **PLAIN)
    summed = uniform.server_update(context(), server, SummedUpdates(tuple(range(6)), means))
    assert relative_error(summed["models"], torch.cat(after)) < 1e-13


def test_a_round_by_hand():
    check_a_round_by_hand(IFCA)


def test_models_start_apart_and_the_first_as_given():
    objective = Objective(mlp(torch.float32))
    w = objective.initial()
    first, *others = IFCA(models=4).split(IFCA(models=4).server_init(objective, w)["models"])
    assert torch.equal(first, w) and len({tuple(each.tolist()) for each in others}) == 3
    for own, each in zip(w.split(objective.sizes), others[0].split(objective.sizes), strict=True):
        assert 0.3 < float(each.std() / own.std()) < 3
    near = IFCA(models=2, spread=0.01).server_init(objective, w)["models"][len(w) :]
    assert 0 < relative_error(near, w) < 0.02
    same = IFCA(models=2, spread=0.0).server_init(objective, w)["models"][len(w) :]
    assert relative_error(same, w) < 1e-6


def test_what_it_can_not_do_is_refused():
    with pytest.raises(InputError, match=r"aggregation = .*: must be mean: other rules discard"):
        IFCA(aggregation=Median())
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    objective = Objective(module, running_stats="tracked")
    with pytest.raises(InputError, match="models = 2: several models can't track"):
        IFCA().server_init(objective, objective.initial())
    IFCA(models=1).server_init(objective, objective.initial())


# wrong implementations


class MeanOverTheCohort(IFCA):
    def server_update(self, context, server, updates):
        mean = self.aggregate(context, updates, "models", server["models"])
        return {**server, "models": mean}


class EmptyIsZero(IFCA):
    def server_update(self, context, server, updates):
        after = super().server_update(context, server, updates)
        share = self.aggregate(context, updates, "choice", server["choice"])
        models = [w * float(s > 0) for w, s in zip(self.split(after["models"]), share, strict=True)]
        return {**after, "models": torch.cat(models)}


class LargestLoss(IFCA):
    def choose(self, context, models):
        samples = context.batches.whole()
        losses = [float(context.objective.value(w, samples)) for w in models]
        return int(np.argmax(losses))


class OnOneBatch(IFCA):
    def choose(self, context, models):
        (batch,) = context.batches.draw("choice", 2)
        return int(np.argmin([float(context.objective.value(w, batch)) for w in models]))


class AllAreTrained(IFCA):
    def agent_update(self, context, received, state):
        models = [self.descend(context, w) for w in self.split(received["models"])]
        ones = models[0].new_ones(self.models)
        return AgentResult({"models": torch.cat(models), "choice": ones}, state, Cost(2))


MUTANTS = [
    (check_a_round_by_hand, MeanOverTheCohort),
    (check_a_round_by_hand, EmptyIsZero),
    (check_a_round_by_hand, LargestLoss),
    (check_a_round_by_hand, OnOneBatch),
    (check_a_round_by_hand, AllAreTrained),
    (check_planted_clusters_are_recovered, AllAreTrained),
    (check_planted_clusters_are_recovered, LargestLoss),
]


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_a_wrong_copy_is_rejected(check, mutant):
    with pytest.raises(AssertionError):
        check(mutant)
