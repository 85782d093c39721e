"""One suite for every algorithm: what engines, checkpoints, workers and Flower may rely on."""

import json
from dataclasses import astuple, dataclass, replace
from itertools import islice

import pytest
import torch
from torch import nn

from conformance.cases import CASES, THOROUGH
from flower.app.in_memory import RUN, agents_data, federation_of, plan_of, site_state, sites_of
from nufed import Objective
from nufed.algorithms import AgentUpdate
from nufed.algorithms.protocol import defines
from nufed.evaluate import RESAMPLES, Measure
from nufed.flower.app.server_app import Server
from nufed.lab.files import sha256
from nufed.lab.runs.agent_states import Inventory, StoredStates
from nufed.lab.runs.part_files import Checkpoint, load_checkpoint, save_checkpoint
from nufed.lab.runs.records import Manifest
from nufed.server import Progress, initial_server, next_server, to_send
from nufed.simulation import ENGINES, DirectEngine, Engines, Training, WorkerEngine, train
from support import agent_context, context, federation, mlp, same, states_of, tied

MODULES = {
    "float64": mlp,
    "float32": lambda: mlp(torch.float32),
    "nested and tied": tied,
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)),
}


MAY_USE = {
    None: ["direct", "closed_form"],
    "elementwise": ["direct", "closed_form", "batched"],
    "linearly": ["direct", "closed_form", "batched", "gram"],
}
"""The engines that must run an algorithm, by what it declares."""
BELONGS = {"configuration": "a", "data": "b", "split": "c"}


def pytest_generate_tests(metafunc):
    """Every algorithm; where a test has an engine too, thorough cases on every kind of module."""
    if "engine" in metafunc.fixturenames:
        pairs = [(c, m) for c in CASES for m in MODULES if m == "float64" or c in THOROUGH]
        ids = [f"{case}-{kind}" for case, kind in pairs]
        metafunc.parametrize("algorithm, engine", pairs, ids=ids, indirect=True)
    elif "algorithm" in metafunc.fixturenames:
        metafunc.parametrize("algorithm", CASES, indirect=True)


@pytest.fixture
def algorithm(request):
    return CASES[request.param]


@pytest.fixture
def engine(request):
    return DirectEngine(Objective(MODULES[request.param]()), federation(unseen=1), seed=5)


def snapshot(state):
    return {name: vector.clone() for name, vector in state.items()}


def same_states(left, right, engine):
    found, expected = (states_of(engine, p) for p in (left, right))
    return all(same(found[a] or {}, expected[a] or {}) for a in expected)


def assert_near(found, expected):
    """Two states are equal up to rounding."""
    torch.testing.assert_close(dict(found or {}), dict(expected or {}), rtol=1e-6, atol=1e-9)


def history(algorithm, engine, rounds=4, start=None, states=None):
    training = Training(algorithm, engine, 0.6)
    start = start or training.start(engine.objective.initial(), states)
    return list(training.rounds(start, rounds))


def killed_and_resumed(algorithm, engine, folder):
    """Training killed in round 4, after the checkpoint of round 2, and resumed from disk."""
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    store = StoredStates(folder, BELONGS, cache_bytes=0)
    saved = history(algorithm, engine, 2, states=store)[-1]
    about = Manifest(
        round=2,
        states=astuple(store.flush(2)),
        metrics_bytes=0,
        metrics_sha256=sha256(b""),
        belongs_to=BELONGS,
    )
    save_checkpoint(folder, Checkpoint(about, saved.server))
    history(algorithm, engine, 3, saved)  # leaves states newer than the checkpoint
    found, problems = load_checkpoint(folder, BELONGS)
    assert not problems
    states = StoredStates(folder, BELONGS, [2], cache_bytes=0)
    states.begin(Inventory(*found.about.states))
    return history(algorithm, engine, start=Progress(found.round, found.server, states))


def evaluate(algorithm, engine, progress):
    received = to_send(algorithm, progress.server)
    states, measure = states_of(engine, progress), Measure("accuracy", resamples=RESAMPLES)
    return engine.evaluate(algorithm, received, states, steps=2, measure=measure)


def test_dtype_shape_and_inputs_are_kept(algorithm, engine):
    objective = engine.objective
    w = objective.initial()
    server = initial_server(algorithm, objective, w)
    received = to_send(algorithm, server)
    agent = algorithm.agent_init(objective, received)
    before = snapshot(server), snapshot(agent), w.clone()
    results = engine.agent_updates(algorithm, received, {2: agent, 3: agent}, context())
    assert set(results[2].vectors) == set(algorithm.sent_in(1))
    # the grid of a secure sum follows from these; such sums are refused where agents get their own
    assert set(algorithm.sends) <= set(received) or defines(algorithm, "downlink")
    own = agent_context(objective, engine.federation.batches(2, 0, "evaluate"))
    for state in (None, results[2].state or None):
        personal = algorithm.personal_model(own, received, state)
        models = list(algorithm.fine_tune(own, received, personal.tensors, 2))
        assert len(models) == 3 and same(models[0], personal.tensors)
        for model in models:
            found = model["model"]
            assert found.shape == w.shape and found.dtype == w.dtype and not found.requires_grad
    assert same(server, before[0]) and same(agent, before[1]) and torch.equal(w, before[2])
    # a second round: some vectors move once agents differ from the server
    updates = [AgentUpdate(agent, 1, 24, result.vectors) for agent, result in results.items()]
    received = to_send(algorithm, next_server(algorithm, context(), server, updates))
    results = engine.agent_updates(algorithm, received, {2: results[2].state}, context(2))
    pairs = [(vector, server[name]) for name, vector in results[2].vectors.items()]
    pairs += [(vector, agent[name]) for name, vector in results[2].state.items()]
    for vector, like in pairs:
        assert vector.shape == like.shape and vector.dtype == w.dtype and not vector.requires_grad
        assert not torch.equal(vector, like)


def test_training_is_repeatable_and_lowers_the_loss(algorithm, engine):
    first, again = history(algorithm, engine, 6), history(algorithm, engine, 6)
    assert all(same(a.server, b.server) for a, b in zip(first, again, strict=True))
    assert same_states(first[-1], again[-1], engine)
    loss = [
        sum(s.loss[-1] for s in evaluate(algorithm, engine, progress))
        for progress in (first[0], first[-1])
    ]
    assert loss[1] < loss[0]


def test_the_order_of_agents_does_not_matter(algorithm, engine):
    @dataclass(frozen=True)
    class Backwards(DirectEngine):
        def agent_updates(self, algorithm, received, states, context):
            turned = dict(reversed(states.items()))
            return super().agent_updates(algorithm, received, turned, context)

    backwards = Backwards(engine.objective, engine.federation, engine.seed)
    progress = [history(algorithm, engine, 2)[-1] for _ in range(2)]
    there = Training(algorithm, engine, 0.8).round(progress[0])
    back = Training(algorithm, backwards, 0.8).round(progress[1])
    assert same(there.server, back.server) and same_states(there, back, engine)


def test_an_agent_whose_update_is_rejected_leaves_no_trace(algorithm, engine):
    class Together(DirectEngine):
        def chunks(self, algorithm, agents):
            return [list(agents)]

    @dataclass(frozen=True)
    class Breaking(Together):
        def agent_updates(self, algorithm, received, states, context):
            results = super().agent_updates(algorithm, received, states, context)
            agent = min(results)
            broken = {k: v * float("nan") for k, v in results[agent].vectors.items()}
            return {**results, agent: replace(results[agent], vectors=broken)}

    @dataclass(frozen=True)
    class Without(Together):
        def agent_updates(self, algorithm, received, states, context):
            others = {a: s for a, s in states.items() if a != min(states)}
            return super().agent_updates(algorithm, received, others, context)

    outcomes = []
    for kind in (Breaking, Without):
        other = kind(engine.objective, engine.federation, engine.seed)
        outcomes.append(history(algorithm, other, 3)[-1])
    assert same(outcomes[0].server, outcomes[1].server)
    assert same_states(*outcomes, engine)
    assert [r.agent for r in outcomes[0].rejected] == [min(outcomes[0].cohort)]


def test_unseen_agents_never_train(algorithm, engine):
    (unseen,) = engine.federation.split.unseen
    cohorts = [progress.cohort for progress in history(algorithm, engine, 8)]
    assert unseen not in {agent for cohort in cohorts for agent in cohort}
    assert all(len(cohort) == 3 for cohort in cohorts[1:])


@pytest.mark.parametrize("spread", ["one", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_every_engine_that_may_run_it_gives_the_same(case, spread, tmp_path):
    """Models, states and scores; with 2 workers, and killed and resumed in the middle.

    The last two on all engines, or on one of them: each in turn, from algorithm to algorithm.
    """
    algorithm, data, objective = CASES[case], federation(unseen=1), Objective(mlp())
    engines = Engines(objective, data, seed=5)
    direct = engines.get("direct")
    right, scores = history(algorithm, direct), None
    # those with oneDNN differ in large float32 products alone, which are tested by themselves
    names = [name for name in ENGINES if not name.endswith("_onednn")]
    obstacles = {name: engines.obstacle(name, algorithm) for name in names}
    usable = [name for name, obstacle in obstacles.items() if obstacle is None]
    assert usable == MAY_USE[algorithm.combines], obstacles
    chosen = usable if spread == "all" else [usable[list(CASES).index(case) % len(usable)]]
    for name in usable:
        engine = engines.get(name)
        alone = history(algorithm, engine)
        others = []
        if name in chosen:
            with WorkerEngine(engine, 2) as workers:
                others.append(history(algorithm, workers))
                assert evaluate(algorithm, workers, others[0][-1]) == evaluate(
                    algorithm, engine, alone[-1]
                )
            others.append(killed_and_resumed(algorithm, engine, tmp_path / name))
        for other in others:
            assert same(other[-1].server, alone[-1].server)
            assert same_states(other[-1], alone[-1], engine)
        assert_near(alone[-1].server, right[-1].server)
        for agent, state in states_of(direct, right[-1]).items():
            assert_near(alone[-1].states.get(agent), state)
        scores = scores or evaluate(algorithm, direct, right[-1])
        for one, other in zip(evaluate(algorithm, engine, alone[-1]), scores, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-6)
            shared = other.global_loss  # None where the server holds no whole model
            assert one.global_loss == (shared and pytest.approx(shared, rel=1e-6))
            for cost in ("personal_gradients", "personal_hvps", "newcomer"):
                assert getattr(one, cost) == getattr(other, cost)


def test_on_flower_it_gives_the_bits_of_the_direct_engine(algorithm, tmp_path):
    """Also if the server is killed in round 4, after the checkpoint of round 2, and resumed."""
    data = agents_data(5)
    plan = plan_of(algorithm, agents=5, rounds=4, participation=0.5, unseen_agents=1)
    direct = DirectEngine(plan.objective, federation_of(data, plan.seed, 1), plan.seed)
    w = plan.objective.initial()
    right = list(train(algorithm, direct, w, rounds=4, participation=0.5))
    scores = evaluate(algorithm, direct, right[-1])
    whole = Server(plan, sites_of(plan, data, tmp_path / "whole"), RUN)
    killed = Server(plan, sites_of(plan, data, tmp_path / "killed"), RUN)
    training = killed.train()
    *before, saved = islice(training, 3)
    notes = json.dumps(killed.notes)
    next(training)  # sites have answered a round that the server does not know of
    resumed = Server(plan, sites_of(plan, data, tmp_path / "killed"), RUN, json.loads(notes))
    again = resumed.train(Progress(saved.round, saved.server))
    for name, server, rounds in (
        ("whole", whole, list(whole.train())),
        ("killed", resumed, [*before, saved, *islice(again, 1, None)]),
    ):
        for one, other in zip(rounds, right, strict=True):
            assert same(one.server, other.server) and one.cost == other.cost
        for agent in range(5):
            state = right[-1].states.get(agent)
            found = site_state(tmp_path / name, server, agent, state or {})
            assert same(found or {}, state or {})
        outcome = server.scoring.evaluate(rounds[-1])
        assert outcome.scores == scores and not outcome.missing


def test_the_cost_of_a_newcomer_is_counted(algorithm):
    calls = []

    class Counting(Objective):
        def grad(self, w, batch, part=None):
            calls.append(1)
            return super().grad(w, batch, part)

    objective = Counting(mlp())
    own = agent_context(objective, federation().batches(2, 0, "evaluate"))
    received = to_send(algorithm, initial_server(algorithm, objective, objective.initial()))
    personal = algorithm.personal_model(own, received, None)
    assert personal.cost.gradients == len(calls) and algorithm.notes.newcomer
