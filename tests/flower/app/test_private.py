"""With [privacy] a site sends only clipped and noisy updates, and each of them is counted."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn

from flower.app.in_memory import RUN, MemoryGrid, agents_data, federate, plan_of
from nufed import FirstOrder, GMeta, InputError, Objective
from nufed.algorithms import Scaffold
from nufed.algorithms.aggregation import Mean, Median
from nufed.errors import TrainingError
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.app.privacy import Privacy
from nufed.flower.app.server_app import Server
from nufed.flower.app.site import load_record
from nufed.flower.app.site_app import client_app
from nufed.server import Progress, Rules

FEDAVG = GMeta(
    adapt_steps=0, adapt_lr=0.2, meta_lr=0.3, local_steps=1, batch_size=6, curvature=FirstOrder()
)
AGENTS, ROUNDS, BAD = 4, 3, 2
DATA = agents_data(AGENTS)
NOISY = Privacy(clip=0.05, noise=3.0)


def untouched(agent, message, reply):
    return reply


def recording(replies, tamper=untouched):
    """Records every site's replies to training requests: (agent, round, records)."""

    def look(agent, message, reply):
        if message.metadata.message_type == "train" and not reply.has_error():
            replies.append((agent, message.content["about"]["round"], reply.content))
        return tamper(agent, message, reply)

    return look


def in_round(agent, round, change):
    """Changes one agent's reply to the first request of one round."""
    first = []

    def tamper(who, message, reply):
        about, number = message.content.get("about", {}), message.metadata.message_id
        if who == agent and about.get("round") == round:
            first.append(number)
            return change(message, reply) if number == first[0] else reply
        return reply

    return tamper


def lost(message, reply):
    return None


def first_changes(privacy):
    """What the sites send in the first round, less what they received."""
    replies, plan = [], plan_of(FEDAVG, rounds=1, privacy=privacy)
    federate(plan, DATA, recording(replies))
    sent = [torch.from_numpy(records["arrays"]["model"].numpy()) for _, _, records in replies]
    return torch.stack(sent) - plan.start()["model"]


def grid_of(plan, folder, tamper=untouched):
    site = client_app(lambda: plan, lambda config: DATA[config["partition-id"]])
    return MemoryGrid(site, range(plan.agents), folder, tamper)


def releases(notes):
    """Number of noisy updates charged by the server, by agent."""
    return {int(a): sum(s.values()) for a, s in notes["ledger"]["releases"].items()}


def kept(folder):
    """Number of noisy updates counted by the sites, by agent."""
    files = Path(folder).glob("*/agent-*")
    return {int(file.name[6:]): load_record(file, {}).release.count for file in files}


def test_what_leaves_a_site_is_its_change_clipped_and_with_noise():
    true = first_changes(None)
    lengths = true.norm(dim=1, keepdim=True)
    clip = float(lengths.median())
    clipped = true * (clip / lengths).clamp(max=1)
    assert not torch.equal(clipped, true)
    almost = first_changes(Privacy(clip, noise=1e-9))
    assert torch.allclose(almost, clipped, atol=1e-7) and not torch.equal(almost, clipped)
    noise = first_changes(Privacy(clip, noise=3.0)) - clipped
    assert noise.std() / (3 * clip) == pytest.approx(1, rel=0.3)  # 7 standard deviations
    assert len(noise.unique()) == noise.numel()


def test_no_two_runs_have_the_same_noise_and_no_site_reveals_its_number_of_samples():
    runs = [], []
    for replies in runs:
        federate(plan_of(FEDAVG, privacy=NOISY), DATA, recording(replies))
    for (_, _, first), (_, _, second) in zip(*runs, strict=True):
        one, other = (r["arrays"]["model"].numpy() for r in (first, second))
        assert not (one == other).any()
        assert first["about"]["samples"] == 1
        assert first["about"].keys() == {"agent", "round", "samples", "gradients", "hvps", "began"}


@pytest.mark.parametrize("samples", [1, 6])
def test_why_its_data_can_not_be_used_stays_at_the_site(samples, caplog):
    few = [*DATA[:BAD], tuple(part[:samples] for part in DATA[BAD]), *DATA[BAD + 1 :]]
    rounds, _, _ = federate(plan_of(FEDAVG, rounds=1, privacy=NOISY), few)
    (rejected,) = rounds[1].rejected
    told = "it failed: its data can't be used; see the site's log"
    assert (rejected.agent, rejected.reason) == (BAD, told)
    assert f"has {samples} sample" in caplog.text or "training samples and batch" in caplog.text


def test_a_retried_round_gets_identical_updates_at_no_cost(tmp_path):
    replies, rules = [], Rules(min_updates=AGENTS, attempts=2)
    plan = plan_of(FEDAVG, privacy=NOISY, rules=rules)
    grid = grid_of(plan, tmp_path, recording(replies, in_round(BAD, 2, lost)))
    server = Server(plan, grid, RUN)
    *_, last = server.train()
    assert last.round == ROUNDS
    answers = {(agent, id(records)) for agent, round, records in replies if round == 2}
    assert Counter(agent for agent, _ in answers) == dict.fromkeys(range(AGENTS), 2)
    sent = {(a, k, r["arrays"]["model"].data, r["release"]["count"]) for a, k, r in replies}
    assert len(sent) == AGENTS * ROUNDS
    assert releases(server.notes) == kept(tmp_path) == dict.fromkeys(range(AGENTS), ROUNDS)


def test_other_vectors_and_another_round_are_another_request(tmp_path):
    plan = plan_of(FEDAVG, rounds=1, privacy=NOISY)
    model = plan.start()["model"]
    for round, received, count in ((0, model, 1), (0, model + 1, 2), (1, model + 1, 3)):
        longer = replace(plan, rounds=round + 1)
        start = Progress(round, {"model": received})
        for _ in range(2):
            list(Server(longer, grid_of(longer, tmp_path), RUN).train(start))
            assert set(kept(tmp_path).values()) == {count}


def lose(file, how="removed"):
    def change(message, reply):
        content = file.read_bytes()
        file.unlink()
        if how == "damaged":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return reply

    return change


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_site_that_lost_its_store_counts_in_another(how, tmp_path):
    plan, file = plan_of(FEDAVG, privacy=NOISY), tmp_path / RUN / f"agent-{BAD}"
    server = Server(plan, grid_of(plan, tmp_path, in_round(BAD, 1, lose(file, how))), RUN)
    list(server.train())
    stores = server.notes["ledger"]["releases"]
    assert list(stores[str(BAD)].values()) == [1, ROUNDS - 1] and len(stores["0"]) == 1


def test_a_site_that_lost_its_store_continues_from_the_servers_count(tmp_path):
    plan, file = plan_of(FEDAVG, rounds=4, privacy=NOISY), tmp_path / RUN / f"agent-{BAD}"
    forget, late = in_round(BAD, 2, lose(file)), in_round(BAD, 3, lost)
    grid = grid_of(plan, tmp_path, lambda *args: args[2] and forget(*args[:2], late(*args)))
    grid.contexts[grid.node_of(BAD)].node_config["epsilon"] = budget(3)
    *_, last = Server(plan, grid, RUN).train()
    (left_out,) = last.rejected
    assert "another noisy update after 3 would bring" in left_out.reason


def test_the_noisy_update_of_a_site_that_lost_its_store_is_charged_again(tmp_path):
    plan, file = plan_of(FEDAVG, rounds=1, privacy=NOISY), tmp_path / RUN / f"agent-{BAD}"
    first = Server(plan, grid_of(plan, tmp_path), RUN)
    list(first.train())
    file.unlink()
    again = Server(plan, grid_of(plan, tmp_path), RUN, first.notes)  # killed before its checkpoint
    list(again.train())
    assert releases(again.notes) == {0: 1, 1: 1, BAD: 2, 3: 1}


def changed(**changes):
    return lambda reply: ConfigRecord({**reply.content["release"], **changes})


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        (lambda reply: None, "it sent no ConfigRecord called 'release'"),
        (lambda reply: ConfigRecord({}), "its release record has keys []"),
        (changed(count=0), "its number of noisy updates is 0"),
        (changed(count=-1), "its number of noisy updates is -1"),
        (changed(count=10**12), "its number of noisy updates is 1000000000000"),
        (changed(count="1"), "its number of noisy updates is '1'"),
        (changed(store="../elsewhere"), "must be an id of 32 hexadecimal digits"),
        (changed(more=1), "its release record has keys"),
    ],
)
def test_a_reply_without_a_valid_release_record_is_named_and_rejected(release, reason):
    def change(message, reply):
        records = {**reply.content, "release": release(reply)}
        return Message(
            RecordDict({k: v for k, v in records.items() if v is not None}), reply_to=message
        )

    rounds, _, _ = federate(plan_of(FEDAVG, privacy=NOISY), DATA, in_round(BAD, 2, change))
    assert [(r.agent, r.round) for p in rounds for r in p.rejected] == [(BAD, 2)]
    assert reason in rounds[2].rejected[0].reason


def test_a_claim_of_a_million_updates_is_named_and_not_published(tmp_path, caplog):
    def claim(message, reply):
        lie = ConfigRecord({**reply.content["release"], "count": 10**6})
        return Message(RecordDict({**reply.content, "release": lie}), reply_to=message)

    plan = plan_of(FEDAVG, privacy=NOISY)
    server = Server(plan, grid_of(plan, tmp_path, in_round(BAD, 2, claim)), RUN)
    list(server.train())
    assert server.account.spent()["server"] == server_epsilon(NOISY.noise, ROUNDS, NOISY.delta)
    assert server.account.summary()["updates"] == {"charged": ROUNDS, "claimed": 10**6}
    assert f"site {BAD} claims 1000000 noisy updates but was sent 2 requests" in caplog.text


def moved(change):
    """Adds something to the update that was sent."""

    def tamper(message, reply):
        model = reply.content["arrays"]["model"].numpy()
        arrays = ArrayRecord({"model": Array(change(model))})
        return Message(RecordDict({**reply.content, "arrays": arrays}), reply_to=message)

    return tamper


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model + 1e15, "its change has norm 8.12"),
        (lambda model: model + 20 * NOISY.clip * NOISY.noise * np.eye(66)[3], "its change has"),
    ],
)
def test_an_update_that_clipping_and_noise_can_not_give_is_rejected(change, reason):
    rounds, _, _ = federate(plan_of(FEDAVG, privacy=NOISY), DATA, in_round(BAD, 2, moved(change)))
    assert [(r.agent, r.round) for p in rounds for r in p.rejected] == [(BAD, 2)]
    assert rounds[2].rejected[0].reason.startswith(reason)
    assert "with probability below 1e-20" in rounds[2].rejected[0].reason
    assert all(p.server["model"].abs().max() < 1e3 for p in rounds)


def test_a_rejected_noisy_update_is_still_charged(tmp_path):
    def spoil(message, reply):
        bad = ArrayRecord({"model": Array(np.full(66, np.nan))})
        return Message(RecordDict({**reply.content, "arrays": bad}), reply_to=message)

    plan = plan_of(FEDAVG, rounds=1, privacy=NOISY)
    server = Server(plan, grid_of(plan, tmp_path, in_round(BAD, 1, spoil)), RUN)
    *_, last = server.train()
    assert [r.agent for r in last.rejected] == [BAD]
    assert releases(server.notes) == dict.fromkeys(range(AGENTS), 1)
    assert server.notes["ledger"]["rounds"] == [[AGENTS, AGENTS, AGENTS - 1, 1]]


def budget(updates, noise=NOISY.noise):
    return server_epsilon(noise, updates, NOISY.delta) * 1.0001


def test_a_site_uses_the_larger_of_its_own_count_and_the_servers(tmp_path):
    private = replace(NOISY, epsilon_server=budget(2))
    plan = plan_of(FEDAVG, rounds=2, privacy=private)
    server = Server(plan, grid_of(plan, tmp_path), RUN)
    *_, last = server.train()
    longer = replace(plan, rounds=3)
    forgetful = Server(longer, grid_of(longer, tmp_path), RUN)
    with pytest.raises(TrainingError, match="another noisy update after 2 would bring"):
        list(forgetful.train(last))
    for file in tmp_path.glob("*/agent-*"):
        file.unlink()
    with pytest.raises(TrainingError, match="another noisy update after 2 would bring"):
        list(Server(longer, grid_of(longer, tmp_path), RUN, server.notes).train(last))
    assert not list(tmp_path.glob("*/agent-*"))


def test_a_site_with_its_own_limit_is_named_and_the_run_continues_without_it():
    def limit(grid):
        grid.contexts[grid.node_of(BAD)].node_config["epsilon"] = budget(1)

    rounds, _, _ = federate(plan_of(FEDAVG, privacy=NOISY), DATA, prepare=limit)
    assert [[r.agent for r in p.rejected] for p in rounds] == [[], [], [BAD], [BAD]]
    assert "after 1 would bring this site's epsilon" in rounds[2].rejected[0].reason
    rules = Rules(min_updates=AGENTS, attempts=1)
    with pytest.raises(TrainingError, match="this site's epsilon against the server"):
        federate(plan_of(FEDAVG, privacy=NOISY, rules=rules), DATA, prepare=limit)


@pytest.mark.parametrize(("noise", "says"), [(3.0, "after 3"), (1.5, "after 1 ")])
def test_a_sites_own_limit_covers_all_runs(noise, says, tmp_path):
    def rounds_of(plan, run):
        grid = grid_of(plan, tmp_path)
        for context in grid.contexts.values():
            context.node_config["epsilon"] = budget(3)
        return list(Server(plan, grid, run).train())

    rounds_of(plan_of(FEDAVG, rounds=3, privacy=NOISY), RUN)
    other = plan_of(FEDAVG, rounds=1, privacy=replace(NOISY, noise=noise))
    with pytest.raises(TrainingError, match=f"another noisy update {says}"):
        rounds_of(other, RUN[::-1])


def test_a_site_with_a_limit_that_can_not_count_another_run_sends_nothing(tmp_path, caplog):
    plan, damaged = plan_of(FEDAVG, rounds=1, privacy=NOISY), tmp_path / RUN / f"agent-{BAD}"
    list(Server(plan, grid_of(plan, tmp_path), RUN).train())
    lose(damaged, "damaged")(None, None)
    grid = grid_of(plan, tmp_path)
    for context in grid.contexts.values():
        context.node_config["epsilon"] = budget(3)
    *_, last = Server(plan, grid, RUN[::-1]).train()
    (left_out,) = last.rejected
    assert left_out.agent == BAD and "its release count of another run is lost" in left_out.reason
    assert f"{damaged} is damaged" in caplog.text and str(damaged) not in left_out.reason


@pytest.mark.parametrize(("limit", "privacy"), [(1.0, None), (0, NOISY), ("1", NOISY)])
def test_a_site_with_a_limit_refuses_runs_without_a_bound(limit, privacy):
    def prepare(grid):
        grid.contexts[grid.node_of(BAD)].node_config["epsilon"] = limit

    rounds, _, _ = federate(plan_of(FEDAVG, rounds=1, privacy=privacy), DATA, prepare=prepare)
    (left_out,) = rounds[1].rejected
    assert left_out.agent == BAD and "epsilon" in left_out.reason


@pytest.mark.parametrize("scores", [False, True])
def test_a_site_sends_no_scores_unless_configured(scores, tmp_path):
    plan = plan_of(FEDAVG, rounds=1, privacy=replace(NOISY, scores=scores))
    grid = grid_of(plan, tmp_path)
    server = Server(plan, grid, RUN)
    *_, last = server.train()
    assert len(server.scoring.evaluate(last).scores) == AGENTS * scores
    assert (("evaluate", 0) in grid.requested) == scores
    curious = Server(replace(plan, privacy=replace(NOISY, scores=True)), grid, RUN)
    list(curious.train(last))
    missing = {error.reason for error in curious.scoring.evaluate(last).missing}
    refused = "it failed: this site sends no scores: privacy.scores is false"
    assert missing == (set() if scores else {refused})


@dataclass(frozen=True)
class Telling(Scaffold):
    """Sends more than it receives, without agent states."""

    receives = ("model",)

    def agent_init(self, objective, received):
        return {}


@pytest.mark.parametrize(
    ("algorithm", "rules", "what"),
    [
        (replace(FEDAVG, aggregation=Mean("samples")), Rules(), "uniform mean"),
        (replace(FEDAVG, aggregation=Median()), Rules(), "uniform mean"),
        (FEDAVG, Rules(max_update_norm=3.0), "max_update_norm"),
        (Scaffold(), Rules(), "agent states"),
        (Telling(), Rules(), "sends vectors it does not receive"),
    ],
)
def test_what_epsilon_does_not_hold_for_is_refused(algorithm, rules, what):
    with pytest.raises(InputError, match=f"epsilon does not hold with .*{what}"):
        plan_of(algorithm, rules=rules, privacy=NOISY)
    plan_of(algorithm, rules=rules)


def test_noisy_running_statistics_are_refused():
    """Noise would make variances negative, and their changes would use up the clipping norm."""
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    plan = replace(plan_of(FEDAVG), objective=Objective(net, running_stats="tracked"))
    with pytest.raises(
        InputError, match=r"\"tracked\" can't be combined with \[privacy\].*GroupNorm"
    ):
        replace(plan, privacy=NOISY)
    replace(plan, privacy=NOISY, objective=Objective(net, running_stats="frozen"))
