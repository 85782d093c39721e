"""A site's number is bound to its key: lies about it harm nobody but the liar."""

import json

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from flower.app.in_memory import RUN, MemoryGrid, agents_data, federate, plan_of
from flower.app.test_faults import FEDAVG, is_training
from flower.app.test_parity import same
from nufed.errors import TrainingError
from nufed.flower.app.events import EventLog
from nufed.flower.app.server_app import Server
from nufed.flower.app.signatures import fingerprint, public_of
from nufed.flower.app.site_app import client_app
from nufed.flower.ops.keys import make_site_key
from nufed.flower.ops.registration import add_key, register_site, revoke_old_key, revoke_site
from nufed.server import Rules

AGENTS, VICTIM, LIAR = 4, 2, 3
DATA = agents_data(AGENTS)


@pytest.fixture
def keys(tmp_path):
    """A folder with a registry of four sites, called Ward 0 … Ward 3, and their keys."""
    for number in range(AGENTS):
        public = make_site_key(tmp_path / f"key-{number}")
        register_site(tmp_path, number, f"Ward {number}", public)
    return tmp_path


def key_of(keys, number):
    return fingerprint(public_of(keys / f"key-{number}"))


def grid_of(plan, keys, claims=None, tamper=lambda agent, message, reply: reply):
    """Sites that sign with their own keys and claim these numbers, by default their own."""
    site = client_app(lambda: plan, lambda config: DATA[config["partition-id"]])
    grid = MemoryGrid(site, (), keys, tamper)
    for number in range(AGENTS):
        add(grid, keys, number, (claims or {}).get(number, number))
    return grid


def add(grid, keys, number, claimed=None):
    claimed = number if claimed is None else claimed
    return grid.add(claimed, key=str(keys / f"key-{number}"))


def train(plan, grid, keys):
    server = Server(plan, grid, RUN, sites=keys / "sites.toml")
    rounds = list(server.train())
    return rounds, server.scoring.evaluate(rounds[-1])


def test_a_liar_removes_no_other_site_and_is_named_by_its_key(keys, caplog):
    plan = plan_of(FEDAVG)
    grid = grid_of(plan, keys, {LIAR: VICTIM})
    rounds, outcome = train(plan, grid, keys)
    assert all(p.dropped == (LIAR,) for p in rounds[1:])
    assert [s.agent for s in outcome.scores] == [0, 1, VICTIM]
    assert [s.name for s in outcome.scores] == ["Ward 0", "Ward 1", "Ward 2"]
    liar = f"site {LIAR} ('Ward {LIAR}', key {key_of(keys, LIAR)}) is excluded"
    assert f"{liar}: it claims the number {VICTIM}" in caplog.text
    assert not any(str(node) in caplog.text for node in grid.contexts)


def test_a_liar_does_not_end_a_run_with_a_tight_quorum(keys):
    plan = plan_of(FEDAVG, rules=Rules(min_updates=3))
    rounds, _ = train(plan, grid_of(plan, keys, {LIAR: VICTIM}), keys)
    assert rounds[-1].round == plan.rounds


def test_the_number_of_a_site_that_is_away_can_not_be_taken(keys):
    def leave_and_return(agent, message, reply):
        round = message.content["about"]["round"] if is_training(message) else 0
        if agent == 0 and round == 1:
            del grid.contexts[grid.node_of(VICTIM)]
            del grid.contexts[grid.node_of(LIAR)]
            liars.append(add(grid, keys, LIAR, VICTIM))
        if agent == 0 and round == 2:
            add(grid, keys, VICTIM)
        return reply

    liars, plan = [], plan_of(FEDAVG, rounds=4)
    grid = grid_of(plan, keys, tamper=leave_and_return)
    asked = []
    app = grid.app

    def record(message, context):
        asked.append((message.metadata.message_type, context.node_id))
        return app(message, context)

    grid.app = record
    rounds, _ = train(plan, grid, keys)
    assert [p.dropped for p in rounds] == [(), (), (VICTIM, LIAR), (LIAR,), (LIAR,)]
    assert ("query", liars[0]) in asked and ("train", liars[0]) not in asked


def test_without_a_registry_a_liar_takes_a_number_as_signatures_do_not_count(keys):
    plan = plan_of(FEDAVG)
    rounds, _, _ = federate(plan, DATA, prepare=lambda grid: grid.add(VICTIM))
    assert all(p.dropped == (VICTIM,) for p in rounds[1:])


def forged(change):
    """Replies of the victim's node that somebody without its key has changed."""

    def tamper(agent, message, reply):
        if agent != VICTIM or not is_training(message):
            return reply
        return Message(change(RecordDict(dict(reply.content))), reply_to=message)

    return tamper


def multiplied(content):
    arrays = content["arrays"]
    vectors = {name: Array(array.numpy() * 1e6) for name, array in arrays.items()}
    content["arrays"] = ArrayRecord(vectors)
    return content


def without_signature(content):
    del content["signature"]
    return content


def other_count(content):
    content["about"] = ConfigRecord({**content["about"], "samples": 1})
    return content


def other_bytes(content):
    content["signature"] = ConfigRecord({**content["signature"], "signature": b"\0" * 100})
    return content


def other_types(content):
    content["signature"] = ConfigRecord({"key": 1, "signature": ["a"]})
    return content


def other_array(content):
    content["arrays"]["model"].shape = (None, b"bytes", {1})
    return content


FORGED = {
    other_array: "its reply can't be read (TypeError)",
    multiplied: "its signature is not one of the key",
    other_count: "its signature is not one of the key",
    other_bytes: "its signature is not one of the key",
    other_types: "its signature is not a key's fingerprint and bytes",
    without_signature: "its reply is not signed with a registered key",
}


@pytest.mark.parametrize("change", FORGED, ids=lambda change: change.__name__)
def test_a_reply_that_the_sites_key_did_not_sign_is_rejected_and_the_site_named(keys, change):
    plan = plan_of(FEDAVG, rounds=1)
    rounds, _ = train(plan, grid_of(plan, keys, tamper=forged(change)), keys)
    ((agent, reason),) = [(r.agent, r.reason) for r in rounds[1].rejected]
    assert agent == VICTIM and FORGED[change] in reason


def test_a_signature_is_valid_for_one_reply_to_one_request(keys):
    """The liar relays the victim's reply of the same round; the victim replays its first one."""
    own = {}

    def replay(agent, message, reply):
        if not is_training(message):
            return reply
        round = message.content["about"]["round"]
        if agent == VICTIM:
            own.setdefault("first", reply.content)
            own[round] = reply.content
            return Message(own["first"], reply_to=message) if round == 2 else reply
        return Message(own[round], reply_to=message) if agent == LIAR else reply

    plan = plan_of(FEDAVG, rounds=2)
    rounds, _ = train(plan, grid_of(plan, keys, tamper=replay), keys)
    named = [[(r.agent, r.reason) for r in p.rejected] for p in rounds[1:]]
    assert [[agent for agent, _ in each] for each in named] == [[LIAR], [VICTIM, LIAR]]
    assert all("its signature is not one of the key" in why for each in named for _, why in each)


def test_a_site_that_does_not_sign_is_excluded_and_named_by_the_key_it_was_admitted_with(
    keys, caplog, monkeypatch
):
    plan = plan_of(FEDAVG)
    grid = grid_of(plan, keys)
    node, key = grid.node_of(VICTIM), key_of(keys, VICTIM)
    grid.contexts[node].node_config.pop("key")
    monkeypatch.setenv("FLWR_HOME", str(keys))  # as `nufed federate server` writes it
    (keys / "nodes.json").write_text(json.dumps({str(node): key}))
    rounds, _ = train(plan, grid, keys)
    assert all(p.dropped == (VICTIM,) for p in rounds[1:])
    reason = "its reply is not signed with a registered key"
    assert f"site 2 ('Ward 2', key {key}) is excluded: {reason}" in caplog.text


def test_the_status_shows_a_site_that_has_not_approved_the_app_and_one_that_has_not_answered(
    keys, monkeypatch
):
    silent = 1

    def refuse(agent, message, reply):
        if message.metadata.message_type == "query" and agent == VICTIM:
            text = "<class 'nufed.errors.InputError'>:<'has not approved this app (digest ab)'>"
            return Message(Error(ErrorCode.INVALID_FAB, text), reply_to=message)
        return None if agent == silent else reply

    plan = plan_of(FEDAVG, rounds=1)
    grid = grid_of(plan, keys, tamper=refuse)
    nodes = {str(grid.node_of(number)): key_of(keys, number) for number in (silent, VICTIM)}
    monkeypatch.setenv("FLWR_HOME", str(keys))
    (keys / "nodes.json").write_text(json.dumps(nodes))
    log = EventLog(plan)
    list(Server(plan, grid, RUN, sites=keys / "sites.toml", events=log).train())
    sites = log.status().sites
    assert [site.name for site in sites] == [f"Ward {number}" for number in range(AGENTS)]
    assert all(site.connected and site.last_seen for site in sites)
    assert [site.joined for site in sites] == [True, False, False, True]
    assert [site.excluded for site in sites] == [
        *(None, None),
        "it has not approved this app (digest ab)",
        None,
    ]


def test_a_revoked_site_takes_no_part_from_the_next_round_on(keys, caplog):
    def revoke(agent, message, reply):
        if agent == 0 and is_training(message) and message.content["about"]["round"] == 1:
            revoke_site(keys, "Ward 2")
        return reply

    plan = plan_of(FEDAVG)
    grid = grid_of(plan, keys, tamper=revoke)
    key = key_of(keys, VICTIM)
    rounds, _ = train(plan, grid, keys)
    # its reply of round 1 was still to come
    assert [(r.agent, r.reason) for r in rounds[1].rejected] == [
        (VICTIM, f"its key {key} is revoked")
    ]
    assert all(p.dropped == (VICTIM,) for p in rounds[2:])
    assert f"the site with key {key} is excluded: its key {key} is revoked" in caplog.text


def test_a_key_is_rotated_without_a_gap(keys):
    events = []

    def rotate(agent, message, reply):
        round = message.content["about"]["round"] if is_training(message) else 0
        if agent == VICTIM and round and round not in events:
            events.append(round)
            if round == 1:
                add_key(keys, "2", make_site_key(keys / "new"))
                nodes.append(grid.node_of(VICTIM))
            if round == 2:
                nodes.append(grid.add(VICTIM, key=str(keys / "new")))
            if round == 3:
                revoke_old_key(keys, "2")
            if round == 4:
                del grid.contexts[nodes[0]]
        return reply

    nodes, plan = [], plan_of(FEDAVG, rounds=6)
    grid = grid_of(plan, keys, tamper=rotate)
    trained = []
    app = grid.app

    def record(message, context):
        if is_training(message) and context.node_config["partition-id"] == VICTIM:
            trained.append(context.node_id)
        return app(message, context)

    grid.app = record
    rounds, outcome = train(plan, grid, keys)
    assert not any(p.dropped or p.rejected for p in rounds) and len(outcome.scores) == AGENTS
    assert trained == [nodes[0]] * 2 + [nodes[1]] * 4


def test_the_audit_log_names_numbers_names_and_keys(keys):
    plan = plan_of(FEDAVG, rounds=1, rules=Rules(min_updates=4))
    grid, events = grid_of(plan, keys, {LIAR: VICTIM}), []
    server = Server(
        *(plan, grid, RUN),
        sites=keys / "sites.toml",
        events=EventLog(plan, audit=lambda event, **fields: events.append((event, fields))),
    )
    with pytest.raises(TrainingError):
        list(server.train())
    who = f"site {LIAR} ('Ward {LIAR}', key {key_of(keys, LIAR)})"
    reason = f"it claims the number {VICTIM}, which is not its own"
    assert ("excluded", {"who": who, "reason": reason}) in events
    assert [fields for event, fields in events if event == "joined"] == [
        {"site": number, "name": f"Ward {number}", "key": key_of(keys, number)}
        for number in (0, 1, VICTIM)
    ]


def test_updates_left_out_without_a_quorum_are_in_the_audit_log(keys):
    plan = plan_of(FEDAVG, rounds=1, rules=Rules(min_updates=4, attempts=1))
    grid, events = grid_of(plan, keys, tamper=forged(without_signature)), []
    server = Server(
        *(plan, grid, RUN),
        sites=keys / "sites.toml",
        events=EventLog(plan, audit=lambda event, **fields: events.append((event, fields))),
    )
    with pytest.raises(TrainingError):
        list(server.train())
    ((_, left),) = [each for each in events if each[0] == "left out"]
    assert left["round"] == 1 and left["sites"].keys() == {str(VICTIM)}
    assert "aggregated" not in {event for event, _ in events}


def test_a_registry_that_becomes_invalid_is_named_and_the_last_one_stays(keys, caplog):
    def damage(agent, message, reply):
        if is_training(message):
            (keys / "sites.toml").write_text("[[site]]\nnumber = -1\n")
            (keys / "sites.toml").chmod(0o600)
        return reply

    plan = plan_of(FEDAVG)
    rounds, _ = train(plan, grid_of(plan, keys, tamper=damage), keys)
    assert not any(p.dropped or p.rejected for p in rounds)
    assert "sites.toml is invalid: site.0.number" in caplog.text


def test_signatures_change_no_bit(keys):
    plan = plan_of(FEDAVG)
    signed, _ = train(plan, grid_of(plan, keys), keys)
    plain, _, _ = federate(plan, DATA)
    assert all(same(a.server, b.server) for a, b in zip(signed, plain, strict=True))
