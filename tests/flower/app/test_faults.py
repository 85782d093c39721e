"""Faulty sites are named and rejected, and the run continues."""

import io
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower.app.in_memory import (
    RUN,
    TEST,
    MemoryGrid,
    agents_data,
    federate,
    federation_of,
    plan_of,
)
from flower.app.test_parity import same
from nufed import FirstOrder, GMeta, InputError, Objective
from nufed.algorithms import Scaffold
from nufed.data import site_split
from nufed.errors import TrainingError
from nufed.evaluate import Measure
from nufed.flower.app.registry import Authentication
from nufed.flower.app.server_app import Server
from nufed.flower.app.site import load_record
from nufed.flower.app.site_app import client_app
from nufed.server import TOO_LATE, Rules
from nufed.simulation import DirectEngine, train
from processes import PATIENCE
from support import mlp

FEDAVG = GMeta(
    adapt_steps=0, adapt_lr=0.2, meta_lr=0.3, local_steps=1, batch_size=6, curvature=FirstOrder()
)
BAD, BAD_ROUND, AGENTS = 2, 2, 4
DATA = agents_data(AGENTS)
SIZE = 5 * 7 + 7 + 7 * 3 + 3


def sent(values=None, **about):
    """The bad agent's reply in the bad round, with some fields changed."""

    def change(message, reply):
        arrays = reply.content["arrays"] if values is None else ArrayRecord(values)
        said = ConfigRecord({**reply.content["about"], **about})
        return Message(RecordDict({"arrays": arrays, "about": said}), reply_to=message)

    return change


def raw(dtype="float64", shape=(SIZE,), stype="numpy.ndarray", data=None):
    if data is None:
        file = io.BytesIO()
        np.save(file, np.zeros(SIZE))
        data = file.getvalue()
    return {"model": Array(dtype=dtype, shape=shape, stype=stype, data=data)}


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def empty(message, reply):
    return Message(RecordDict(), reply_to=message)


def unreadable(message, reply):
    raise ValueError("not an array")


FAULTS = {
    "not a number": (sent({"model": Array(np.full(SIZE, np.nan))}), "'model' is not finite"),
    "another shape": (sent({"model": Array(np.zeros(3))}), "has shape (3,) instead of (66,)"),
    "a shape that lies": (sent(raw(shape=(10**12,))), "has shape (1000000000000,) instead"),
    "another dtype": (sent({"model": Array(np.zeros(SIZE, "f4"))}), "dtype 'float32' instead"),
    "a pickle": (sent(raw(stype="pickle")), "is stored as 'pickle'; must be 'numpy.ndarray'"),
    "too few bytes": (sent(raw(data=b"")), "has 0 bytes, which does not fit its shape"),
    "other bytes": (sent(raw(data=npy(np.zeros(SIZE, "i8")))), "has a header that does not match"),
    "extra vectors": (sent({**raw(), "more": Array(np.zeros(2))}), "it sent ['model', 'more']"),
    "no vectors": (sent({}), "it sent [] instead of ['model']"),
    "another round": (sent(round=1), "the update is of round 1"),
    "another agent": (sent(agent=0), "it claims to be site 0"),
    "absurd samples": (sent(samples=10**12), "its number of samples is 1000000000000"),
    "samples as text": (sent(samples="many"), "its number of samples is a str"),
    "unexpected metadata": (sent(secret=1), "'secret'"),
    "nothing": (empty, "it sent the records []"),
    "unreadable": (unreadable, "its reply can't be read (ValueError)"),
    "no answer": (lambda message, reply: None, "it answered too late"),
}


SCAFFOLD = Scaffold(meta_lr=0.1, local_steps=2, batch_size=6)


def is_training(message):
    return message.metadata.message_type == "train"


def in_bad_round(change):
    def tamper(agent, message, reply):
        about = message.content.get("about", {})
        bad = agent == BAD and is_training(message)
        return change(message, reply) if bad and about["round"] == BAD_ROUND else reply

    return tamper


@dataclass(frozen=True)
class Breaking(DirectEngine):
    """The simulator's engine with a bad update of the same agent in the same round."""

    def agent_updates(self, algorithm, received, states, context):
        results = super().agent_updates(algorithm, received, states, context)
        if context.round == BAD_ROUND and BAD in results:
            bad = {name: v * float("nan") for name, v in results[BAD].vectors.items()}
            results[BAD] = replace(results[BAD], vectors=bad)
        return results


def broken_simulation(plan):
    engine = Breaking(plan.objective, federation_of(DATA, plan.seed, 0), plan.seed)
    settings = {"participation": plan.participation, "rules": plan.rules}
    w = plan.objective.initial()
    return list(train(plan.algorithm, engine, w, rounds=plan.rounds, **settings))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_is_named_and_leaves_no_trace(fault):
    change, reason = FAULTS[fault]
    plan = plan_of(FEDAVG)
    rounds, outcome, _ = federate(plan, DATA, in_bad_round(change))
    assert [(p.round, r.agent, r.round) for p in rounds for r in p.rejected] == [
        (BAD_ROUND, BAD, BAD_ROUND)
    ]
    assert reason in rounds[BAD_ROUND].rejected[0].reason
    assert same(rounds[-1].server, broken_simulation(plan)[-1].server)
    assert len(outcome.scores) == AGENTS


@pytest.mark.parametrize("rules", [Rules(), Rules(min_updates=3, attempts=9)])
def test_a_site_continues_from_the_state_of_its_last_accepted_update(rules):
    plan = plan_of(SCAFFOLD, rounds=5, participation=0.75, rules=rules)
    right = broken_simulation(plan)
    rounds, _, _ = federate(plan, DATA, in_bad_round(FAULTS["no answer"][0]))
    assert [p.attempts for p in rounds] == [p.attempts for p in right]
    assert BAD in rounds[BAD_ROUND - 1].cohort
    assert {r.agent for r in rounds[BAD_ROUND].rejected} == {BAD}
    assert any(BAD in p.cohort for p in rounds[BAD_ROUND + 1 :])
    assert all(same(a.server, b.server) for a, b in zip(rounds, right, strict=True))


FAULT_OF = {0: "rejected", 1: "late", 3: "lost"}  # at an agent's second request


@pytest.mark.parametrize(
    ("participation", "rules"), [(1.0, Rules()), (0.5, Rules(min_updates=2, attempts=20))]
)
def test_c_is_the_mean_of_the_c_i_in_the_sites_files(tmp_path, participation, rules):
    """With updates that are late or rejected, and a request that does not reach its site."""
    plan = plan_of(SCAFFOLD, rounds=8, participation=participation, rules=rules)
    site = client_app(lambda: plan, lambda config: DATA[config["partition-id"]])
    requests, faults = Counter(), []

    def lose(message, context):
        agent, training = context.node_config["partition-id"], is_training(message)
        requests[agent] += training
        if training and requests[agent] == 2 and agent in FAULT_OF:
            faults.append(FAULT_OF[agent])
            if FAULT_OF[agent] == "lost":
                raise ConnectionError
        return site(message, context)

    def tamper(agent, message, reply):
        fault = FAULT_OF.get(agent) if is_training(message) and requests[agent] == 2 else None
        if fault == "rejected":
            return FAULTS["not a number"][0](message, reply)
        return None if fault == "late" else reply

    server = Server(plan, MemoryGrid(lose, range(AGENTS), tmp_path, tamper), RUN)
    for progress in server.train():
        c, taken = progress.server["control"], server.notes["taken"]
        like, total = {"control": c}, torch.zeros_like(c)
        for agent in range(AGENTS):  # those never accepted have c_i = 0
            if str(agent) in taken:
                record = load_record(tmp_path / RUN / f"agent-{agent}", like)
                total += record.state(taken[str(agent)])["control"]
        assert float((c - total / AGENTS).norm()) <= 1e-12 * max(1.0, float(c.norm()))
    assert c.norm() > 0.01 and len(taken) == AGENTS
    assert sorted(faults) == sorted(FAULT_OF.values())


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_site_that_lost_its_state_is_named_and_reset(how, caplog):
    def forget(agent, message, reply):
        about = message.content.get("about", {})
        if agent == BAD and about.get("round") == 1:
            (file,) = Path(grids[0].folder).glob(f"*/agent-{BAD}")
            content = file.read_bytes()
            file.unlink()
            if how == "damaged":
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return reply

    grids = []
    plan = plan_of(SCAFFOLD)
    rounds, outcome, _ = federate(plan, DATA, forget, grids.append)
    assert not any(p.rejected for p in rounds) and len(outcome.scores) == AGENTS
    assert caplog.text.count(f"site {BAD} lost its state and restarted") == 1
    assert "round 2" in caplog.text
    right = broken_simulation(replace(plan, rounds=1))
    assert same(rounds[1].server, right[1].server)


def test_data_that_can_not_be_loaded_is_named_and_details_stay_at_the_site(caplog):
    data = [*DATA[:BAD], "the secret of a patient", *DATA[BAD + 1 :]]
    rounds, _, _ = federate(plan_of(FEDAVG), data)
    reasons = {(r.agent, r.reason) for p in rounds for r in p.rejected}
    named = "it failed: its data can't be loaded (InputError); see the site's log"
    assert reasons == {(BAD, named)} and all(p.rejected for p in rounds[1:])


@pytest.mark.parametrize("bad", ["label", "input", "test input"])
def test_a_site_with_invalid_values_is_named(caplog, bad):
    x, y = (part.copy() for part in DATA[BAD])
    if bad == "label":
        y[3] = 10**9
    else:
        row = site_split(len(y), BAD, 7, validation=0.0, test=TEST, name="")
        x[(row.test if bad == "test input" else row.train)[BAD][0], 1] = np.nan
    rounds, outcome, _ = federate(plan_of(FEDAVG), [*DATA[:BAD], (x, y), *DATA[BAD + 1 :]])
    reasons = {(r.agent, r.reason) for p in rounds for r in p.rejected}
    named = "it failed: its data can't be loaded (InputError); see the site's log"
    assert reasons == {(BAD, named)} and len(outcome.scores) == AGENTS - 1
    assert "of sample " in caplog.text


def test_a_site_that_raises_is_named_and_the_message_stays_at_the_site(caplog):
    data = [*DATA[:BAD], (DATA[BAD][0][:, :4], DATA[BAD][1]), *DATA[BAD + 1 :]]
    rounds, outcome, _ = federate(plan_of(FEDAVG), data)
    assert all([r.agent for r in p.rejected] == [BAD] for p in rounds[1:])
    assert "RuntimeError; see the site's log" in rounds[1].rejected[0].reason
    assert "mat1" not in str(rounds[1].rejected[0]) and "mat1" in caplog.text
    assert [error.agent for error in outcome.missing] == [BAD] and len(outcome.scores) == 3


def test_an_incomplete_reply_times_out_and_blocks_no_other():
    over = Event()  # Flower itself waits for missing parts up to two hours

    def trickle(message, reply):
        over.wait(PATIENCE)
        return reply

    plan = plan_of(FEDAVG)
    rounds, outcome, _ = federate(plan, DATA, in_bad_round(trickle))
    over.set()
    assert [(r.agent, r.reason) for p in rounds for r in p.rejected] == [(BAD, TOO_LATE)]
    assert same(rounds[-1].server, broken_simulation(plan)[-1].server)
    assert len(outcome.scores) == AGENTS


def failing(text):
    """Flower's reply for an exception with this message."""
    return lambda message, reply: Message(
        Error(2, f"<class 'app.Mine'>:<'{text}'>"), reply_to=message
    )


def test_a_sites_error_message_forges_no_log_line_and_steers_no_terminal():
    words = "\x1b[31m\n2030-01-01 INFO done\x07\r\u202e" + "x" * 10**4
    rounds, _, _ = federate(plan_of(FEDAVG), DATA, in_bad_round(failing(words)))
    (rejected,) = rounds[BAD_ROUND].rejected
    assert str(rejected).isprintable() and "2030-01-01 INFO done" in rejected.reason
    assert len(rejected.reason) < 600


def test_a_site_that_reconnects_as_another_node_is_the_same_agent():
    def leave_and_return(agent, message, reply):
        grid, kind = grids[0], message.metadata.message_type
        round = message.content["about"]["round"] if kind == "train" else 0
        if agent == 0 and round == 1:
            del grid.contexts[grid.node_of(BAD)]
        if agent == 0 and round == 2:
            grid.add(BAD)
        return reply

    grids = []
    rounds, outcome, _ = federate(plan_of(FEDAVG), DATA, leave_and_return, grids.append)
    assert [p.dropped for p in rounds] == [(), (), (BAD,), ()]
    assert len(outcome.scores) == AGENTS


def test_a_failed_identity_query_is_retried():
    def lose_the_first(grid):
        push, node = grid.push_messages, grid.node_of(BAD)

        def push_all_but_one(messages):
            numbers, grid.push_messages = push(messages), push
            return [
                None if message.metadata.dst_node_id == node else number
                for message, number in zip(messages, numbers, strict=True)
            ]

        grid.push_messages = push_all_but_one

    rounds, _, _ = federate(plan_of(FEDAVG, wait=5.0), DATA, prepare=lose_the_first)
    assert not any(p.dropped for p in rounds)


def test_two_sites_with_one_number_are_excluded(caplog):
    rounds, outcome, grid = federate(plan_of(FEDAVG), DATA, prepare=lambda grid: grid.add(BAD))
    assert all(p.dropped == (BAD,) for p in rounds[1:])
    assert caplog.text.count("is excluded: another node also claims") == 2
    assert ("train", BAD) not in grid.requested
    assert [error.agent for error in outcome.missing] == [BAD]


def test_a_site_with_an_invalid_number_is_excluded(caplog):
    rounds, _, _ = federate(
        plan_of(FEDAVG), [*DATA, DATA[0]], prepare=lambda grid: grid.add(AGENTS)
    )
    assert not any(p.rejected or p.dropped for p in rounds)
    assert "must be the site's own number" in caplog.text


def test_without_sites_the_run_fails_and_says_what_to_do():
    with pytest.raises(
        TrainingError, match=r"0 of 4 sites take part .*without site 0, .* start the sites"
    ):
        federate(plan_of(FEDAVG), DATA, prepare=lambda grid: grid.contexts.clear())


@pytest.mark.parametrize("numbered", [True, False])
def test_if_all_sites_are_excluded_the_run_ends_without_waiting(numbered, monkeypatch):
    """Whether the server knows their numbers, as by their keys, or not."""

    def refuse(agent, message, reply):
        return Message(Error(1, "<class 'X'>:<'has not approved this app'>"), reply_to=message)

    def never(seconds):
        raise AssertionError("it waits")

    if numbered:
        monkeypatch.setattr(
            Authentication, "number_of", lambda self, node, agents: numbers.get(node)
        )
    monkeypatch.setattr(time, "sleep", never)
    numbers = {}

    def prepare(grid):
        numbers.update(
            {node: grid.contexts[node].node_config["partition-id"] for node in grid.contexts}
        )

    with pytest.raises(TrainingError, match=r"0 of 4 sites take part .*approved") as stopped:
        federate(plan_of(FEDAVG, wait=600.0), DATA, refuse, prepare)
    assert "correct that at the excluded sites" in str(stopped.value)
    assert "start the sites" not in str(stopped.value) and "600 s" not in str(stopped.value)


def scored(**changes):
    """The bad agent's scores, with some lists or metadata changed."""

    def tamper(agent, message, reply):
        if agent != BAD or message.metadata.message_type != "evaluate":
            return reply
        lists, about = dict(reply.content["scores"]), dict(reply.content["about"])
        for name, value in changes.items():
            (about if name in about else lists)[name] = value
        lists = {name: value for name, value in lists.items() if value is not None}
        records = {"about": ConfigRecord(about), "scores": MetricRecord(lists)}
        return Message(RecordDict(records), reply_to=message)

    return tamper


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": [0.1, float("nan"), 0.1]},
        {"score": [0.1, 0.2]},
        {"score": 0.5},
        {"score": [1, 2, 3]},
        {"more": [0.1, 0.2, 0.3]},
        {"majority": [0.1, 0.2]},
        {"majority": [0.1, 0.2, float("inf")]},
        {"majority": 0.1},
        {"score": [0.1, 1.1, 0.1]},
        {"balanced": [0.1, -0.1, 0.1]},
        {"balanced": None, "minority": None, "majority": None},
        {"test_samples": 0},
        {"train_samples": 0},
        {"minority_samples": 10**6},
    ],
    ids=str,
)
def test_invalid_scores_are_named_and_left_out(changes, caplog):
    caplog.set_level(logging.WARNING)
    _, outcome, _ = federate(plan_of(FEDAVG, rounds=1), DATA, scored(**changes))
    assert [error.agent for error in outcome.missing] == [BAD]
    assert [s.agent for s in outcome.scores] == [0, 1, 3]
    assert "scores left out: site 2" in caplog.text


def test_scores_on_no_minority_are_ignored():
    lie = {"minority_samples": 0, "minority": [9.0] * 3, "majority": [0.5, 0.5, float("inf")]}
    _, outcome, _ = federate(plan_of(FEDAVG, rounds=1), DATA, scored(**lie))
    told = [outcome.scores[BAD].minority, outcome.majority[BAD].minority]
    assert not outcome.missing and all(math.isnan(number) for each in told for number in each)


def by_loss(outputs, targets):
    return -float(torch.nn.functional.cross_entropy(outputs, targets))


def test_metrics_other_than_accuracy_have_no_scores_by_class():
    plan = plan_of(FEDAVG, rounds=1, measure=Measure("mine", by_loss))
    _, outcome, _ = federate(plan, DATA)
    assert len(outcome.scores) == AGENTS and min(s.score[0] for s in outcome.scores) < 0
    _, outcome, _ = federate(plan, DATA, scored(minority_samples=1))
    assert [error.agent for error in outcome.missing] == [BAD]
    lists = dict.fromkeys(("balanced", "minority", "majority"), [0.1] * 3)
    _, outcome, _ = federate(plan, DATA, scored(**lists))
    assert [error.agent for error in outcome.missing] == [BAD]


def test_a_model_whose_dtype_can_not_be_sent_is_refused():
    plan = replace(plan_of(FEDAVG), objective=Objective(mlp(torch.bfloat16)))
    with pytest.raises(InputError, match="bfloat16, which can't be sent"):
        federate(plan, DATA)


def test_a_reply_to_another_request_is_discarded(caplog):
    old = {}

    def replay(agent, message, reply):
        about = message.content.get("about", {})
        if agent != BAD or message.metadata.message_type != "train":
            return reply
        old.setdefault(about["round"], reply)
        return old[1] if about["round"] == BAD_ROUND else reply

    plan = plan_of(FEDAVG)
    rounds, _, _ = federate(plan, DATA, replay)
    assert [(r.agent, r.reason) for r in rounds[BAD_ROUND].rejected] == [
        (BAD, "it answered too late")
    ]
    assert "discarded a reply that matches no request" in caplog.text
    assert same(rounds[-1].server, broken_simulation(plan)[-1].server)


def test_a_site_that_identifies_itself_late_joins_then():
    def slowly(agent, message, reply):
        if agent != BAD or message.metadata.message_type != "query":
            return reply
        trained = [each for each in grids[0].requested if each == ("train", 0)]
        return reply if len(trained) >= 2 else None

    grids = []
    rounds, outcome, grid = federate(plan_of(FEDAVG), DATA, slowly, grids.append)
    assert [p.dropped for p in rounds] == [(), (BAD,), (BAD,), ()]
    assert grid.requested.count(("query", BAD)) > 1 and len(outcome.scores) == AGENTS
