"""All uses of flwr's internals, that is, of anything outside its public modules.

Public are ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.simulation``; the rest
may change in any release. Each part says what it relies on, as of flwr 1.41.0;
``tests/flower/test_internals.py`` compares names, signatures and attributes with the installed
flwr. Nothing here imports torch or the rest of nufed: the server's process starts with it. What is
imported under its own name (``as``) is used by other files as it is.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from flwr.app import Array, Context, Error, Message
from flwr.app.message import remove_content_from_message
from flwr.cli.build import build_fab_from_disk as build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.config import get_fused_config_from_fab, get_project_config
from flwr.common.constant import HEARTBEAT_PATIENCE, ErrorCode as ErrorCode
from flwr.common.secure_aggregation.crypto.shamir import (
    combine_shares as combine_shares,
    create_shares as create_shares,
)
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Context as ContextProto,
    Message as FlowerMessage,
    ObjectTree as ObjectTree,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.constant import NodeStatus, TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_head_values_from_object_content,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects as pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.object_ref import load_app
from flwr.supercore.primitives.asymmetric import public_key_to_bytes as public_key_to_bytes
from flwr.supercore.run import Run, RunNotRunningException as RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode.fleet_http_connection import http_request_response

MessageProto: TypeAlias = FlowerMessage

# Messages as trees of objects.
#
# Flower stores a message as a tree of objects (message, records, arrays, chunks of arrays), each
# under the SHA-256 of its content, which names its type and its children in a head. An array lists
# in its body how often each of its chunks occurs. A message's id is that of its root, and is kept
# in the attribute `_message_id` of its metadata.
Objects: TypeAlias = dict[str, bytes]  # contents of objects, by their SHA-256


def deflate(message: Message) -> tuple[MessageProto, ObjectTree, Objects]:
    """A message without its content, the tree of its objects, and the objects."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        objects = {id: each.deflate() for id, each in get_all_nested_objects(message).items()}
        tree = get_object_tree(message)
    return message_to_proto(remove_content_from_message(message)), tree, objects


def inflate(root: str, objects: Objects) -> Message:
    """The message with this id, from its objects."""
    message = cast(Message, inflate_object_from_contents(root, objects))
    message.metadata.__dict__["_message_id"] = root
    return message


def ids_of(tree: ObjectTree) -> list[str]:
    """The ids of a tree's objects."""
    return [each.object_id for each in iterate_object_tree(tree)]


def kind_of(content: bytes) -> str:
    """The type of an object."""
    return get_object_head_values_from_object_content(content)[0]


def children_of(content: bytes) -> Counter[str]:
    """The ids of an object's children, and how often each occurs in it."""
    kind, ids, _ = get_object_head_values_from_object_content(content)
    if kind != Array.__qualname__:
        return Counter(ids)
    return Counter(ids[i] for i in json.loads(get_object_body(content, Array))["arraychunk_ids"])


# Failures of an app, as text.
#
# The reason of an error reply is "<class 'MODULE.NAME'>:<'MESSAGE'>" of the app's exception.
def app_error(error: Exception, code: int | None = None) -> Error:
    """An exception as Flower's own process reports it; by default one that the app raised."""
    if code is None and isinstance(error, LoadClientAppError):
        reason = "An exception was raised when attempting to load `ClientApp`"
        return Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, reason)
    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION if code is None else code
    return Error(code, f"{type(error)}:<'{error}'>")


def read_error(reason: str) -> tuple[str, str] | None:
    """The class and the message of the exception in an error reply; None if it names none."""
    raised = re.fullmatch(r"<class '([\w.]+)'>:<'(.*)'>", reason, re.DOTALL)
    return (raised[1], raised[2]) if raised else None


# The ServerApp's access to replies.
#
# Outside of Flower's simulation the grid is an HttpGrid, with an API client in `_runtime_client`,
# whose httpx client is `_client`. The grid's `pull_messages` assembles a reply of any size.
class Replies:
    """The replies of a run that wait at the SuperLink, as objects.

    Args:
        grid: of the run's ServerApp.
        check: called by httpx with every response, before its body is read.
    """

    def __init__(self, grid: HttpGrid, check: Callable[[httpx.Response], None]) -> None:
        self._client, self._node, self._run = grid._runtime_client, grid.node, grid.run.run_id
        hooks = self._client._client.event_hooks["response"]
        if check not in hooks:
            hooks.append(check)
        self.pull = make_pull_object_fn_protobuf(self._client.PullObject, self._node, self._run)

    def to(self, message_id: str) -> list[str]:
        """The ids of the replies to a message that have arrived."""
        request = PullAppMessagesRequest(message_ids=[message_id])
        return [
            reply.metadata.message_id for reply in self._client.PullMessages(request).messages_list
        ]

    def delete(self, reply: str) -> None:
        """Delete a reply at the SuperLink."""
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._node, run_id=self._run, message_object_id=reply
            )
        )


def replies_at(grid: Grid, check: Callable[[httpx.Response], None]) -> Replies | None:
    """The replies behind a grid; None in Flower's simulation, where they are in memory already."""
    return Replies(grid, check) if isinstance(grid, HttpGrid) else None


# The Control API: keys and nodes.
#
# A node that is online calls at intervals; it is offline after HEARTBEAT_PATIENCE of them.
@dataclass(frozen=True)
class Node:
    """What a SuperLink knows of a registered node; ``last_seen`` in seconds since 1970."""

    public_key: bytes
    online: bool
    last_seen: float | None


def node_of(info: NodeInfo) -> Node:
    """A node; it called last at its last heartbeat, or when it disconnected."""
    online, last_seen = info.status == NodeStatus.ONLINE, None
    if info.last_activated_at and online:
        last_seen = info.online_until - HEARTBEAT_PATIENCE * info.heartbeat_interval
    elif info.last_activated_at:
        left = info.last_deactivated_at or info.last_activated_at
        last_seen = datetime.fromisoformat(left).timestamp()
    return Node(info.public_key, online, last_seen)


@dataclass(frozen=True)
class ControlApi:
    """A SuperLink's Control API."""

    client: ControlHttpClient

    def register(self, key: EllipticCurvePublicKey) -> str:
        """Register a site's public key; returns Flower's node id of the site."""
        request = RegisterNodeRequest(public_key=public_key_to_bytes(key))
        return str(self.client.RegisterNode(request).node_id)

    def unregister(self, node: str) -> None:
        """Remove a site's key: the SuperLink no longer admits it."""
        self.client.UnregisterNode(UnregisterNodeRequest(node_id=int(node)))

    def nodes(self) -> list[Node]:
        """The nodes whose keys are registered."""
        listed = self.client.ListNodes(ListNodesRequest()).nodes_info
        return [node_of(info) for info in listed if info.status != NodeStatus.UNREGISTERED]


@contextmanager
def control_api(address: str, ca: bytes | None) -> Iterator[ControlApi]:
    """A connection to a SuperLink's Control API; without ``ca`` it is not encrypted."""
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=ca is None,
        root_certificates=ca,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="nufed")],
    )
    try:
        yield ControlApi(client)
    finally:
        client.close()


# The Fleet API: what a SuperNode calls.
#
# `http_request_response` yields the node's id and seven functions, in the order of these fields.
@dataclass(frozen=True)
class Fleet:
    """Flower's calls of a server's API for sites, in its order."""

    node: int
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    get_run: Callable[[int], Run]
    get_fab: Callable[[str, int], Fab]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]

    def reply(self, bare: MessageProto, tree: ObjectTree, objects: Objects, seconds: float) -> None:
        """Send a reply without its content, then the objects that the server lacks."""
        message = message_from_proto(bare)
        ids, session = self.send(message, tree, seconds)
        run = message.metadata.run_id
        push_object_contents_from_iterable(
            ((id, objects[id]) for id in ids),
            lambda id, content: self.push_object(run, session, id, content),
        )


@contextmanager
def fleet_api(
    server: str, ca: bytes | None, private: EllipticCurvePrivateKey | None
) -> Iterator[Fleet]:
    """A connection of a site; without ``ca`` it is not encrypted."""
    keys = (private, private.public_key()) if private else None
    with http_request_response(server, ca is None, ca, keys) as calls:
        yield Fleet(*calls)


# Apps: building a bundle, unpacking it, running its ClientApp.
#
# A context is kept between messages of one run; the identity of the task is global to a process.
def install_app(fab: bytes, folder: Path) -> Path:
    """Unpack an app's bundle into a folder; returns where it is."""
    with redirect_stdout(StringIO()):  # it prints a line
        return install_from_fab(fab, folder, skip_prompt=True)


def app_config(fab: bytes, run: Run) -> dict[str, bool | float | int | str]:
    """The run config in an app, without what whoever started the run has put in its place."""
    return get_fused_config_from_fab(fab, replace(run, override_config={}))


def load_client_app(folder: Path) -> ClientApp:
    """The ClientApp of an unpacked app."""
    reference = get_project_config(folder)["tool"]["flwr"]["app"]["components"]["clientapp"]
    app = load_app(reference, LoadClientAppError, folder)
    if not isinstance(app, ClientApp):
        raise LoadClientAppError(f"{reference} is not a ClientApp")
    return app


def set_identity(context: Context) -> None:
    """Make this process that of a context's run and node, as creating a reply requires."""
    TaskIdentity.run_id, TaskIdentity.node_id = context.run_id, context.node_id


def context_to_bytes(context: Context) -> bytes:
    """A context, to pass it to another process."""
    content: bytes = context_to_proto(context).SerializeToString()
    return content


def context_from_bytes(content: bytes) -> Context:
    """The inverse of :func:`context_to_bytes`."""
    return context_from_proto(ContextProto.FromString(content))


# The SuperLink's process.
#
# Flower looks for a module of extensions with the functions `get_middleware` and
# `get_lifespan_contexts`. The state of its application has `linkstate_factory`, and its settings in
# `superlink_lifespan.config`.
def run_superlink(hooks: ModuleType) -> None:
    """Run `flower-superlink` with the options of this process and a module of hooks."""
    sys.modules[extensions._SGXT_MODULE] = hooks
    flower_superlink()


async def next_server_app(state: Any) -> tuple[list[str], str] | None:
    """The command that runs the ServerApp of a submitted run, and its token; None: there is none.

    The command lacks the options ``--token-file`` and ``--parent-pid``.
    """
    links = state.linkstate_factory.state()
    request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    task = await asyncio.to_thread(runtime_handlers.acquire_task, request, links)
    if not task.token:
        return None
    config = state.superlink_lifespan.config
    host = f"[{config.host}]" if ":" in config.host else config.host
    command = ["flwr-serverapp", "--runtime-api-address"]
    command.append(resolve_bind_address(f"{host}:{config.port}"))
    ca = config.ssl_ca_certfile
    command += ["--insecure"] if ca is None else ["--root-certificates", ca]
    return command, task.token
