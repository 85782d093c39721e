"""What the server sends each agent of its own: on engines, workers, Flower, with compression."""

import re
from dataclasses import dataclass

import pytest
import torch

from flower.app.in_memory import RUN, agents_data, federate, federation_of, plan_of, sites_of
from nufed import Objective
from nufed.algorithms import AgentResult, Cost, FedAvg, LocalTraining
from nufed.algorithms.agent_rows import no_rows, row_of, with_rows
from nufed.algorithms.compression import Bfloat16, Int8
from nufed.errors import InputError, RunError
from nufed.evaluate import RESAMPLES, Measure
from nufed.flower.app import transport
from nufed.flower.app.payload import OWN, size_of, to_arrays
from nufed.flower.app.privacy import Privacy
from nufed.flower.app.registry import SiteKeys
from nufed.flower.app.server_app import Server
from nufed.lab.files import sha256
from nufed.lab.runs.part_files import Checkpoint
from nufed.lab.runs.records import Manifest, round_line
from nufed.server import Downlink, Rules, StatesOf, to_send
from nufed.simulation import DirectEngine, Engines, Faults, WorkerEngine, train
from nufed.simulation.loop import replay
from support import context, federation, mlp, same

SETTINGS = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6}


@dataclass(frozen=True)
class Alone(FedAvg):
    """FedAvg whose model is sent to every agent alone."""

    receives = ()

    def downlink(self, context, server, agent):
        return {"model": server["model"]}


@dataclass(frozen=True)
class Kept(LocalTraining):
    """Every agent trains the model that it sent last; the server keeps them all."""

    receives = ()
    combines = "elementwise"

    def server_init(self, objective, w):
        return {"model": w, **no_rows(models=w)}

    def downlink(self, context, server, agent):
        row = row_of(server, agent)
        w = server["model"] if row is None else server["models"][row]
        return {"model": w, "number": w.new_tensor([-1 if agent is None else agent])}

    def agent_update(self, context, received, state):
        assert (received["number"] == context.agent).all()
        w = self.descend(context, received["model"])
        return AgentResult({"model": w}, {}, Cost(self.steps_per_round(context)))

    def server_update(self, context, server, updates):
        mean = self.aggregate(context, updates, "model", server["model"])
        rows = {u.agent: {"models": u.vectors["model"]} for u in updates}
        return {**with_rows(server, rows), "model": mean}


KEPT = Kept(**SETTINGS)
HOW = {"rounds": 4, "participation": 0.6}


def trained(algorithm, engine, **more):
    return list(train(algorithm, engine, engine.objective.initial(), **HOW, **more))


def scores(algorithm, engine, last):
    states = StatesOf(list(engine.federation.split.agents), last.states)
    received = to_send(algorithm, last.server)
    measure = Measure("accuracy", resamples=RESAMPLES)
    return engine.evaluate(algorithm, received, states, steps=2, measure=measure)


def alone_in_the_next_round(engine, before, agent):
    """The model that an agent receives, and the one that it sends."""
    down = Downlink.of(to_send(KEPT, before.server))
    of_round = context(before.round + 1)
    (result,) = engine.agent_updates(KEPT, down, {agent: {}}, of_round).values()
    return down.to(agent)["model"], result.vectors["model"]


@pytest.fixture
def engines():
    return Engines(Objective(mlp()), federation(unseen=1), seed=5)


@pytest.mark.parametrize("name", ["direct", "batched"])
def test_the_same_vector_for_every_agent_alone_is_fedavg(name, engines):
    engine, plain, alone = engines.get(name), FedAvg(**SETTINGS), Alone(**SETTINGS)
    right, found = trained(plain, engine)[-1], trained(alone, engine)[-1]
    assert same(found.server, right.server)
    assert scores(alone, engine, found) == scores(plain, engine, right)
    assert round_line(alone, found) == round_line(plain, right)


@pytest.mark.parametrize("name", ["direct", "batched"])
def test_agents_get_their_own_on_engines_and_workers(name, engines):
    engine = engines.get(name)
    assert engines.obstacle(name, KEPT) is None
    alone = trained(KEPT, engine)
    with WorkerEngine(engine, 2) as workers:
        spread = trained(KEPT, workers)
        assert scores(KEPT, workers, spread[-1]) == scores(KEPT, engine, alone[-1])
    assert all(same(a.server, b.server) for a, b in zip(alone, spread, strict=True))
    server = alone[-1].server
    assert server["agents"].tolist() == sorted({a for p in alone for a in p.cohort})
    assert len(server["models"].unique(dim=0)) == len(server["agents"]) > 3
    for agent in alone[-1].cohort:  # each is that agent's own training, whatever the others did
        _, sent = alone_in_the_next_round(engine, alone[-2], agent)
        torch.testing.assert_close(server["models"][row_of(server, agent)], sent)


def test_gram_space_refuses_it(engines):
    @dataclass(frozen=True)
    class Linear(Alone):
        combines = "linearly"

    assert engines.obstacle("gram", FedAvg(**SETTINGS)) is None
    assert "no vector but the model" in engines.obstacle("gram", Linear(**SETTINGS))


@pytest.mark.parametrize("codec", [None, Bfloat16(), Int8()], ids=str)
def test_on_flower_it_gives_the_simulators_bits(codec):
    """A change counts from what the agent received, not from the server's vector of that name."""
    data, rules = agents_data(5), Rules(codec=codec)
    plan = plan_of(KEPT, agents=5, unseen_agents=1, rules=rules, **HOW)
    engine = DirectEngine(plan.objective, federation_of(data, plan.seed, 1), plan.seed)
    right, received = trained(KEPT, engine, rules=rules), {}

    def seen(agent, message, reply):
        if message.metadata.message_type == "train":
            received[agent] = message.content
        return reply

    rounds, outcome, _ = federate(plan, data, seen)
    for one, other in zip(rounds, right, strict=True):
        assert same(one.server, other.server) and one.rejected == ()
    assert outcome.scores == scores(KEPT, engine, right[-1])
    line, content = round_line(KEPT, rounds[-1]), next(iter(received.values()))
    down, own = line["bytes_down"] / len(rounds[-1].cohort), size_of(content)
    assert content[OWN].keys() == {"model", "number"} and down < own < down + 2000
    if codec is not None:  # the sum of what it sent: coding the distance to the mean would lose it
        exact = trained(KEPT, engine)[-1].server["models"]
        lost = (right[-1].server["models"] - exact).norm() / exact.norm()
        assert 0 < lost < 5e-3


def test_one_broadcast_is_serialised_once(monkeypatch):
    calls = []
    monkeypatch.setattr(transport, "to_arrays", lambda v: calls.append(sorted(v)) or to_arrays(v))
    for algorithm, own in ((FedAvg(**SETTINGS), None), (KEPT, ["model", "number"])):
        calls.clear()
        plan = plan_of(algorithm, agents=4, rounds=1)
        federate(plan, agents_data(4))
        shared, alone = (calls.count(list(n)) for n in (algorithm.receives, own or ["none"]))
        requests = 2  # for training and for scores
        assert (shared, alone) == (requests, 4 * requests if own else 0)


@pytest.mark.parametrize("where", ["simulation", "flower"])
def test_a_round_makes_only_what_its_cohort_receives(where, tmp_path):
    asked = []

    @dataclass(frozen=True)
    class Counting(Kept):
        def downlink(self, context, server, agent):
            asked.append((context.round, agent))
            return super().downlink(context, server, agent)

    algorithm, data = Counting(**SETTINGS), agents_data(5)
    plan = plan_of(algorithm, agents=5, rounds=3, participation=0.4)
    if where == "flower":
        rounds = Server(plan, sites_of(plan, data, tmp_path), RUN).train()
    else:
        engine = DirectEngine(plan.objective, federation_of(data, plan.seed, 0), plan.seed)
        rounds = train(algorithm, engine, plan.objective.initial(), rounds=3, participation=0.4)
    for progress in rounds:
        own = {agent for round, agent in asked if agent is not None and round == progress.round}
        assert own == set(progress.cohort)


def test_a_replay_and_faults_use_what_each_agent_received(engines):
    engine = engines.get("direct")
    right = trained(KEPT, engine, faults=Faults(dropout=0.3))
    taken = [progress.taken for progress in right[1:]]
    found = list(replay(KEPT, engine, engine.objective.initial(), taken, 0.6))
    assert all(same(a.server, b.server) for a, b in zip(found, right, strict=True))
    # a flipped change starts at what the corrupt agent received
    faults, seen = Faults(corruption=0.6), engine.federation.split.seen
    last, bad = trained(KEPT, engine, faults=faults), faults.corrupt_agents(seen, engine.seed)
    agent = next(a for a in last[-1].cohort if a in bad)
    start, honest = alone_in_the_next_round(engine, last[-2], agent)
    sent = last[-1].server["models"][row_of(last[-1].server, agent)]
    torch.testing.assert_close(sent, start - (honest - start))


def test_grown_tables_fit_a_checkpoint_and_other_shapes_do_not(engines, tmp_path):
    engine = engines.get("direct")
    server, start = trained(KEPT, engine)[-1].server, KEPT.server_init(None, torch.zeros(5))
    like = KEPT.server_init(None, engine.objective.initial())
    about = Manifest(
        round=4, states=(0, 0), metrics_bytes=0, metrics_sha256=sha256(b""), belongs_to={}
    )
    Checkpoint(about, server).check_fits(like, tmp_path)
    wider = {**server, "models": server["models"][:, 1:]}
    for saved, initial in (
        (server, start),
        (server, {**like, "models": torch.empty(0)}),
        (server, {"model": like["model"]}),
        (wider, like),
    ):
        with pytest.raises(RunError, match="its vectors are not those of this method"):
            Checkpoint(about, saved).check_fits(initial, tmp_path)


def test_secure_aggregation_and_privacy_refuse_it():
    what = "an algorithm that sends an agent what it knows of single others"
    algorithm = Alone(**SETTINGS)
    with pytest.raises(InputError, match=re.escape(f"can't be combined with {what}; change that")):
        plan_of(algorithm, site_keys=SiteKeys(()))
    with pytest.raises(InputError, match=re.escape(f"epsilon does not hold with {what}; remove")):
        plan_of(algorithm, privacy=Privacy(clip=1.0, noise=1.0))
    assert plan_of(algorithm).algorithm is algorithm
