"""On Flower the same seed gives the very bits of the simulator's direct engine."""

import pytest
import torch

from flower.in_memory import agents_data, federate, federation_of, plan_of
from nufed import Exact, FirstOrder, GMeta, HessianFree
from nufed.evaluate import evaluate_with_choice
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
    federation = federation_of(data, plan.seed, plan.unseen_agents, plan.validation)
    engine = DirectEngine(plan.objective, federation, plan.seed)
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

    def on(part, agents):
        return lambda scales: engine.evaluate_scales(
            plan.algorithm,
            rounds[-1].server,
            {agent: states[agent] for agent in agents},
            steps=plan.eval_steps,
            measure=plan.measure,
            scales=scales,
            part=part,
        )

    validate = on("validation", plan.seen) if plan.validation else None
    score = on("test", range(plan.agents))
    return rounds, evaluate_with_choice(score, validate, plan.eval_steps, plan.measure)


@pytest.mark.parametrize("method", METHODS)
def test_models_costs_and_scores_are_the_simulators(method):
    data = agents_data(5)
    plan = plan_of(METHODS[method], agents=5, rounds=4, participation=0.5, unseen_agents=1)
    right, evaluation = simulated(plan, data)
    rounds, outcome, _ = federate(plan, data)
    for one, other in zip(rounds, right, strict=True):
        assert same(one.server, other.server)
        assert (one.cohort, one.cost, one.rejected) == (other.cohort, other.cost, ())
    assert not torch.equal(rounds[0].server["model"], rounds[-1].server["model"])
    assert outcome.evaluation == evaluation and not outcome.missing
    assert [s.seen for s in outcome.scores].count(False) == 1


@pytest.mark.parametrize("method", ["FedAvg", "learned rates", "with states at sites"])
def test_step_sizes_are_chosen_as_by_the_simulator(method):
    data = agents_data(5, samples=40)
    plan = plan_of(METHODS[method], agents=5, rounds=3, unseen_agents=1, validation=0.25)
    _, evaluation = simulated(plan, data)
    _, outcome, grid = federate(plan, data, choose=True)
    assert outcome.evaluation == evaluation
    assert outcome.evaluation.chosen is not None and not outcome.missing
    asked = [agent for kind, agent in grid.asked if kind == "evaluate"]
    (unseen,) = set(range(5)) - set(plan.seen)
    assert asked.count(unseen) == 1  # it is scored, and has no say
    assert all(asked.count(agent) > 1 for agent in plan.seen)
