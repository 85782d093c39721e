"""Secure aggregation over real processes with TLS and site keys: the bits of the simulation."""

from contextlib import ExitStack

import pytest

from flower.ops.commands import TIMEOUT, nufed_federate, rounds_done
from flower.ops.small_app import files_of, simulate, write_app
from nufed.flower.ops.flower_processes import free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.registration import register_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
SITES = 4


def test_a_secure_federation_has_the_simulators_bits(tmp_path):
    make_authority(tmp_path / "keys")
    public = [make_site_key(tmp_path / f"key-{i}") for i in range(SITES)]
    for number, file in enumerate(public):
        register_site(tmp_path / "keys", number, f"site-{number}", file)
    secure = (
        f"secure_aggregation = true\nsite_keys = {[file.read_text().strip() for file in public]}"
    )
    app = write_app(tmp_path / "app", SITES, rounds=2, tables=secure)
    (port,) = free_ports(1)
    ca = ("--ca", "keys/ca.crt")
    to = ("--server", f"127.0.0.1:{port}", *ca)
    with ExitStack() as stack:

        def start(*arguments):
            return stack.enter_context(nufed_federate(tmp_path, *arguments))

        server = start("server", "--keys", "keys", "--port", port)
        assert wait(lambda: "the server is ready" in server.printed(), TIMEOUT), server.printed()
        for i in range(SITES):
            folder = ("--folder", f"site-{i}")
            approved = start("approve", "app", *folder, "--yes")
            assert approved.wait(TIMEOUT) == 0, approved.printed()
            start("site", "--number", i, *folder, "--key", f"key-{i}", *to)
        run = start("run", "app", "--out", "out", *to)
        assert run.wait(2 * TIMEOUT) == 0, run.printed()
    assert rounds_done(tmp_path / "out") == 2
    assert files_of(tmp_path / "out") == files_of(simulate(app, tmp_path / "simulated").path)
