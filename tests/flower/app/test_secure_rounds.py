"""Federations with secure aggregation: the real server and ClientApps, over an in-memory Grid."""

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from flower.app.in_memory import (
    RUN,
    MemoryGrid,
    agents_data,
    federate,
    plan_of,
)
from flower.app.test_apps import TEXT, app_of
from nufed.algorithms import FedDBE, FedNova, FedProto, GMeta, Scaffold
from nufed.algorithms.aggregation import Mean, Median
from nufed.algorithms.compression import Int8
from nufed.algorithms.scalefl import ScaleFL
from nufed.errors import InputError, TrainingError
from nufed.flower.app import site_app as site_training
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.app.payload import ARRAYS
from nufed.flower.app.privacy import Privacy
from nufed.flower.app.registry import SiteKeys
from nufed.flower.app.server_app import Server
from nufed.flower.app.site_app import client_app
from nufed.flower.ops.keys import make_site_key
from nufed.flower.secure_sum import site as secure_site
from nufed.flower.secure_sum.messages import SECURE, WORDS, Survivors, secure_record
from nufed.flower.secure_sum.site import SecureRecord, _load, _save
from nufed.flower.secure_sum.terms import SumTerms
from nufed.lab.files import write_sealed
from nufed.lab.runs.federation_records import read_activity, read_status, read_traffic
from nufed.server import Progress, Rules
from support import json_lines

SETTINGS = {"meta_lr": 0.2, "local_steps": 2, "batch_size": 6}
GMETA = GMeta(1, adapt_lr=0.05, **SETTINGS)
PHASES = [f"train.{phase}" for phase in ("advertise", "share", "masked", "confirm", "unmask")]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Private key files of six sites."""
    folder = tmp_path_factory.mktemp("keys")
    for site in range(6):
        make_site_key(folder / f"{site}")
    return folder


def public(keys, agents):
    return SiteKeys(tuple((keys / f"{i}.pub").read_text().strip() for i in range(agents)))


def same(agent, message, reply):
    return reply


def secure_server(plan, keys, folder, tamper=same, run=RUN):
    """A server and its grid, of sites that keep their files in ``folder``."""
    data = agents_data(plan.agents)
    app = client_app(lambda: plan, lambda config: data[config["partition-id"]])
    grid = MemoryGrid(app, [], folder, tamper)
    for number in range(plan.agents):
        grid.add(number, key=str(keys / f"{number}"))
    return Server(plan, grid, run), grid


def models(rounds):
    return [progress.server for progress in rounds]


def equal(one, other):
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(one, other, strict=True)
        for name in a.keys() | b.keys()
    )


SENT = [GMETA, *(cls(**SETTINGS) for cls in (Scaffold, FedNova, FedDBE, FedProto))]


@pytest.mark.parametrize("algorithm", SENT, ids=lambda algorithm: type(algorithm).__name__)
def test_a_run_has_the_bits_of_one_without_secure_aggregation(algorithm, keys, tmp_path):
    plan = plan_of(algorithm, agents=4, rounds=2)
    plain, _, _ = federate(plan, agents_data(4))
    secure = replace(plan, site_keys=public(keys, 4))
    server, grid = secure_server(secure, keys, tmp_path)
    rounds = list(server.train())
    assert equal(models(rounds), models(plain))
    assert [p.cost for p in rounds] == [p.cost for p in plain]
    assert not any(p.rejected or p.dropped for p in rounds)
    kinds = [kind for kind, agent in grid.requested if agent == 0 and kind.startswith("train")]
    assert kinds == PHASES * 2


def without(gone, phase):
    """Loses the replies of these sites in a phase."""

    def tamper(agent, message, reply):
        lost = message.metadata.message_type == PHASES[phase] and agent in gone
        return None if lost else reply

    return tamper


def test_a_site_with_a_rotated_key_is_named_with_what_to_do(keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    server, grid = secure_server(plan, keys, tmp_path)
    grid.contexts[grid.node_of(2)].node_config["key"] = str(keys / "4")
    *_, after = server.train()
    ((agent, reason),) = [(error.agent, error.reason) for error in after.rejected]
    assert agent == 2 and after.taken == (0, 1, 3)
    assert "this site's key is not federation.site_keys[2]: start the site with that key" in reason
    assert "have every site approve the app again, and start a new run" in reason


@pytest.mark.parametrize("phase", range(5))
def test_sites_that_drop_out_in_a_phase_are_left_out_and_named(phase, keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    server, _ = secure_server(plan, keys, tmp_path, without({2}, phase))
    *_, after = server.train()
    plain, _, _ = federate(
        replace(plan, site_keys=None),
        agents_data(4),
        lambda agent, message, reply: (
            None if agent == 2 and phase < 3 and message.metadata.message_type == "train" else reply
        ),
    )
    assert equal([after.server], [plain[-1].server])
    assert [error.agent for error in after.rejected] == ([2] if phase < 3 else [])


def test_with_too_many_dropouts_the_round_is_retried_and_the_run_stops(keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4), rules=Rules(attempts=2))
    server, grid = secure_server(plan, keys, tmp_path, without({1, 2}, 2))
    with pytest.raises(TrainingError, match="site 1, round 1: it answered too late"):
        list(server.train())
    assert [k for k, agent in grid.requested if agent == 0 and "train" in k] == PHASES[:3] * 2


@pytest.mark.parametrize("phase", range(5))
def test_a_server_killed_between_phases_restarts_the_round_with_fresh_masks(phase, keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    seen = {}

    def kill(agent, message, reply):
        if message.metadata.message_type == "train.masked":
            seen.setdefault(agent, []).append(reply.content[ARRAYS][WORDS].data)
        if message.metadata.message_type == PHASES[phase] and agent == 3:
            raise BaseException("killed")
        return reply

    server, _ = secure_server(plan, keys, tmp_path, kill)
    with pytest.raises(BaseException, match="killed"):
        list(server.train())

    def watch(agent, message, reply):
        if message.metadata.message_type == "train.masked":
            seen.setdefault(agent, []).append(reply.content[ARRAYS][WORDS].data)
        return reply

    server, _ = secure_server(plan, keys, tmp_path, watch)
    *_, after = server.train()
    plain, _, _ = federate(replace(plan, site_keys=None), agents_data(4))
    assert equal([after.server], [plain[-1].server])
    if phase >= 2:
        for first, second in (words[:: len(words) - 1] for words in seen.values()):
            assert first != second


def with_zero(plan, zero):
    """The start of a run whose model has one number that is 0.0 or -0.0."""
    server = plan.start()
    server["model"][0] = zero
    return Progress(0, server)


def refused_sum(plan, keys, folder, tamper, run=RUN, start=None):
    """The replies to ``unmask`` in a run that has no sum."""
    replies = []

    def record(agent, message, reply):
        if message.metadata.message_type == "train.unmask":
            replies.append(reply)
        return tamper(agent, message, reply)

    once = replace(plan, rules=Rules(attempts=1))
    with pytest.raises(TrainingError):
        list(secure_server(once, keys, folder, record, run)[0].train(start))
    return replies


@pytest.mark.parametrize(
    ("run", "zero"),
    [(RUN, 0.0), ("f" * 32, 0.0), (RUN, -0.0), ("f" * 32, 1.0)],
    ids=["resumed", "another run", "an equal model", "another model"],
)
def test_a_second_sum_of_a_round_over_other_sites_is_not_unmasked(run, zero, keys, tmp_path):
    """Else the difference of both sums would be one site's update; whatever the server sends."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    list(secure_server(plan, keys, tmp_path)[0].train(with_zero(plan, 0.0)))
    replies = refused_sum(plan, keys, tmp_path, without({2}, 2), run, with_zero(plan, zero))
    assert len(replies) == 3
    assert all("would reveal updates of few" in reply.error.reason for reply in replies)
    assert all("round 1 with seed 7 was summed over" in reply.error.reason for reply in replies)
    # over the same sites it is, and with another seed
    for again in (plan, replace(plan, seed=8)):
        *_, after = secure_server(again, keys, tmp_path, run=run)[0].train(with_zero(plan, zero))
        assert after.taken == (0, 1, 2, 3)


def test_a_rerun_without_a_site_says_that_its_sum_is_refused(keys, tmp_path):
    """Once, and not only that too few agents replied."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    list(secure_server(plan, keys, tmp_path)[0].train())
    again, grid = secure_server(plan, keys, tmp_path, run="f" * 32)
    del grid.contexts[grid.node_of(2)]
    with pytest.raises(TrainingError) as stopped:
        list(again.train())
    reason = str(stopped.value)
    assert reason.count("was summed over sites [0, 1, 2, 3] before") == 1
    assert "set `seeds` in the configuration to another number" in reason
    assert "site 1: the same; site 3: the same" in reason


def test_another_method_of_the_same_seed_is_summed_over_the_same_sites_only(keys, tmp_path):
    """A server that may choose methods could choose two whose updates are equal."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    list(secure_server(plan, keys, tmp_path)[0].train())
    other = replace(plan, algorithm=Scaffold(**SETTINGS))
    replies = refused_sum(other, keys, tmp_path, without({2}, 2), "f" * 32)
    assert len(replies) == 3
    assert all("would reveal updates of few" in reply.error.reason for reply in replies)
    *_, after = secure_server(other, keys, tmp_path, run="e" * 32)[0].train()
    assert after.taken == (0, 1, 2, 3)


def test_sites_are_the_same_if_their_keys_are(keys, tmp_path):
    """An app that gives a number to another site gets no second sum, nor does a new number."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    list(secure_server(plan, keys, tmp_path)[0].train())
    lines = public(keys, 6).lines
    other = replace(plan, site_keys=SiteKeys((*lines[:3], lines[4])), rules=Rules(attempts=1))
    server, grid = secure_server(other, keys, tmp_path, run="f" * 32)
    grid.contexts[grid.node_of(3)].node_config["key"] = str(keys / "4")
    with pytest.raises(TrainingError, match=r"over sites \[0, 1, 2, 3\] with other keys before"):
        list(server.train())
    for number in range(1, 4):  # as if site 0 were alone in its folder
        (tmp_path / f"secure-sums-{number}").unlink()
    moved = SiteKeys((lines[4], lines[0], *lines[1:3]))
    server, grid = secure_server(replace(other, site_keys=moved), keys, tmp_path, run="e" * 32)
    for number, key in enumerate((4, 0, 1, 2)):
        grid.contexts[grid.node_of(number)].node_config["key"] = str(keys / f"{key}")
    with pytest.raises(TrainingError, match="with other keys before, in this or another run"):
        list(server.train())


def test_a_site_takes_no_part_in_another_cohort_of_a_round_that_it_helped_to_sum(keys, tmp_path):
    plan = plan_of(GMETA, agents=6, rounds=1, site_keys=public(keys, 6), participation=2 / 3)
    *_, after = secure_server(plan, keys, tmp_path)[0].train()
    taken = set(after.taken)
    _, grid = secure_server(plan, keys, tmp_path, run="f" * 32)
    agent, other = min(taken), min(set(range(6)) - taken)
    terms = SumTerms("f" * 32, 1, "a" * 32, tuple(sorted({*taken, other} - {max(taken)})))
    with pytest.raises(TrainingError, match="would reveal updates of few"):
        send(grid, agent, "advertise", terms)


def send(grid, agent, action, value, **more):
    """A site's reply to one message."""
    node = grid.node_of(agent)
    content = RecordDict({SECURE: secure_record(value), **more})
    return grid.app(Message(content, node, f"train.{action}"), grid.contexts[node]).content


def test_an_attempt_is_begun_once(keys, tmp_path):
    """Also after others, in another process, and in a run that was begun before."""
    plan = plan_of(GMETA, agents=4, rounds=2, site_keys=public(keys, 4))
    ids = [letter * 32 for letter in "abc"]
    for attempt in ids:
        _, grid = secure_server(plan, keys, tmp_path)  # a site that was started again
        send(grid, 1, "advertise", SumTerms(RUN, 1, attempt, (0, 1, 2, 3)))
    for attempt, round in zip(ids, (1, 2, 2), strict=True):
        with pytest.raises(TrainingError, match="the id of this attempt was used before"):
            send(grid, 1, "advertise", SumTerms(RUN, round, attempt, (0, 1, 2, 3)))
    send(grid, 1, "advertise", SumTerms("f" * 32, 1, ids[0], (0, 1, 2, 3)))  # other keys and masks
    for round in (0, 3):
        with pytest.raises(TrainingError, match=f"is of round {round}, not of 1 … 2"):
            send(grid, 1, "advertise", SumTerms(RUN, round, "d" * 32, (0, 1, 2, 3)))


def test_the_list_of_attempts_is_bounded(keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=2, site_keys=public(keys, 4))
    _, grid = secure_server(plan, keys, tmp_path)
    send(grid, 1, "advertise", SumTerms(RUN, 1, "a" * 32, (0, 1, 2, 3)))
    file = tmp_path / RUN / "secure-agent-1"
    full = tuple(f"{number:032x}" for number in range(1020))
    _save(file, replace(_load(file, SecureRecord()), attempts=full))
    with pytest.raises(TrainingError, match="in 1020 attempts of this run, which is the most"):
        send(grid, 1, "advertise", SumTerms(RUN, 1, "b" * 32, (0, 1, 2, 3)))


def test_two_messages_at_the_same_time_get_one_answer(keys, tmp_path, monkeypatch):
    """A site that handles messages in several processes signs one list of survivors."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    with pytest.raises(TrainingError):  # phase 3 is done
        list(secure_server(plan, keys, tmp_path, without({0, 1, 2, 3}, 2))[0].train())
    _, grid = secure_server(replace(plan, deadline=60.0), keys, tmp_path)
    attempt = _load(tmp_path / RUN / "secure-agent-1", SecureRecord()).secrets.terms.attempt
    both, replies = threading.Barrier(2, timeout=0.3), []
    confirm = secure_site.confirm

    def slow(*arguments):
        with suppress(threading.BrokenBarrierError):
            both.wait()  # only if both messages are handled at the same time
        return confirm(*arguments)

    def ask(sites):
        try:
            replies.append(send(grid, 1, "confirm", Survivors(RUN, attempt, sites)))
        except TrainingError as error:
            replies.append(str(error))

    monkeypatch.setattr(secure_site, "confirm", slow)
    lists = ((0, 1, 2), (0, 1, 3))
    threads = [threading.Thread(target=ask, args=(sites,)) for sites in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(reply, RecordDict) for reply in replies) == 1
    assert any("phase 4 of this attempt was requested after phase 4" in str(r) for r in replies)


def test_sums_of_version_1_are_named_with_what_to_do(keys, tmp_path):
    """They do not say their rounds: no sum until the site's owner has decided."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    write_sealed(tmp_path / "secure-sums-2", {"sites": {"0" * 64: [0, 1, 2]}})
    server, _ = secure_server(plan, keys, tmp_path)
    with pytest.raises(TrainingError, match=r"secure-sums-2 in .* lists sums of version 1 .*again"):
        list(server.train())
    (tmp_path / "secure-sums-2").unlink()
    (tmp_path / RUN).mkdir(exist_ok=True)
    write_sealed(tmp_path / RUN / "secure-agent-1", {"secrets": None, "request": "0" * 64})
    *_, after = secure_server(plan, keys, tmp_path)[0].train()
    assert after.taken == (0, 1, 2, 3)


@pytest.mark.parametrize("protocol", [None, 3])
def test_another_version_of_the_protocol_is_named_by_both_sides(protocol, keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4), rules=Rules(attempts=1))

    def changed(content):
        record = content[SECURE]
        del record["protocol"]
        if protocol:
            record["protocol"] = protocol

    def tamper(agent, message, reply):
        if message.metadata.message_type == PHASES[0]:
            changed(reply.content)
        return reply

    sentence = f"has version {protocol or 1} of secure aggregation, not 2: install the same nufed"
    with pytest.raises(TrainingError, match=f"{sentence} .* approve the app again"):
        list(secure_server(plan, keys, tmp_path, tamper)[0].train())
    _, grid = secure_server(plan, keys, tmp_path)
    content = RecordDict({SECURE: secure_record(SumTerms(RUN, 1, "a" * 32, (0, 1, 2, 3)))})
    changed(content)
    node = grid.node_of(1)
    with pytest.raises(TrainingError, match=f"{sentence} .* approve the app again"):
        grid.app(Message(content, node, PHASES[0]), grid.contexts[node])


def test_a_phase_is_answered_once(keys, tmp_path):
    """A request that is sent again is refused, whoever sends it."""
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    server, grid = secure_server(plan, keys, tmp_path)
    pushed = []
    push = grid.push_messages
    grid.push_messages = lambda messages: pushed.extend(messages) or push(messages)
    list(server.train())
    node = grid.node_of(1)
    for kind in PHASES[1:]:
        (message,) = [
            m for m in pushed if m.metadata.message_type == kind and m.metadata.dst_node_id == node
        ]
        with pytest.raises(TrainingError, match=r"phase . of this attempt was requested after"):
            grid.app(Message(message.content, node, kind), grid.contexts[node])
    # the secrets themselves are gone
    record = _load(tmp_path / RUN / "secure-agent-1", SecureRecord())
    assert record.secrets.phase == 5 and not record.secrets.shares and not record.secrets.own


def test_a_site_sends_no_update_unmasked(keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    _, grid = secure_server(plan, keys, tmp_path)
    curious = Server(replace(plan, site_keys=None), grid, RUN)
    with pytest.raises(TrainingError, match="no update is sent unmasked"):
        list(curious.train())


def test_a_cohort_smaller_than_the_plans_is_refused(keys, tmp_path):
    plan = plan_of(GMETA, agents=6, rounds=1, site_keys=public(keys, 6))
    _, grid = secure_server(plan, keys, tmp_path)
    smaller = Server(replace(plan, participation=0.5), grid, RUN)
    with pytest.raises(TrainingError, match="over 3 sites, not over a cohort of 6"):
        list(smaller.train())


def test_a_site_without_its_registered_key_takes_no_part(keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    server, grid = secure_server(plan, keys, tmp_path)
    for wrong, reason in ((str(keys / "5"), "is not federation.site_keys"), (None, "--insecure")):
        for number in range(4):
            config = grid.contexts[grid.node_of(number)].node_config
            config["key"] = wrong or ""
        with pytest.raises(TrainingError, match=reason):
            list(server.train())


def test_an_update_beyond_the_bound_never_leaves_its_site(keys, tmp_path, monkeypatch):
    """The site refuses its own update; the others' mean is as without it."""
    of_round, honest, sites = site_training._of_round, type(GMETA).agent_update, []

    def noted(site, task):
        sites.append(site.agent)
        return of_round(site, task)

    def diverging(*of):
        result, factor = honest(*of), 1e7 if sites[-1] == 2 else 1.0
        return replace(result, vectors={n: v * factor for n, v in result.vectors.items()})

    monkeypatch.setattr(site_training, "_of_round", noted)
    monkeypatch.setattr(type(GMETA), "agent_update", diverging)
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    *_, after = secure_server(plan, keys, tmp_path)[0].train()
    plain, _, _ = federate(replace(plan, site_keys=None), agents_data(4))
    for progress in (after, plain[-1]):
        (error,) = progress.rejected
        assert error.agent == 2 and "the bound of this round: it diverges" in error.reason
    assert equal([after.server], [plain[-1].server])


def test_privacy_is_charged_for_sums(keys, tmp_path):
    """ε against the server is that of sums of 3 updates, at the server and at the sites."""
    private = Privacy(clip=0.5, noise=2.0, delta=1e-5)
    plan = plan_of(GMETA, agents=4, rounds=2, site_keys=public(keys, 4), privacy=private)
    server, _ = secure_server(plan, keys, tmp_path)
    rounds = list(server.train())
    assert all(torch.isfinite(progress.server["model"]).all() for progress in rounds)
    spent = server.account.spent()
    assert spent["server"] == server_epsilon(2.0 * 3**0.5, 2, 1e-5)
    assert spent["server"] < 0.65 * server_epsilon(2.0, 2, 1e-5)
    assert "sums of at least 3 updates" in server.account.summary()["holds_for"]["server"]
    alone = replace(plan, site_keys=None)
    assert (plan.privacy.summed, alone.privacy.summed) == (3, 1)
    # a site whose budget allows one sum, but not two, and no single update at all
    budget = server_epsilon(2.0 * 3**0.5, 1, 1e-5) * 1.01
    tight = replace(plan, privacy=replace(private, epsilon_server=budget))
    server, _ = secure_server(tight, keys, tmp_path / "tight")
    with pytest.raises(TrainingError, match="would bring this site's epsilon against the server"):
        list(server.train())
    assert budget < server_epsilon(2.0, 1, 1e-5)


def test_a_repeated_private_round_sends_the_same_noise_under_other_masks(keys, tmp_path):
    plan = plan_of(
        GMETA, agents=4, rounds=1, site_keys=public(keys, 4), privacy=Privacy(clip=0.5, noise=2.0)
    )
    one, two = (list(secure_server(plan, keys, tmp_path)[0].train())[-1] for _ in range(2))
    assert equal([one.server], [two.server])


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"algorithm": GMeta(aggregation=Median(), **SETTINGS)}, "other than the uniform mean"),
        ({"algorithm": GMeta(aggregation=Mean("samples"), **SETTINGS)}, "the uniform mean"),
        ({"algorithm": ScaleFL(**SETTINGS)}, "other than the uniform mean"),
        ({"rules": Rules(max_update_norm=5.0)}, "max_update_norm"),
        ({"rules": Rules(codec=Int8())}, "compression"),
        ({"participation": 0.5}, "cohorts of 2, below 3 sites"),
        ({"agents": 5}, "4 keys in federation.site_keys for 5 sites"),
    ],
)
def test_settings_that_need_single_updates_are_refused(more, reason, keys):
    settings = {"algorithm": GMETA, "agents": 4, "site_keys": public(keys, 4), **more}
    with pytest.raises(InputError, match=f"secure_aggregation .*can't be combined with .*{reason}"):
        plan_of(settings.pop("algorithm"), **settings)


def secure_app(keys, folder, more="", agents=4):
    """An app with secure aggregation, over all its sites."""
    text = TEXT.replace("participation = 0.75", f"participation = 1.0\n{more}")
    secure = f"secure_aggregation = true\nsite_keys = {list(public(keys, agents).lines)}\n"
    return app_of(folder, text.replace("unseen_agents = 1", "unseen_agents = 0") + secure)


def test_the_default_norm_bound_is_off_and_another_is_refused(keys, tmp_path):
    assert secure_app(keys, tmp_path).plan().rules.max_update_norm is None
    assert secure_app(keys, tmp_path, 'max_update_norm = "off"').plan().site_keys
    with pytest.raises(InputError, match="can't be combined with max_update_norm; change that"):
        secure_app(keys, tmp_path, "max_update_norm = 100").plan()


@pytest.mark.usefixtures("no_report")
def test_several_methods_are_summed_over_the_same_sites_in_a_round(keys, tmp_path):
    """A site that the sum of a round lacks is not asked for that of another method."""
    again = '[methods.again]\nalgorithm = "gmeta"\nadapt_lr = 0.2\n'
    text = "[methods.gmeta]\n[methods.scaffold]\n" + again
    app = secure_app(keys, tmp_path)
    app.config.write_text(app.config.read_text() + text)

    def lose(agent, message, reply):
        first = message.content.get("method", {}).get("name") == "gmeta"
        second = message.content.get("about", {}).get("round") == 2
        return without({2}, 2)(agent, message, reply) if first and second else reply

    def run(tamper, name):
        grid = MemoryGrid(app.site, (), tmp_path / "sites", tamper)
        for number in range(4):
            grid.add(number, key=str(keys / f"{number}"))
        app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / name)}))
        return grid

    run(lose, "run")
    for method in ("gmeta", "scaffold", "again"):
        lines = json_lines(tmp_path / "run" / "methods" / method / "seed-0" / "metrics.jsonl")
        taken = [line.get("taken", line["cohort"]) for line in lines[1:]]
        assert taken == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    # the sites hold to it, whatever the server asks for
    with pytest.raises(TrainingError, match=r"round 2 .* was summed over sites \[0, 1, 3\] before"):
        run(same, "other")


@pytest.mark.usefixtures("no_report")
def test_an_app_records_the_messages_of_every_phase(keys, tmp_path):
    app = secure_app(keys, tmp_path)
    grid = MemoryGrid(app.site, (), tmp_path / "sites", without({2}, 2))
    for number in range(4):
        grid.add(number, key=str(keys / f"{number}"))
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))
    lines = read_traffic(tmp_path / "run")
    of_site = [line.phase for line in lines if (line.round, line.agent) == (1, 0)]
    assert of_site == ["secure sum", "secure sum", "train", "secure sum", "secure sum"]
    status = read_status(tmp_path / "run")
    assert status.state == "finished" and status.left_out == {"late": 3}
    asked = [e for e in json_lines(tmp_path / "run" / "audit.jsonl") if e["event"] == "asked"]
    with_vectors = {e["what"]: "vectors_sha256" in e for e in asked if "train" in e["what"]}
    assert with_vectors == {phase: phase == "train.masked" for phase in PHASES}


def test_replies_of_every_phase_are_within_the_limit_of_the_plan(keys, tmp_path):
    plan = plan_of(GMETA, agents=6, rounds=1, site_keys=public(keys, 6))
    limit, alone = plan.reply_limit, replace(plan, site_keys=None).reply_limit
    found = {}

    def weigh(agent, message, reply):
        arrays = reply.content.array_records.values()
        found[message.metadata.message_type] = (
            sum(record.count_bytes() for record in arrays),
            sum(record.count_bytes() for record in reply.content.config_records.values()),
        )
        return reply

    list(secure_server(plan, keys, tmp_path, weigh)[0].train())
    assert all(
        arrays <= limit.arrays and records < limit.records for arrays, records in found.values()
    )
    # float64 has 16 bytes per number; shares grow with the number of sites
    assert found["train.masked"][0] > 16 * plan.objective.size
    assert limit.arrays - alone.arrays == 8 * plan.objective.size
    assert found["train.share"][1] < limit.records - alone.records


def test_a_site_records_its_training_and_the_epsilon_of_sums(keys, tmp_path, caplog):
    caplog.set_level("INFO", "nufed")
    private = Privacy(clip=0.5, noise=2.0, delta=1e-5)
    plan = plan_of(GMETA, agents=4, rounds=2, site_keys=public(keys, 4), privacy=private)
    list(secure_server(plan, keys, tmp_path)[0].train())
    assert sum("round 2 of 2: trained on" in line for line in caplog.messages) == 4
    assert read_activity(tmp_path, 0).epsilon == server_epsilon(2.0 * 3**0.5, 2, 1e-5)


def test_site_keys_are_checked():
    with pytest.raises(InputError, match=r"site_keys\[0\] = 'no key': must be the line of a .pub"):
        SiteKeys(("no key",))


def test_files_of_secrets_are_private(keys, tmp_path):
    plan = plan_of(GMETA, agents=4, rounds=1, site_keys=public(keys, 4))
    list(secure_server(plan, keys, tmp_path / "sites")[0].train())
    assert Path(tmp_path / "sites" / RUN).stat().st_mode & 0o077 == 0
