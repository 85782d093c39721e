"""One suite for every algorithm, with every curvature: what an engine may rely on.

``Scaffold`` keeps state at the server and at every agent, and sends two vectors: methods like it
must fit the protocol without a change to the engines.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from nufed import Exact, FirstOrder, HessianFree, Objective
from nufed.algorithms import ALGORITHMS
from nufed.evaluate import Measure
from nufed.server import to_send
from nufed.simulation import DirectEngine, run_round, train
from support import Scaffold, federation, mlp, tied

SETTINGS = {"adapt_lr": 0.2, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
CURVATURES = {
    "exact": Exact(),
    "fo": FirstOrder(),
    "hf": HessianFree(),
    "hf-fixed": HessianFree(1e-4),
}
CASES = {
    "scaffold": Scaffold(),
    "fedavg": ALGORITHMS["fedavg"](**SETTINGS),
    **{
        f"{name}-{how}": ALGORITHMS[name](curvature=curvature, **SETTINGS, **extra)
        for name, extra in (("per_fedavg", {}), ("gmeta", {"adapt_steps": 2}))
        for how, curvature in CURVATURES.items()
    },
    "gmeta-exact-learned": ALGORITHMS["gmeta"](adapt_steps=2, rates_lr=0.5, **SETTINGS),
}
assert set(ALGORITHMS) == {"fedavg", "per_fedavg", "gmeta"}, "add the new algorithm to CASES"

MODULES = {
    "float64": mlp,
    "float32": lambda: mlp(torch.float32),
    "nested and tied": tied,
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)),
}


@pytest.fixture(params=CASES, ids=str)
def algorithm(request):
    return CASES[request.param]


@pytest.fixture(params=MODULES, ids=str)
def engine(request):
    return DirectEngine(Objective(MODULES[request.param]()), federation(unseen=1), seed=5)


def snapshot(state):
    return {name: vector.clone() for name, vector in state.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_dtype_shape_and_inputs_are_kept(algorithm, engine):
    objective = engine.objective
    w = objective.initial()
    server, client = algorithm.server_init(objective, w), algorithm.client_init(w)
    before = snapshot(server), snapshot(client), w.clone()
    results = engine.client_updates(algorithm, to_send(algorithm, server), {2: client}, round=1)
    models = list(
        algorithm.personalize(
            objective, server, client, engine.federation.batches(2, 0, "evaluate"), 2
        )
    )
    assert same(server, before[0]) and same(client, before[1]) and torch.equal(w, before[2])
    assert set(results[2].vectors) == set(algorithm.sends)
    assert len(models) == 3 and torch.equal(models[0], server["model"])
    pairs = [(vector, server[name]) for name, vector in results[2].vectors.items()]
    pairs += [(vector, client[name]) for name, vector in results[2].state.items()]
    for vector, like in (*pairs, *((model, w) for model in models)):
        assert vector.shape == like.shape and vector.dtype == w.dtype and not vector.requires_grad
    assert all(not torch.equal(vector, server[name]) for name, vector in results[2].vectors.items())


def test_training_is_repeatable_and_lowers_the_loss(algorithm, engine):
    def run():
        return list(
            train(algorithm, engine, engine.objective.initial(), rounds=6, participation=0.6)
        )

    first, again = run(), run()
    assert all(same(a.server, b.server) for a, b in zip(first, again, strict=True))
    assert all(
        same(a.clients[i], b.clients[i])
        for a, b in zip(first, again, strict=True)
        for i in b.clients
    )
    loss = [
        sum(s.loss[-1] for s in evaluate(algorithm, engine, progress))
        for progress in (first[0], first[-1])
    ]
    assert loss[1] < loss[0]


def evaluate(algorithm, engine, progress):
    states = progress.client_states(algorithm, engine.federation.split.agents)
    return engine.evaluate(algorithm, progress.server, states, steps=2, measure=Measure("accuracy"))


def test_the_order_of_agents_does_not_matter(algorithm, engine):
    @dataclass(frozen=True)
    class Backwards(DirectEngine):
        def client_updates(self, algorithm, received, states, round):
            turned = dict(reversed(states.items()))
            return super().client_updates(algorithm, received, turned, round)

    backwards = Backwards(engine.objective, engine.federation, engine.seed)
    *_, progress = train(algorithm, engine, engine.objective.initial(), rounds=2, participation=0.8)
    there = run_round(algorithm, engine, progress, 0.8)
    back = run_round(algorithm, backwards, progress, 0.8)
    assert same(there.server, back.server)
    assert all(same(there.clients[i], back.clients[i]) for i in there.clients)


def test_an_agent_whose_update_is_rejected_leaves_no_trace(algorithm, engine):
    @dataclass(frozen=True)
    class Breaking(DirectEngine):
        def client_updates(self, algorithm, received, states, round):
            results = super().client_updates(algorithm, received, states, round)
            agent = min(results)
            broken = {k: v * float("nan") for k, v in results[agent].vectors.items()}
            return {**results, agent: replace(results[agent], vectors=broken)}

    @dataclass(frozen=True)
    class Without(DirectEngine):
        def client_updates(self, algorithm, received, states, round):
            others = {a: s for a, s in states.items() if a != min(states)}
            return super().client_updates(algorithm, received, others, round)

    outcomes = []
    for kind in (Breaking, Without):
        other = kind(engine.objective, engine.federation, engine.seed)
        *_, last = train(algorithm, other, engine.objective.initial(), rounds=3, participation=0.6)
        outcomes.append(last)
    assert same(outcomes[0].server, outcomes[1].server)
    assert outcomes[0].clients.keys() == outcomes[1].clients.keys()
    assert [r.agent for r in outcomes[0].rejected] == [min(outcomes[0].cohort)]


def test_unseen_agents_never_train(algorithm, engine):
    (unseen,) = engine.federation.split.unseen
    cohorts = [
        progress.cohort
        for progress in train(
            algorithm, engine, engine.objective.initial(), rounds=8, participation=0.6
        )
    ]
    assert unseen not in {agent for cohort in cohorts for agent in cohort}
    assert all(len(cohort) == 3 for cohort in cohorts[1:])
