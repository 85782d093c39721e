"""Evaluation reads agents' states a few at a time, and gives the same bits for any worker count."""

import weakref

import pytest
import torch

import nufed
from nufed import Objective
from nufed.algorithms import Ditto, Scaffold
from nufed.evaluate import Measure, Scoring
from nufed.lab.runs.agent_states import StoredStates
from nufed.models import fcnn
from nufed.server import MemoryStates, StatesOf
from nufed.simulation import BatchedEngine, DirectEngine, WorkerEngine, start_method, worker_engine
from support import uneven_federation

AGENTS = 24
HOW = Scoring(1, Measure("accuracy"), [1.0, 3.0], "test")
needs_fork = pytest.mark.skipif(start_method() != "fork", reason="this system can't fork safely")


class Watched(MemoryStates):
    """Every look-up gives a copy; counts those that are alive at once."""

    def __init__(self, states):
        super().__init__(states)
        self.alive, self.most, self.reads = weakref.WeakSet(), 0, 0

    def get(self, agent):
        found = super().get(agent)
        if found is None:
            return None
        copy = {name: vector.clone() for name, vector in found.items()}
        self.alive.update(copy.values())
        self.most, self.reads = max(self.most, len(self.alive)), self.reads + 1
        return copy


def engine_of(kind):
    torch.manual_seed(0)
    objective = Objective(fcnn((5,), 3, hidden=(6,), activation="tanh"))
    data = uneven_federation(sizes=(16,) * AGENTS)
    if kind == "direct":
        return DirectEngine(objective, data, 5)
    return BatchedEngine(objective, data, 5, most=4)


def states_for(engine, name):
    """Every third agent is a newcomer."""
    rng = torch.Generator().manual_seed(1)
    size = engine.objective.initial().shape
    return Watched(
        {a: {name: 0.1 * torch.randn(size, generator=rng)} for a in range(AGENTS) if a % 3}
    )


@pytest.mark.parametrize(("kind", "most"), [("direct", 2), ("batched", 8)])
def test_states_are_read_once_and_chunk_by_chunk(kind, most):
    engine, algorithm = engine_of(kind), Ditto(batch_size=6)
    states, server = states_for(engine, "personal"), {"model": engine.objective.initial()}
    lazy = engine.evaluate_scales(algorithm, server, StatesOf(range(AGENTS), states), HOW)
    assert states.reads == AGENTS * 2 // 3 and states.most <= most
    loaded = {agent: states.get(agent) for agent in range(AGENTS)}
    assert lazy == engine.evaluate_scales(algorithm, server, loaded, HOW)


@needs_fork
@pytest.mark.parametrize("kind", ["direct", "batched"])
def test_workers_share_a_bounded_number_of_states(kind, monkeypatch):
    """One group of chunks per worker; newcomers and others of a chunk are stacked as without."""
    monkeypatch.setattr(worker_engine, "LOADED_BYTES", 1)
    engine, algorithm = engine_of(kind), Scaffold(meta_lr=0.1, batch_size=6)
    server = algorithm.server_init(engine.objective, engine.objective.initial())
    states = states_for(engine, "control")
    size, chunk = engine.objective.initial().nbytes, 1 if kind == "direct" else 4
    right = engine.evaluate_scales(algorithm, server, StatesOf(range(AGENTS), states), HOW)
    states.most = 0
    with WorkerEngine(engine, 2) as workers:
        found = workers.evaluate_scales(algorithm, server, StatesOf(range(AGENTS), states), HOW)
        assert found == right
        assert workers._buffer.size <= (2 * chunk + 2) * (size + 64)  # and what is received
    assert states.most <= 4 * chunk


def test_a_run_never_holds_the_states_of_all_evaluated_agents(tmp_path, monkeypatch):
    alive, most, get = weakref.WeakSet(), [], StoredStates.get

    def watched(self, agent):
        found = get(self, agent)
        copy = None if found is None else {name: v.clone() for name, v in found.items()}
        alive.update((copy or {}).values())
        most.append(len(alive))
        return copy

    monkeypatch.setattr(StoredStates, "get", watched)
    config = {
        "rounds": 1,
        "workers": 1,
        "engine": "direct",
        "baselines": [],
        "data": {"agents": 12, "samples_per_agent": 30, "validation": 0.2},
        "model": {"args": {"hidden": [4]}},
        "methods": {"ditto": {"algorithm": "ditto", "batch_size": 6}},
    }
    run = nufed.run(config, out=tmp_path / "run", figures=False)
    assert len(run.methods["ditto"][0].scores) == 12 and len(most) > 3 * 12
    assert max(most) <= 2


@needs_fork
def test_stacks_of_a_whole_run_do_not_depend_on_workers_with_newcomers():
    engine, algorithm = engine_of("batched"), Ditto(batch_size=6)
    states, server = states_for(engine, "personal"), {"model": engine.objective.initial()}
    stacks = []

    class Looking(Ditto):
        def personal_model(self, context, received, state):
            stacks.append((received["model"].shape[0], state is None))
            return super().personal_model(context, received, state)

    looking = Looking(batch_size=6)
    engine.evaluate_scales(looking, server, StatesOf(range(AGENTS), states), HOW)
    whole, stacks[:] = list(stacks), []
    for chunk in engine.chunks(algorithm, range(AGENTS)):  # as workers get them
        engine.evaluate_scales(looking, server, StatesOf(chunk, states), HOW)
    assert stacks == whole and {newcomers for _, newcomers in whole} == {True, False}
