"""On Flower the same seed is bit-identical to the simulator's direct engine."""

from dataclasses import replace

import pytest
import torch

from flower.app.in_memory import agents_data, federate, federation_of, plan_of
from nufed import Exact, FirstOrder, GMeta, HessianFree
from nufed.algorithms import Ditto, Scaffold
from nufed.evaluate import Scoring, evaluate_with_choice, preferred
from nufed.server import Rules, to_send
from nufed.simulation import DirectEngine, train
from support import same, states_of

STEPS = {"adapt_lr": 0.2, "meta_lr": 0.3, "local_steps": 2, "batch_size": 6}
METHODS = {
    "FedAvg": GMeta(0, FirstOrder(), **STEPS),
    "first-order": GMeta(2, FirstOrder(), **STEPS),
    "Hessian-free": GMeta(2, HessianFree(), **STEPS),
    "exact": GMeta(2, Exact(), **STEPS),
    "learned rates": GMeta(1, Exact(), rates_lr=0.1, **STEPS),
    "SCAFFOLD": Scaffold(meta_lr=0.1, local_steps=2, batch_size=6),
    "Ditto": Ditto(0.5, 0.3, 2, **STEPS),
}


def simulated(plan, data):
    federation = federation_of(data, plan.seed, plan.unseen_agents, plan.validation)
    if plan.augment is not None:
        federation = replace(federation, augment=plan.augment(federation.samples))
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
    states = states_of(engine, rounds[-1])

    def on(part, agents):
        return lambda scales: engine.evaluate_scales(
            plan.algorithm,
            to_send(plan.algorithm, rounds[-1].server),
            {agent: states[agent] for agent in agents},
            Scoring(plan.eval_steps, plan.scored_by(part), scales, part),
        )

    validate = on("validation", plan.seen) if plan.validation else None
    score = on("test", range(plan.agents))
    prefer = preferred(plan.algorithm)
    return rounds, evaluate_with_choice(score, validate, plan.eval_steps, plan.measure, prefer)


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


def test_training_batches_are_augmented_as_by_the_simulator():
    data = agents_data(5)
    found = []
    for augment in (None, lambda samples: noisy):
        settings = {"agents": 5, "rounds": 2, "participation": 0.5, "augment": augment}
        plan = plan_of(METHODS["first-order"], **settings)
        right, evaluation = simulated(plan, data)
        rounds, outcome, _ = federate(plan, data)
        assert same(rounds[-1].server, right[-1].server) and outcome.evaluation == evaluation
        found.append(rounds[-1].server["model"])
    assert not torch.equal(*found)


def noisy(inputs, rng):
    return inputs + torch.from_numpy(rng.normal(size=inputs.shape)).to(inputs.dtype)


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD"])
def test_the_same_norm_bound_rejects_the_same_updates(method):
    data, rules = agents_data(5), Rules(max_update_norm=1.05)
    plan = plan_of(METHODS[method], agents=5, rounds=4, rules=rules)
    right, _ = simulated(plan, data)
    rounds, _, _ = federate(plan, data)
    assert sum(bool(p.rejected) for p in rounds[1:]) >= 3
    for one, other in zip(rounds, right, strict=True):
        assert same(one.server, other.server)
        found, expected = (
            [(error.agent, error.round, error.reason) for error in progress.rejected]
            for progress in (one, other)
        )
        assert found == expected


@pytest.mark.parametrize("method", ["FedAvg", "learned rates", "SCAFFOLD", "Ditto"])
def test_step_sizes_are_chosen_as_by_the_simulator(method):
    data = agents_data(5, samples=40)
    plan = plan_of(METHODS[method], agents=5, rounds=3, unseen_agents=1, validation=0.25)
    _, evaluation = simulated(plan, data)
    _, outcome, grid = federate(plan, data, choose=True)
    assert outcome.evaluation == evaluation
    assert outcome.evaluation.chosen is not None and not outcome.missing
    requested = [agent for kind, agent in grid.requested if kind == "evaluate"]
    (unseen,) = set(range(5)) - set(plan.seen)
    assert requested.count(unseen) == 1  # it is scored, but not used for the choice
    assert all(requested.count(agent) > 1 for agent in plan.seen)
