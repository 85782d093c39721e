"""Killed repeatedly, a federation's training resumes to the bits of the simulation."""

import os
import random
import signal
import time
from contextlib import ExitStack

import pytest

from flower.ops.commands import TIMEOUT, Federation, find, home_of, rounds_done
from flower.ops.small_app import files_of, simulate, write_app
from nufed.flower.ops.flower_processes import wait
from nufed.lab.runs.audit_log import audit
from processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
KILLS, SITES = 5, 2
ROUNDS = 50  # more than are done before the last kill


def under_way(process, out, before):
    """Waits until one more round is done than before the process was started."""
    assert wait(lambda: rounds_done(out) > before or process.poll() is not None, TIMEOUT)
    assert process.poll() is None, process.printed()


@pytest.mark.parametrize("what", ["flwr-serverapp", "ops.server_process"])
def test_kills_at_random_moments_leave_the_simulators_bits(tmp_path, what):
    seed = random.randrange(10**6)
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    write_app(tmp_path / "app", SITES, rounds=ROUNDS, wait=180.0)
    out = tmp_path / "run"
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, SITES)
        place = ("--out", "run")
        for _ in range(KILLS):
            before = rounds_done(out)
            process = federation.run(*place)
            under_way(process, out, before)
            time.sleep(moments.uniform(0, 3))
            before = rounds_done(out)
            os.kill(find(home_of(child_of(federation)), what), signal.SIGKILL)
            assert process.wait(TIMEOUT) == 2, process.printed()
            assert "--resume run" in process.printed()
            if what == "ops.server_process":
                assert federation.server.wait(TIMEOUT) == 2
                federation.start_server()
            assert rounds_done(out) >= before
            place = ("--resume", "run")
        process = federation.run(*place)
        assert process.wait(4 * TIMEOUT) == 0, process.printed()
    log = (out / "log.txt").read_text()
    assert log.count("training resumes after round") == KILLS
    events = [event["event"] for event in audit(out / "audit.jsonl").events]
    assert events.count("resumed") == KILLS and events[-1] == "finished"
    simulate(tmp_path / "app", tmp_path / "simulated")
    assert files_of(out) == files_of(tmp_path / "simulated")


def child_of(federation):
    """A process of the server; all of them share one home."""
    return min(descendants(federation.server.pid))
