"""flwr's internals are as nufed relies on them, and are used in one file of nufed only."""

import ast
import importlib
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import nufed

SOURCE = Path(nufed.__file__).parent
FILE = SOURCE / "flower/internals.py"
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
CONTROL = "flwr.supercore.control.control_http_client.ControlHttpClient"

SIGNATURES = {  # of functions and methods, without types
    "flwr.app.message.remove_content_from_message": "(message)",
    "flwr.cli.build.build_fab_from_disk": "(app)",
    "flwr.cli.install.install_from_fab": "(fab_file, install_dir=None, skip_prompt=False)",
    "flwr.common.config.get_fused_config_from_fab": "(fab_file, run)",
    "flwr.common.config.get_project_config": "(project_dir)",
    "flwr.common.secure_aggregation.crypto.shamir.combine_shares": "(share_list)",
    "flwr.common.secure_aggregation.crypto.shamir.create_shares": "(secret, threshold, num)",
    "flwr.common.serde.context_from_proto": "(context_proto)",
    "flwr.common.serde.context_to_proto": "(context)",
    "flwr.common.serde.message_from_proto": "(message_proto)",
    "flwr.common.serde.message_to_proto": "(message)",
    "flwr.supercore.address.resolve_bind_address": "(address)",
    f"{CONTROL}.ListNodes": "(self, request)",
    f"{CONTROL}.RegisterNode": "(self, request)",
    f"{CONTROL}.UnregisterNode": "(self, request)",
    f"{CONTROL}.close": "(self)",
    f"{CONTROL}.from_server_address": (
        "(server_address, insecure, root_certificates, interceptors, *, retry_invoker=None)"
    ),
    "flwr.supercore.inflatable.inflatable_object.get_all_nested_objects": "(obj)",
    "flwr.supercore.inflatable.inflatable_object.get_object_body": "(object_content, cls)",
    "flwr.supercore.inflatable.inflatable_object.get_object_head_values_from_object_content": (
        "(object_content)"
    ),
    "flwr.supercore.inflatable.inflatable_object.get_object_tree": "(obj)",
    "flwr.supercore.inflatable.inflatable_object.iterate_object_tree": "(tree)",
    "flwr.supercore.inflatable.inflatable_object.no_object_id_recompute": "()",
    "flwr.supercore.inflatable.inflatable_protobuf_utils.make_pull_object_fn_protobuf": (
        "(pull_object_protobuf, node, run_id)"
    ),
    "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents": (
        "(object_id, object_contents, *, keep_object_contents=False, objects=None)"
    ),
    "flwr.supercore.inflatable.inflatable_utils.pull_objects": (
        "(object_ids, pull_object_fn, *, max_concurrent_pulls=2, max_time=7200, "
        "max_tries_per_object=500, initial_backoff=1, backoff_cap=10)"
    ),
    "flwr.supercore.inflatable.inflatable_utils.push_object_contents_from_iterable": (
        "(object_contents, push_object_fn, *, max_concurrent_pushes=2)"
    ),
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor": "(component_name)",
    "flwr.supercore.object_ref.load_app": "(module_attribute_str, error_type, project_dir=None)",
    "flwr.supercore.primitives.asymmetric.public_key_to_bytes": "(public_key)",
    "flwr.supercore.runtime.RuntimeHttpClient.ConfirmMessageReceived": "(self, request)",
    "flwr.supercore.runtime.RuntimeHttpClient.PullMessages": "(self, request)",
    "flwr.supercore.runtime.RuntimeHttpClient.PullObject": "(self, request)",
    "flwr.superlink.cli.flower_superlink.flower_superlink": "()",
    "flwr.superlink.extensions.get_lifespan_contexts": "()",
    "flwr.superlink.extensions.get_middleware": "()",
    "flwr.superlink.servicer.runtime.runtime_handlers.acquire_task": "(request, state)",
    "flwr.supernode.fleet_http_connection.http_request_response": (
        "(server_address, insecure, root_certificates=None, authentication_keys=None, "
        "max_retries=None, max_wait_time=None)"
    ),
}
FIELDS = {  # of messages of Flower's protocol and of dataclasses, those that are used
    "flwr.proto.control_pb2.ListNodesRequest": "",
    "flwr.proto.control_pb2.RegisterNodeRequest": "public_key",
    "flwr.proto.control_pb2.UnregisterNodeRequest": "node_id",
    "flwr.proto.message_pb2.ConfirmMessageReceivedRequest": "node run_id message_object_id",
    "flwr.proto.message_pb2.Context": "",
    "flwr.proto.message_pb2.Message": "metadata",
    "flwr.proto.message_pb2.ObjectTree": "object_id",
    "flwr.proto.node_pb2.NodeInfo": (
        "public_key status last_activated_at last_deactivated_at online_until heartbeat_interval"
    ),
    "flwr.proto.runtime_pb2.AcquireTaskRequest": "supported_task_types",
    "flwr.proto.runtime_pb2.AcquireTaskResponse": "token",
    "flwr.proto.runtime_pb2.PullAppMessagesRequest": "message_ids",
    "flwr.proto.runtime_pb2.PullAppMessagesResponse": "messages_list",
    "flwr.supercore.fab.Fab": "content",
    "flwr.supercore.run.Run": "run_id fab_hash override_config series_id",
    "flwr.superlink.config_loader.SuperLinkLifespanConfig": "host port ssl_ca_certfile",
}
CLASSES = {  # their attributes that are used
    "flwr.clientapp.client_app.LoadClientAppError": "",
    "flwr.common.constant.ErrorCode": (
        "UNKNOWN INVALID_FAB LOAD_CLIENT_APP_EXCEPTION CLIENT_APP_RAISED_EXCEPTION "
        "CLIENT_APP_CRASHED"
    ),
    "flwr.supercore.constant.NodeStatus": "ONLINE UNREGISTERED",
    "flwr.supercore.constant.TaskType": "SERVER_APP",
    CONTROL: "",
    "flwr.supercore.run.RunNotRunningException": "",
    "flwr.supercore.task_identity.TaskIdentity": "run_id node_id",
    "flwr.superlink.grid.http_grid.HttpGrid": "_runtime_client run",
}
VALUES = {
    "flwr.common.constant.HEARTBEAT_PATIENCE": 2,
    "flwr.superlink.extensions._SGXT_MODULE": "flwr.ee.superlink.extensions",
}


def imported(path):
    """The names that a file imports from modules of flwr that are not public."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module not in PUBLIC:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("flwr") and name not in PUBLIC)


def located(name):
    """The object with a dotted name; None if there is none."""
    place, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(place), attribute, None)
    except ImportError:
        return getattr(located(place), attribute, None) if "." in place else None


def signature(thing):
    whole = inspect.signature(thing)
    bare = [each.replace(annotation=each.empty) for each in whole.parameters.values()]
    return str(whole.replace(parameters=bare, return_annotation=whole.empty))


def attributes(thing):
    """The names of fields of a protobuf message or dataclass, or of a class's attributes."""
    if hasattr(thing, "DESCRIPTOR"):
        return {field.name for field in thing.DESCRIPTOR.fields}
    return {*dir(thing), *dir(type(thing))} | set(getattr(thing, "__dataclass_fields__", ()))


def changes():
    """What the installed flwr has changed of what nufed relies on."""
    for name, expected in SIGNATURES.items():
        thing = located(name)
        if thing is None or signature(thing) != expected:
            yield name, "is gone" if thing is None else f"is {signature(thing)}, not {expected}"
    for name, used in {**FIELDS, **CLASSES}.items():
        thing = located(name)
        missing = [] if thing is None else sorted(set(used.split()) - attributes(thing))
        if thing is None or missing:
            yield name, "is gone" if thing is None else f"has no {', '.join(missing)}"
    for name, value in VALUES.items():
        if located(name) != value:
            yield name, f"is {located(name)!r}, not {value!r}"
    connection = located("flwr.supernode.fleet_http_connection.http_request_response")
    ((node, *calls),) = map(get_args, get_args(inspect.signature(connection).return_annotation))
    arguments = [len(get_args(call)[0]) for call in calls]
    if (node, arguments) != (int, [0, 3, 1, 2, 2, 4, 2]):
        yield "http_request_response", f"yields {node} and calls of {arguments} arguments"
    grid = located("flwr.superlink.grid.http_grid.HttpGrid")(token="t")
    if not hasattr(grid, "node"):
        yield "HttpGrid", "has no node"
    client = located("flwr.supercore.runtime.RuntimeHttpClient")("http://127.0.0.1:1")
    if "response" not in client._client.event_hooks:
        yield "RuntimeHttpClient", "has no httpx client in _client"


def test_the_installed_flwr_is_what_nufed_relies_on():
    known = {*SIGNATURES, *FIELDS, *CLASSES, *VALUES}
    for name in imported(FILE):
        part = any(each.startswith(f"{name}.") for each in known)  # a module
        assert name in known or part, f"{name} is used, but no table of this file has it"
    said = "".join(f"\n- {name} {how}" for name, how in changes())
    assert not said, (
        f"flwr {version('flwr')} differs from what src/nufed/flower/internals.py relies on; adapt "
        f"that file, then these tables:{said}"
    )


def test_a_changed_signature_attribute_or_value_is_named(monkeypatch):
    monkeypatch.setattr("flwr.cli.build.build_fab_from_disk", lambda app, more: b"")
    monkeypatch.delattr("flwr.supercore.constant.NodeStatus.UNREGISTERED")
    monkeypatch.delattr("flwr.common.serde.context_to_proto")
    monkeypatch.setattr("flwr.common.constant.HEARTBEAT_PATIENCE", 3)
    assert list(changes()) == [
        ("flwr.cli.build.build_fab_from_disk", "is (app, more), not (app)"),
        ("flwr.common.serde.context_to_proto", "is gone"),
        ("flwr.supercore.constant.NodeStatus", "has no UNREGISTERED"),
        ("flwr.common.constant.HEARTBEAT_PATIENCE", "is 3, not 2"),
    ]


def test_no_other_file_uses_internals(tmp_path):
    (tmp_path / "own.py").write_text(
        "import flwr.proto\nfrom flwr.app.message import x\nfrom flwr.app import y\n"
    )
    assert list(imported(tmp_path / "own.py")) == ["flwr.proto", "flwr.app.message.x"]
    others = [path for path in SOURCE.rglob("*.py") if path != FILE]
    assert {str(path): list(imported(path)) for path in others if any(imported(path))} == {}
    private = ("_runtime_client", '"_message_id"', "_SGXT_MODULE", "flwr.proto")
    texts = {str(path): path.read_text("utf-8") for path in others}
    assert [(p, word) for p, text in texts.items() for word in private if word in text] == []


def test_the_server_s_process_never_imports_torch():
    code = (
        "import sys, nufed.flower.ops.server_process\n"
        "print(sorted({'torch', 'nufed.errors'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
