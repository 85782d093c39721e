"""A site's state and personal model stay at the site, and are what the simulation computes."""

import pytest
import torch
from safetensors.torch import load

from flower.app.in_memory import RUN, MemoryGrid, agents_data, client_app, federation_of, plan_of
from nufed import GMeta
from nufed.algorithms import Ditto, Scaffold
from nufed.evaluate import evaluation_context
from nufed.flower.app.privacy import Privacy
from nufed.flower.app.server_app import Server
from nufed.lab.files import read_sealed
from nufed.lab.runs.agent_states import personal_after
from nufed.server import to_send
from nufed.simulation import DirectEngine, train

METHODS = {
    "gmeta": GMeta(adapt_steps=2, adapt_lr=0.2, meta_lr=0.3, local_steps=2, batch_size=6),
    "scaffold": Scaffold(meta_lr=0.1, local_steps=2, batch_size=6),
    "ditto": Ditto(0.5, 0.3, 2, meta_lr=0.3, local_steps=2, batch_size=6, adapt_lr=0.2),
}


def vectors_of(message):
    """Every array in a message, by name."""
    records = message.content.array_records.values()
    return {name: array.numpy() for record in records for name, array in record.items()}


@pytest.mark.parametrize("name", METHODS)
def test_only_what_is_received_and_sent_travels(name, tmp_path):
    algorithm, data, travelled = METHODS[name], agents_data(4), []
    plan = plan_of(algorithm, rounds=3, participation=0.5, personal_steps=1)

    def watch(agent, message, reply):
        travelled.append((message.metadata.message_type, vectors_of(message), vectors_of(reply)))
        return reply

    site = client_app(lambda: plan, lambda config: data[config["partition-id"]])
    server = Server(plan, MemoryGrid(site, range(4), tmp_path, watch), RUN)
    rounds = list(server.train())
    server.scoring.evaluate(rounds[-1])
    server.scoring.keep_personal_models(rounds[-1], scale=3.0)
    kinds = ("train", "evaluate", "evaluate.keep")
    down = {**dict.fromkeys(kinds, frozenset(algorithm.receives)), "query": frozenset()}
    up = {**dict.fromkeys(down, frozenset()), "train": set(algorithm.sends)}
    assert {kind for kind, _, _ in travelled} == set(down)
    for kind, sent, returned in travelled:
        assert set(sent) == down[kind] and set(returned) == up[kind]

    # the sites' states are those of the simulation, and none of them is in a message
    engine = DirectEngine(plan.objective, federation_of(data, plan.seed, 0), plan.seed)
    w = plan.objective.initial()
    *_, last = train(algorithm, engine, w, rounds=3, participation=0.5)
    received = to_send(algorithm, last.server)
    seen = [torch.as_tensor(v) for _, *both in travelled for own in both for v in own.values()]
    for agent in range(4):
        batches = engine.federation.batches(agent, plan.seed, "evaluate")
        own = evaluation_context(engine.federation, engine.objective, batches, batches.samples)
        state = last.states.get(agent)
        right = personal_after(algorithm, own, received, state, 1, 3.0)
        path = tmp_path / RUN / "personal" / f"{agent}.safetensors"
        kept = read_sealed(path)
        assert kept.tensors.keys() == right.keys() and kept.about["agent"] == agent
        assert kept.about["lr_scale"] == 3.0 and kept.about["round"] == 3
        assert torch.equal(kept.tensors["model"], right["model"])
        assert torch.equal(load(path.read_bytes())["model"], right["model"])  # any tool reads it
        private = [kept.tensors["model"], *(state or {}).values()]
        assert not any(torch.equal(v, s) for v in private for s in seen if v.shape == s.shape)
        assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("scores", [False, True])
def test_sites_with_privacy_keep_a_personal_model_whether_or_not_they_send_scores(scores, tmp_path):
    plan = plan_of(METHODS["gmeta"], rounds=1, privacy=Privacy(0.5, 3.0, scores=scores))
    replies = []

    def watch(agent, message, reply):
        if message.metadata.message_type == "evaluate.keep":
            replies.append((agent, reply.content))
        return reply

    data = agents_data(4)
    site = client_app(lambda: plan, lambda config: data[config["partition-id"]])
    server = Server(plan, MemoryGrid(site, range(4), tmp_path, watch), RUN)
    *_, last = server.train()
    server.scoring.keep_personal_models(last)
    for agent, reply in replies:
        assert dict(reply["about"]) == {"agent": agent, "round": 1} and len(reply) == 1
        kept = read_sealed(tmp_path / RUN / "personal" / f"{agent}.safetensors")
        assert not torch.equal(kept.tensors["model"], last.server["model"])
    assert [agent for agent, _ in replies] == [0, 1, 2, 3]
