"""A site that sends 1500 MiB does not use up the server's memory: it is named and excluded."""

import re
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from flower.ops.commands import TIMEOUT, Federation, home_of, running
from flower.ops.small_app import DATA, write_app
from nufed.flower.ops.flower_processes import wait
from processes import descendants
from support import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

LIAR = 2
# site 2 sends an array of 300 equal chunks of 5 MiB, of which Flower sends one
LYING = (
    DATA
    + f"""

import resource
import sys
from pathlib import Path

from flwr.app import Array
from flwr.app.message.arraychunk import ArrayChunk

import nufed.flower.app.payload as payload

right_load, right_arrays = load, payload.to_arrays

if "flwr-serverapp" in sys.argv[0]:  # it has no room for such an array
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 1400 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def large(vectors):
    records = right_arrays(vectors)
    chunk = ArrayChunk(memoryview(bytes(5 * 2**20)))
    records["model"].__dict__["_chunks"] = [(chunk.object_id, chunk)] * 300
    return records


def load(site):
    if site["partition-id"] == {LIAR}:
        with (Path(site["folder"]) / "loaded").open("a") as file:
            file.write("once\\n")
        payload.to_arrays = large
    return right_load(site)
"""
)


def peak_memory(home):
    """The peak resident memory of the running ServerApp, in bytes; 0: there is none."""
    for pid, command in running(home).items():
        with suppress(OSError):
            if "flwr-serverapp" in command:
                status = Path(f"/proc/{pid}/status").read_text()
                found = re.search(r"VmHWM:\s+(\d+) kB", status)
                return 1024 * int(found[1]) if found else 0
    return 0


def test_a_site_that_sends_1500_mib_is_named_and_not_asked_again_on_resume(tmp_path):
    app = write_app(tmp_path / "app", 3, rounds=2, data=LYING, wait=180.0)
    (tmp_path / f"site-{LIAR}").mkdir()
    out, peaks, loads = tmp_path / "run", [0], []
    loaded = tmp_path / f"site-{LIAR}" / "loaded"

    def ended(process, home):
        peaks.append(peak_memory(home))
        return process.poll() is not None

    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, sites=3)
        home = home_of(min(descendants(federation.server.pid)))
        for rounds, option in ((2, "--out"), (3, "--resume")):
            config = app / "federation.toml"
            config.write_text(config.read_text().replace("rounds = 2", f"rounds = {rounds}"))
            process = federation.run(option, "run")
            assert wait(partial(ended, process, home), 4 * TIMEOUT)
            assert process.returncode == 0, process.printed()
            loads.append(loaded.read_text().count("once"))
    (metrics,) = out.glob("methods/*/seed-*/metrics.jsonl")
    lines = json_lines(metrics)
    assert [[r["agent"] for r in line["rejected"]] for line in lines] == [
        [],
        [LIAR],
        [LIAR],
        [LIAR],
    ]
    large = "its reply is too large: its arrays have 1500 MiB or more"
    assert lines[1]["rejected"][0]["reason"].startswith(large)
    assert lines[3]["rejected"][0]["reason"].startswith(f"excluded since round 1: {large}")
    assert (
        f"site {LIAR} (site-{LIAR}) is excluded from this run: {large}"
        in (out / "log.txt").read_text()
    )
    assert loads == [2, 2]  # evaluated before training, trained once
    assert 0 < max(peaks) < 1000 * 2**20, peaks
    print(f"peak resident memory of the ServerApp: {max(peaks) / 2**20:.0f} MiB")
