"""Several methods over real processes, and settings within the bounds of one approval."""

from contextlib import ExitStack

import pytest

from flower.app.test_apps import tables
from flower.ops.commands import TIMEOUT, nufed_federate
from flower.ops.small_app import simulate, write_app
from nufed.flower.ops.flower_processes import free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.registration import register_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
SITES = 2
METHODS = "[methods.gmeta]\n[methods.scaffold]\n"


def test_one_approval_covers_several_methods_and_settings_within_its_bounds(tmp_path):
    make_authority(tmp_path / "keys")
    for i in range(SITES):
        register_site(tmp_path / "keys", i, f"site-{i}", make_site_key(tmp_path / f"key-{i}"))
    bounds = "[approval]\nrounds = [1, 3]\n"
    app = write_app(tmp_path / "app", SITES, rounds=2, tables=METHODS + bounds)
    config = app / "federation.toml"
    text = config.read_text().replace('curvature = "first_order"\n', "")
    config.write_text(text)
    (port,) = free_ports(1)
    to = ("--server", f"127.0.0.1:{port}", "--ca", "keys/ca.crt")
    with ExitStack() as stack:

        def start(*arguments):
            return stack.enter_context(nufed_federate(tmp_path, *arguments))

        def trained(name, rounds, bounds=bounds):
            """A run with other rounds, not approved again."""
            changed = text.replace("rounds = 2", f"rounds = {rounds}")
            config.write_text(changed.replace("rounds = [1, 3]", bounds.splitlines()[1]))
            return start("run", "app", "--out", name, *to)

        for i in range(SITES):
            approved = start("approve", "app", "--folder", f"site-{i}", "--yes")
            assert approved.wait(TIMEOUT) == 0, approved.printed()
        first = trained("first", 2)
        assert wait(lambda: "waiting up to 60 seconds" in first.printed(), TIMEOUT)
        server = start("server", "--keys", "keys", "--port", port)
        assert wait(lambda: "the server is ready" in server.printed(), TIMEOUT), server.printed()
        for i in range(SITES):
            start("site", "--number", i, "--folder", f"site-{i}", "--key", f"key-{i}", *to)
        assert first.wait(2 * TIMEOUT) == 0, first.printed()
        longer = trained("longer", 3)
        assert longer.wait(2 * TIMEOUT) == 0, longer.printed()
        beyond = trained("beyond", 4, "[approval]\nrounds = [1, 4]")
        assert beyond.wait(2 * TIMEOUT) == 2
        assert "rounds = 4 is outside of the approved 1 … 3" in beyond.printed()
        assert "0 of 2 sites take part (without site 0 (site-0), site 1" in beyond.printed()
    config.write_text(text.replace("rounds = 2", "rounds = 3").replace(METHODS + bounds, ""))
    config.write_text(config.read_text().replace("[federation]", METHODS + "[federation]"))
    simulated = simulate(app, tmp_path / "simulated").path
    assert tables(tmp_path / "longer", "methods") == tables(simulated, "methods")
