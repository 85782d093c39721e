"""Killed again and again, a federation's training goes on to the very bits of the simulation."""

import os
import random
import signal
import time
from contextlib import ExitStack

import pytest

from federate.small_app import files_of, simulate, write_app
from federate.test_real import LONGEST, find, home_of, nufed_federate
from nufed.federate.processes import free_ports, wait
from processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS, SITES = 5, 2


class Federation:
    """A server and sites as commands of their own, which stay while runs come and go."""

    def __init__(self, folder, stack, sites=SITES):
        self.folder, self._stack = folder, stack
        (self.port,) = free_ports(1)
        self.address = ("--server", f"127.0.0.1:{self.port}", "--insecure")
        self.server = None
        self.start_server()
        self.sites = [self.start_site(number) for number in range(sites)]

    def _start(self, *arguments):
        return self._stack.enter_context(nufed_federate(self.folder, *arguments))

    def start_server(self):
        self.server = self._start("server", "--port", self.port, "--insecure")
        ready = wait(lambda: "the server is ready" in self.server.printed(), LONGEST)
        assert ready, self.server.printed()

    def start_site(self, number):
        named = ("--number", number, "--name", f"site-{number}")
        return self._start("site", *named, "--folder", f"site-{number}", *self.address)

    def run(self, *arguments):
        return self._start("run", "app", *arguments, *self.address)


def rounds_done(out):
    """The last round that is saved; -1: none."""
    saved = out.glob("methods/*/seed-*/checkpoint-*.json")
    return max((int(path.stem[-6:]) for path in saved), default=-1)


def under_way(process, out, kill):
    """Waits until the training is about to do the round that shall be killed."""

    def there():
        begun = (out / "log.txt").exists() and rounds_done(out) >= kill - 1
        return begun or process.poll() is not None

    assert wait(there, LONGEST) and process.poll() is None, process.printed()


@pytest.mark.parametrize("what", ["flwr-serverapp", "flower-superlink"])
def test_kills_at_random_moments_leave_the_simulators_bits(tmp_path, what):
    seed = random.randrange(10**6)
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    write_app(tmp_path / "app", SITES, rounds=KILLS + 1, wait=180.0)
    out = tmp_path / "run"
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack)
        place = ("--out", "run")
        for kill in range(KILLS):
            process = federation.run(*place)
            under_way(process, out, kill)
            time.sleep(moments.uniform(0, 8))
            before = rounds_done(out)
            os.kill(find(home_of(child_of(federation)), what), signal.SIGKILL)
            assert process.wait(LONGEST) == 2, process.printed()
            assert "--resume run" in process.printed()
            if what == "flower-superlink":
                assert federation.server.wait(LONGEST) == 2
                federation.start_server()
            assert rounds_done(out) >= before
            place = ("--resume", "run")
        process = federation.run(*place)
        assert process.wait(2 * LONGEST) == 0, process.printed()
    log = (out / "log.txt").read_text()
    assert log.count("training goes on after round") >= KILLS - 1  # one may hit before round 0
    simulate(tmp_path / "app", tmp_path / "simulated")
    assert files_of(out) == files_of(tmp_path / "simulated")


def child_of(federation):
    """A process of the server, whose home is that of all its processes."""
    return min(descendants(federation.server.pid))
