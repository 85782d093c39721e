"""Real processes with keys: a registered site that claims another's number harms only itself."""

import json
from contextlib import ExitStack

import pytest

from flower.ops.commands import TIMEOUT, nufed_federate
from flower.ops.small_app import write_app
from nufed.flower.app.signatures import fingerprint, read_public
from nufed.flower.ops.flower_processes import free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.registration import register_site
from support import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
LIAR, VICTIM = 0, 1


def test_a_liar_is_named_and_revoked_and_a_key_rotated(tmp_path):
    """Site 0 claims the number of site 1. Then it is revoked, and site 1 gets another key."""
    keys = tmp_path / "keys"
    make_authority(keys)
    for number in range(3):
        public = make_site_key(tmp_path / f"key-{number}")
        register_site(keys, number, f"Ward {number}", public)
    liar = fingerprint(read_public(tmp_path / f"key-{LIAR}.pub"))
    new = fingerprint(read_public(make_site_key(tmp_path / "key-new")))
    write_app(tmp_path / "app", 3, rounds=4, wait=30.0)
    (port,) = free_ports(1)
    address = ("--server", f"127.0.0.1:{port}", "--ca", "keys/ca.crt")
    with ExitStack() as stack:

        def start(*arguments):
            return stack.enter_context(nufed_federate(tmp_path, *arguments))

        def start_site(key, number):
            folder = f"site-{number}-{key}"
            return start(
                "site", "--number", number, "--key", key, "--folder", folder, "--any-app", *address
            )

        def finish(*arguments):
            process = start(*arguments)
            assert process.wait(4 * TIMEOUT) == 0, process.printed()
            return process.printed()

        def connected():
            """By name, as the server knows it without a run."""
            shown = finish("status", "--keys", "keys", "--server", address[1], "--json")
            return {site["name"]: site["connected"] for site in json.loads(shown)}

        server = start("server", "--keys", "keys", "--port", port)
        assert wait(lambda: "the server is ready" in server.printed(), TIMEOUT), server.printed()
        liars = start_site("key-0", VICTIM)
        old = start_site("key-1", VICTIM)
        start_site("key-2", 2)
        finish("run", "app", "--out", "run", *address)
        log = (tmp_path / "run" / "log.txt").read_text()
        assert f"site 0 ('Ward 0', key {liar}) is excluded: it claims the number 1" in log
        assert rejected_or_dropped(tmp_path / "run") == {LIAR}

        assert connected() == {"Ward 0": True, "Ward 1": True, "Ward 2": True}
        finish("revoke", "Ward 0")
        assert wait(lambda: "rejoining" in liars.printed(), TIMEOUT), liars.printed()
        assert wait(lambda: "the server refuses this site" in liars.printed(), TIMEOUT)
        assert connected() == {"Ward 1": True, "Ward 2": True}
        finish("rotate", "Ward 1", "key-new.pub")
        assert wait(lambda: f"registered site 1 ('Ward 1', key {new})" in server.printed(), TIMEOUT)
        start_site("key-new", VICTIM)
        finish("rotate", "Ward 1", "--finish")
        assert wait(lambda: server.printed().count("unregistered the key") == 2, TIMEOUT)
        finish("run", "app", "--out", "again", *address)
        assert rejected_or_dropped(tmp_path / "again") == {LIAR}
        assert "rejoining" in old.printed()
        # not once per try
        assert liars.printed().count("the server refuses this site") == 1


def rejected_or_dropped(out):
    """The agents that did not take part in every round."""
    (metrics,) = out.glob("methods/*/seed-*/metrics.jsonl")
    lines = json_lines(metrics)
    assert lines[-1]["round"] == 4
    rejected = {r["agent"] for line in lines for r in line["rejected"]}
    return rejected | {agent for line in lines for agent in line.get("dropped", ())}
