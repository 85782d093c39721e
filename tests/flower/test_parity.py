"""On Flower the same seed gives the very bits of the simulator's direct engine."""

import pytest
import torch

from flower.in_memory import agents_data, federate, federation_of, plan_of
from nufed import Exact, FirstOrder, GMeta, HessianFree
from nufed.simulation import DirectEngine, train
from support import Scaffold

METHODS = {
    "FedAvg": GMeta(0, 0.2, 0.3, 2, 6, FirstOrder()),
    "first-order": GMeta(2, 0.2, 0.3, 2, 6, FirstOrder()),
    "Hessian-free": GMeta(2, 0.2, 0.3, 2, 6, HessianFree()),
    "exact": GMeta(2, 0.2, 0.3, 2, 6, Exact()),
    "learned rates": GMeta(1, 0.2, 0.3, 2, 6, Exact(), rates_lr=0.1),
    "with states at sites": Scaffold(),
}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def simulated(plan, data):
    engine = DirectEngine(
        plan.objective, federation_of(data, plan.seed, plan.unseen_agents), plan.seed
    )
    rounds = list(
        train(
            plan.algorithm,
            engine,
            plan.objective.initial(),
            rounds=plan.rounds,
            participation=plan.participation,
            rules=plan.rules,
        )
    )
    states = rounds[-1].client_states(plan.algorithm, range(plan.agents))
    scores = engine.evaluate(
        plan.algorithm,
        rounds[-1].server,
        states,
        steps=plan.eval_steps,
        measure=plan.measure,
    )
    return rounds, scores


@pytest.mark.parametrize("method", METHODS)
def test_models_costs_and_scores_are_the_simulators(method):
    data = agents_data(5)
    plan = plan_of(METHODS[method], agents=5, rounds=4, participation=0.5, unseen_agents=1)
    right, right_scores = simulated(plan, data)
    rounds, outcome, _ = federate(plan, data)
    for one, other in zip(rounds, right, strict=True):
        assert same(one.server, other.server)
        assert (one.cohort, one.cost, one.rejected) == (other.cohort, other.cost, ())
    assert not torch.equal(rounds[0].server["model"], rounds[-1].server["model"])
    assert list(outcome.scores) == right_scores and not outcome.missing
    assert [s.seen for s in outcome.scores].count(False) == 1
