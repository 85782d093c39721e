"""The commands with real processes: a server, sites and runs, and how they end."""

import os
import re
import signal

import pytest

from flower.ops.commands import TIMEOUT, home_of, nufed_federate, running
from flower.ops.fake_app import FOREVER, write_app
from nufed.flower.ops.flower_processes import free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from processes import alive, descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def begun(process):
    """Waits until the app is in its first round; returns its PID."""
    assert wait(lambda: "round 1" in process.printed() or process.poll() is not None, TIMEOUT)
    pid = re.search(r"round 1, process (\d+)", process.printed())
    assert pid, process.printed()
    return int(pid[1])


def test_one_command_runs_an_app_on_a_federation_and_leaves_no_process(tmp_path):
    write_app(tmp_path / "app", "finish(out, part)", sites=3)
    with nufed_federate(tmp_path, "local", "app", "--out", "out") as process:
        home = home_of(begun(process))
        assert process.wait(TIMEOUT) == 0, process.printed()
    assert process.printed().endswith("report: out/report.html\n")
    assert "and 3 sites" in process.printed()
    assert {path.name for path in (tmp_path / "out-federation").glob("site-?")} == {
        *("site-0", "site-1", "site-2")
    }
    assert not running(home)


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("fail(out, part)", "the run failed: no site came within 3 seconds."),
        ("1 / 0", "the run failed: ServerApp failed with exception: division by zero."),
    ],
)
def test_a_run_that_fails_says_why_and_how_to_resume(tmp_path, then, words):
    write_app(tmp_path / "app", then)
    with nufed_federate(tmp_path, "local", "app", "--out", "out", "--insecure") as process:
        home = home_of(begun(process))
        assert process.wait(TIMEOUT) == 2
    assert words in process.printed()
    assert process.printed().endswith(
        "corrected, resume with: nufed federate local app --resume out\n"
    )
    assert not running(home)


@pytest.mark.parametrize(
    ("killed", "words"),
    [
        ("flwr-serverapp", "No heartbeat"),
        ("ops.server_process", "or is unreachable: Connection to the SuperLink is unavailable"),
    ],
)
def test_a_run_whose_server_was_killed_fails_and_can_be_resumed(tmp_path, killed, words):
    app = write_app(tmp_path / "app", FOREVER)
    with nufed_federate(tmp_path, "local", "app", "--out", "out", "--insecure") as process:
        home = home_of(begun(process))
        (pid,) = [pid for pid, command in running(home).items() if killed in command]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(TIMEOUT) == 2
    assert words in process.printed() and "local app --resume out" in process.printed()
    assert not running(home)
    source = app / "fake" / "app.py"
    source.write_text(source.read_text().replace(FOREVER, "finish(out, part)"))
    with nufed_federate(tmp_path, "local", "app", "--resume", "out", "--insecure") as process:
        assert process.wait(TIMEOUT) == 0, process.printed()
    assert process.printed().count("round 1") == 1  # the old lines are not shown again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_no_process_and_says_how_to_resume(tmp_path, number):
    write_app(tmp_path / "app", FOREVER)
    with nufed_federate(tmp_path, "local", "app", "--out", "out", "--insecure") as process:
        home = home_of(begun(process))
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 130
    assert process.printed().endswith(
        "stopped. Resume with: nufed federate local app --resume out\n"
    )
    assert not running(home)


def test_a_site_registered_later_and_runs_before_and_after_a_server_restart(tmp_path):
    make_authority(tmp_path / "keys")
    (tmp_path / "site").mkdir()
    make_site_key(tmp_path / "site" / "key")
    write_app(tmp_path / "app", "finish(out, part)")
    (port,) = free_ports(1)
    address, ca = f"127.0.0.1:{port}", ("--ca", "keys/ca.crt")
    serve = ("server", "--keys", "keys", "--port", port)
    attend = ("site", "--number", 0, "--server", address, *ca, "--key", "site/key", "--any-app")
    run = ("run", "app", "--server", address, *ca)
    with nufed_federate(tmp_path, *serve) as server:
        assert wait(lambda: "the server is ready" in server.printed(), TIMEOUT), server.printed()
        register = ("register", "site/key.pub", "--number", 0, "--name", "Ward 3")
        with nufed_federate(tmp_path, *register) as process:
            assert process.wait(TIMEOUT) == 0, process.printed()
        assert wait(lambda: "registered site 0 ('Ward 3'" in server.printed(), TIMEOUT)
        with nufed_federate(tmp_path, *attend) as site:
            with nufed_federate(tmp_path, *run, "--out", "first") as process:
                assert process.wait(TIMEOUT) == 0, process.printed()
            below = descendants(server.pid)
            server.send_signal(signal.SIGINT)
            assert server.wait(TIMEOUT) == 0, server.printed()
            assert not alive(below)
            with nufed_federate(tmp_path, *serve) as server:
                assert wait(lambda: "the server is ready" in server.printed(), TIMEOUT)
                with nufed_federate(tmp_path, *run, "--out", "second") as process:
                    assert process.wait(TIMEOUT) == 0, process.printed()
            assert "rejoining" in site.printed()
            below = descendants(site.pid)
            site.send_signal(signal.SIGTERM)
            assert site.wait(TIMEOUT) == 0, site.printed()
            assert not alive(below)
