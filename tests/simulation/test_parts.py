"""A round is trained in parts of bounded memory, which change no bit."""

from itertools import chain

import pytest

from nufed import GMeta, Objective
from nufed.algorithms import Scaffold
from nufed.models import logistic
from nufed.objective.fast.gram_space import first_layer
from nufed.simulation import BatchedEngine, DirectEngine, GramEngine, loop, train
from nufed.simulation.batched_engine import even_chunks
from nufed.simulation.worker_engine import WorkerEngine
from support import same, uneven_federation


def make(kind, objective, data):
    if kind == "batched":
        return BatchedEngine(objective, data, 3, most=2)
    if kind == "gram":
        return GramEngine(objective, data, 3, first_layer(objective, (5,)), most=2)
    direct = DirectEngine(objective, data, 3)
    return WorkerEngine(direct, 2) if kind == "workers" else direct


@pytest.mark.parametrize("kind", ["direct", "batched", "gram", "workers"])
def test_parts_change_no_bit(monkeypatch, kind):
    data, objective = uneven_federation(), Objective(logistic((5,), 3))
    algorithm = (GMeta if kind == "gram" else Scaffold)(batch_size=12, local_steps=2, meta_lr=0.1)

    def trained():
        engine, w = make(kind, objective, data), objective.initial()
        return list(train(algorithm, engine, w, rounds=2, participation=1.0))[-1]

    monkeypatch.setattr(loop, "PART_BYTES", 1)
    last = trained()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_parts", lambda *arguments: [list(arguments[-1])])
        whole = trained()
    assert same(whole.server, last.server)
    assert (whole.taken, whole.cost) == (last.taken, last.cost)


def test_parts_are_whole_chunks_and_of_bounded_memory(monkeypatch):
    data, objective = uneven_federation(), Objective(logistic((5,), 3))
    algorithm, sent = GMeta(batch_size=12), {"model": objective.initial()}

    def parts(kind):
        engine = make(kind, objective, data)
        found = list(loop._parts(algorithm, engine, sent, data.split.seen))
        assert list(chain(*found)) == list(chain(*engine.chunks(algorithm, data.split.seen)))
        return [len(part) for part in found]

    number = len(data.split.seen)
    assert parts("direct") == parts("workers") == [number]
    monkeypatch.setattr(loop, "PART_BYTES", 3 * sent["model"].nbytes)
    assert set(parts("direct")[:-1]) == {3}
    monkeypatch.setattr(loop, "PART_BYTES", 1)
    assert parts("direct") == [1] * number
    assert parts("workers")[0] == 2  # one chunk for each worker


def test_chunks_of_some_chunks_are_the_same():
    data = uneven_federation()
    agents = [agent for agent in data.split.agents for _ in range(5)]
    for most in (2, 3, 5, 7):
        chunks = even_chunks(data, GMeta(batch_size=12), agents, most)
        for end in range(1, len(chunks) + 1):
            for start in range(end):
                some = chunks[start:end]
                assert even_chunks(data, GMeta(batch_size=12), list(chain(*some)), most) == some
