"""The commands with real processes: a server, sites and runs, and how they end."""

import os
import re
import signal

import pytest

from federate.commands import LONGEST, home_of, nufed_federate, running
from federate.fake_app import FOREVER, write_app
from nufed.federate.keys import make_authority, make_site_key
from nufed.federate.processes import free_ports, wait
from processes import alive, descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def begun(process):
    """Waits until the app is in its first round; the id of its process."""
    assert wait(lambda: "round 1" in process.printed() or process.poll() is not None, LONGEST)
    pid = re.search(r"round 1, process (\d+)", process.printed())
    assert pid, process.printed()
    return int(pid[1])


def test_one_command_runs_an_app_on_a_federation_and_leaves_no_process(tmp_path):
    write_app(tmp_path / "app", "finish(out, part)", sites=3)
    with nufed_federate(tmp_path, "local", "app", "--out", "out") as process:
        home = home_of(begun(process))
        assert process.wait(LONGEST) == 0, process.printed()
    assert process.printed().endswith("report: out/report.html\n")
    assert "a server and 3 sites" in process.printed()
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
def test_a_run_that_fails_says_why_and_how_to_go_on(tmp_path, then, words):
    write_app(tmp_path / "app", then)
    with nufed_federate(tmp_path, "local", "app", "--out", "out", "--insecure") as process:
        home = home_of(begun(process))
        assert process.wait(LONGEST) == 2
    assert words in process.printed()
    assert process.printed().endswith("Go on with: nufed federate local app --resume out\n")
    assert not running(home)


@pytest.mark.parametrize(
    ("killed", "words"),
    [
        ("flwr-serverapp", "No heartbeat"),
        ("flower-superlink", "or is gone: Connection to the SuperLink is unavailable"),
    ],
)
def test_a_run_whose_server_was_killed_ends_and_goes_on_when_asked(tmp_path, killed, words):
    app = write_app(tmp_path / "app", FOREVER)
    with nufed_federate(tmp_path, "local", "app", "--out", "out", "--insecure") as process:
        home = home_of(begun(process))
        (pid,) = [pid for pid, command in running(home).items() if killed in command]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(LONGEST) == 2
    assert words in process.printed() and "local app --resume out" in process.printed()
    assert not running(home)
    source = app / "fake" / "app.py"
    source.write_text(source.read_text().replace(FOREVER, "finish(out, part)"))
    with nufed_federate(tmp_path, "local", "app", "--resume", "out", "--insecure") as process:
        assert process.wait(LONGEST) == 0, process.printed()
    assert process.printed().count("round 1") == 1  # the old lines are not shown again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_no_process_and_says_how_to_go_on(tmp_path, number):
    write_app(tmp_path / "app", FOREVER)
    with nufed_federate(tmp_path, "local", "app", "--out", "out", "--insecure") as process:
        home = home_of(begun(process))
        process.send_signal(number)
        assert process.wait(LONGEST) == 130
    assert process.printed().endswith(
        "stopped. Go on with: nufed federate local app --resume out\n"
    )
    assert not running(home)


def test_a_server_a_site_that_comes_later_and_runs_with_the_servers_restart_between(tmp_path):
    make_authority(tmp_path / "keys")
    (tmp_path / "site").mkdir()
    make_site_key(tmp_path / "site" / "key")
    write_app(tmp_path / "app", "finish(out, part)")
    (port,) = free_ports(1)
    address, ca = f"127.0.0.1:{port}", ("--ca", "keys/ca.crt")
    serve = ("server", "--keys", "keys", "--port", port)
    attend = ("site", "--number", 0, "--server", address, *ca, "--key", "site/key")
    run = ("run", "app", "--server", address, *ca)
    with nufed_federate(tmp_path, *serve) as server:
        assert wait(lambda: "the server is ready" in server.printed(), LONGEST), server.printed()
        register = ("register", "site/key.pub", "--server", address, *ca)
        with nufed_federate(tmp_path, *register) as process:
            assert process.wait(LONGEST) == 0, process.printed()
        with nufed_federate(tmp_path, *attend) as site:
            with nufed_federate(tmp_path, *run, "--out", "first") as process:
                assert process.wait(LONGEST) == 0, process.printed()
            below = descendants(server.pid)
            server.send_signal(signal.SIGINT)
            assert server.wait(LONGEST) == 0, server.printed()
            assert not alive(below)
            with nufed_federate(tmp_path, *serve, "--site-key", "site/key.pub") as server:
                assert wait(lambda: "the server is ready" in server.printed(), LONGEST)
                with nufed_federate(tmp_path, *run, "--out", "second") as process:
                    assert process.wait(LONGEST) == 0, process.printed()
            assert "joining again" in site.printed()
            below = descendants(site.pid)
            site.send_signal(signal.SIGTERM)
            assert site.wait(LONGEST) == 0, site.printed()
            assert not alive(below)
