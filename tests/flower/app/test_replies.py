"""Replies are refused by size before they are read; their site is excluded from the run."""

import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from flower.app.in_memory import RUN, agents_data, plan_of, sites_of
from flower.app.test_faults import AGENTS, BAD, FEDAVG, is_training
from nufed.errors import RunError, TrainingError
from nufed.flower.app.replies import MIB, ReplyLimit, ReplyTooLargeError, pull_replies
from nufed.flower.app.roster import EXCLUDED, Exclusions
from nufed.flower.app.server_app import Server
from nufed.server import Rules

LIMIT = ReplyLimit(arrays=20 * MIB, records=MIB)
REQUEST = "1" * 64


class Body(httpx.SyncByteStream):
    def __init__(self, superlink, content):
        self.superlink, self.content = superlink, content

    def __iter__(self):
        self.superlink.bytes_read += len(self.content)
        yield self.content


class SuperLink:
    """A SuperLink with one reply, in Flower's object store; counts the bytes that are read."""

    def __init__(self, message, tree, contents):
        self.store, self.bytes_read = InMemoryObjectStore(), 0
        self.message, self.tree = message_to_proto(remove_content_from_message(message)), tree
        self.store.preregister(1, tree)
        for id, content in contents.items():
            self.store.put(id, content)

    def respond(self, request):
        name = request.url.path.rpartition("/")[2]
        if name == "pull-messages":
            answer = PullAppMessagesResponse(
                messages_list=[self.message], message_object_trees=[self.tree]
            )
        elif name == "pull-object":
            content = self.store.get(PullObjectRequest.FromString(request.content).object_id)
            answer = PullObjectResponse(
                object_found=True, object_available=True, object_content=content
            )
        else:
            asked = ConfirmMessageReceivedRequest.FromString(request.content)
            self.store.delete(asked.message_object_id)
            answer = ConfirmMessageReceivedResponse()
        content = answer.SerializeToString()
        headers = {"content-length": str(len(content))}
        return httpx.Response(200, headers=headers, stream=Body(self, content))

    def grid(self):
        grid = HttpGrid(token="token")
        grid.set_run(Run.create_empty(1))
        grid._client = RuntimeHttpClient("http://superlink")
        grid._client._client = httpx.Client(transport=httpx.MockTransport(self.respond))
        return grid


def reply(content):
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def superlink_with(message):
    objects = get_all_nested_objects(message)
    contents = {id: found.deflate() for id, found in objects.items()}
    return SuperLink(message, get_object_tree(message), contents)


def crafted(kind, children, body):
    """An object's content as a site may write it."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


def superlink_with_array(occurrences, chunk=bytes(5 * MIB), leaf=False):
    """A reply with one array in which one chunk occurs so often; ``leaf``: its tree hides that."""
    message = reply(RecordDict())  # its real children are crafted
    part = crafted("ArrayChunk", [], chunk)
    about = {"dtype": "uint8", "shape": [1], "stype": "numpy.ndarray"}
    body = json.dumps({**about, "arraychunk_ids": [0] * occurrences}).encode()
    array = crafted("Array", [get_object_id(part)], body)
    record = crafted(
        "ArrayRecord", [get_object_id(array)], json.dumps({"model": get_object_id(array)}).encode()
    )
    top = crafted(
        "RecordDict",
        [get_object_id(record)],
        json.dumps({"arrays": get_object_id(record)}).encode(),
    )
    root = crafted("Message", [get_object_id(top)], message_to_proto(message).SerializeToString())
    contents = {get_object_id(content): content for content in (part, array, record, top, root)}
    chunk_tree, array_tree, record_tree, top_tree, tree = (
        ObjectTree(object_id=id) for id in contents
    )
    if leaf:
        tree.children.extend([chunk_tree, array_tree, record_tree, top_tree])
    else:
        array_tree.children.append(chunk_tree)
        record_tree.children.append(array_tree)
        top_tree.children.append(record_tree)
        tree.children.append(top_tree)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return SuperLink(message, tree, contents)


def test_a_reply_within_the_limit_is_what_flower_pulls():
    rng = np.random.default_rng(0)
    same_chunks = np.zeros(11 * MIB, np.uint8)
    same_chunks[-1] = 1
    arrays = {"model": Array(rng.normal(size=MIB)), "control": Array(same_chunks)}
    message = reply(RecordDict({"arrays": ArrayRecord(arrays), "about": ConfigRecord({"n": 1})}))
    (wanted,) = superlink_with(message).grid().pull_messages([REQUEST])
    superlink = superlink_with(message)
    (found,) = pull_replies(superlink.grid(), REQUEST, LIMIT)
    assert found.metadata == wanted.metadata and found.content == wanted.content
    assert len(superlink.store) == 0
    for name in arrays:
        assert found.content["arrays"][name].data == arrays[name].data


@pytest.mark.parametrize("leaf", [False, True])
def test_an_array_of_one_repeated_chunk_is_refused_before_the_chunk_is_read(leaf):
    superlink = superlink_with_array(300, leaf=leaf)
    with pytest.raises(ReplyTooLargeError, match=r"its arrays have 1500 MiB or more: .* 20 MiB"):
        pull_replies(superlink.grid(), REQUEST, LIMIT)
    assert superlink.bytes_read < 10_000
    assert len(superlink.store) == 0  # not kept at the SuperLink either
    (found,) = pull_replies(superlink_with_array(3, leaf=leaf).grid(), REQUEST, LIMIT)
    assert found.content["arrays"]["model"].data == bytes(15 * MIB)


def test_arrays_that_exceed_the_limit_only_together_are_refused():
    arrays = {str(i): Array(np.full(7 * MIB, i, np.uint8)) for i in range(3)}
    superlink = superlink_with(reply(RecordDict({"arrays": ArrayRecord(arrays)})))
    with pytest.raises(ReplyTooLargeError, match="its arrays have 2"):
        pull_replies(superlink.grid(), REQUEST, LIMIT)
    assert superlink.bytes_read <= LIMIT.arrays + 10_000


def test_large_records_are_refused_before_they_are_read():
    superlink = superlink_with(reply(RecordDict({"about": ConfigRecord({"name": "x" * 2 * MIB})})))
    with pytest.raises(ReplyTooLargeError, match=r"its records have 2 MiB or more: .* 1 MiB"):
        pull_replies(superlink.grid(), REQUEST, LIMIT)
    assert superlink.bytes_read < 10_000


def test_a_reply_of_too_many_objects_is_refused():
    superlink = superlink_with(reply(RecordDict()))
    superlink.tree.children.extend(ObjectTree(object_id=f"{i:064}") for i in range(20_000))
    with pytest.raises(ReplyTooLargeError, match=r"the ids of its objects have 1\.\d+ MiB"):
        pull_replies(superlink.grid(), REQUEST, LIMIT)


def test_records_among_the_chunks_of_an_array_are_not_parsed():
    superlink = superlink_with_array(1)
    part = next(c for c in superlink.store.store.values() if c.content.startswith(b"ArrayChunk"))
    part.content = crafted("ConfigRecord", [], bytes(5 * MIB))
    with pytest.raises(ValueError, match="an object of type ConfigRecord instead of"):
        pull_replies(superlink.grid(), REQUEST, LIMIT)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_limit_of_a_plan_covers_the_vectors_that_it_sends(name):
    plan = plan_of(FEDAVG)
    vector = np.zeros(plan.objective.initial().numel(), name)
    arrays = ArrayRecord({"model": Array(vector)})
    message = reply(RecordDict({"arrays": arrays, "about": ConfigRecord({"x": [0.1] * 1000})}))
    (found,) = pull_replies(superlink_with(message).grid(), REQUEST, plan.reply_limit)
    assert found.content == message.content
    larger = reply(RecordDict({"arrays": ArrayRecord({"model": Array(np.zeros(1000))})}))
    with pytest.raises(ReplyTooLargeError):
        pull_replies(superlink_with(larger).grid(), REQUEST, plan.reply_limit)


def too_large(agent, message, found):
    if agent == BAD and is_training(message) and message.content["about"]["round"] >= 2:
        raise ReplyTooLargeError("its arrays have 1500 MiB or more")
    return found


def test_a_site_whose_reply_is_too_large_is_named_and_never_asked_again(tmp_path):
    plan, data = plan_of(FEDAVG, rounds=4), agents_data(AGENTS)
    grid = sites_of(plan, data, tmp_path, too_large)
    server = Server(plan, grid, RUN, exclusions=Exclusions(tmp_path))
    rounds = list(server.train())
    assert [[r.agent for r in p.rejected] for p in rounds] == [[], [], [BAD], [BAD], [BAD]]
    assert (
        rounds[2].rejected[0].reason == "its reply is too large: its arrays have 1500 MiB or more"
    )
    assert rounds[4].rejected[0].reason.startswith("excluded since round 2: its reply is too large")
    assert grid.requested.count(("train", BAD)) == 2
    assert [error.agent for error in server.scoring.evaluate(rounds[-1]).missing] == [BAD]
    assert grid.requested.count(("evaluate", BAD)) == 0
    again = sites_of(replace(plan, rounds=5), data, tmp_path)
    resumed = Server(
        replace(plan, rounds=5), again, RUN, server.notes, exclusions=Exclusions(tmp_path)
    )
    *_, last = resumed.train(rounds[-1])
    assert [r.agent for r in last.rejected] == [BAD]
    assert ("train", BAD) not in again.requested


def test_a_site_stays_excluded_if_the_run_fails_in_the_same_round(tmp_path):
    plan = plan_of(FEDAVG, rounds=2, rules=Rules(min_updates=AGENTS, attempts=1))
    grid = sites_of(plan, agents_data(AGENTS), tmp_path, too_large)
    with pytest.raises(TrainingError, match="its arrays have 1500 MiB or more"):
        list(Server(plan, grid, RUN, exclusions=Exclusions(tmp_path)).train())
    assert "1500 MiB" in Exclusions(tmp_path).reason(BAD)
    assert Exclusions(tmp_path).reason(0) is None


def test_a_damaged_list_of_excluded_sites_is_refused(tmp_path):
    Exclusions(tmp_path).add(1, 2, "its reply is too large")
    path = tmp_path / EXCLUDED
    path.write_bytes(path.read_bytes().replace(b"too large", b"too small"))
    with pytest.raises(RunError, match="is damaged"):
        Exclusions(tmp_path)
