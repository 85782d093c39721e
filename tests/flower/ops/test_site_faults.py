"""Real sites that are late, die or send bad updates are named and rejected; the run continues."""

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from flower.ops.commands import TIMEOUT, Federation, home_of, rounds_done
from flower.ops.small_app import DATA, files_of, simulate, write_app
from nufed.flower.ops.flower_processes import Flower, wait
from processes import descendants
from support import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

FAULTY = (
    DATA
    + """

import time
from pathlib import Path

import nufed.flower.app.site_app as at_site

right_load, right_content = load, at_site.content


def load(site):
    folder = Path(site["folder"])
    if (folder / "late").exists():
        time.sleep(200)
    if (folder / "bad").exists():
        at_site.content = lambda vectors=None, **about: right_content(
            vectors and {name: vector * float("nan") for name, vector in vectors.items()}, **about
        )
    return right_load(site)
"""
)


def kill(site):
    """Kill a site's command and its SuperNode with all descendants."""
    home = home_of(min(descendants(site.pid)))
    os.kill(site.pid, signal.SIGKILL)
    own = Flower(Path(home.decode().partition("=")[2]))
    for pid in own.alive():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait(lambda: not own.alive(), TIMEOUT)


def lines(out):
    (metrics,) = out.glob("methods/*/seed-*/metrics.jsonl")
    return json_lines(metrics)


def told(out, text):
    return (out / "log.txt").exists() and text in (out / "log.txt").read_text()


def test_a_late_a_dead_and_a_faulty_site_do_not_end_the_run(tmp_path):
    write_app(tmp_path / "app", 4, rounds=8, data=FAULTY, wait=180.0, deadline=60.0)
    for number in range(4):
        (tmp_path / f"site-{number}").mkdir()
    (tmp_path / "site-3" / "bad").touch()
    out = tmp_path / "run"
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, sites=4)
        process = federation.run("--out", "run")

        def until(condition):
            assert wait(lambda: condition() or process.poll() is not None, 2 * TIMEOUT)
            assert process.poll() is None, process.printed()

        until(lambda: rounds_done(out) >= 1)
        (tmp_path / "site-1" / "late").touch()
        until(lambda: told(out, "it answered too late"))
        (tmp_path / "site-1" / "late").unlink()
        kill(federation.sites[2])
        until(
            lambda: told(out, "offline: site 2 (site-2)") or told(out, "left out: site 2 (site-2)")
        )
        federation.start_site(2)
        assert process.wait(4 * TIMEOUT) == 0, process.printed()
    rejected = {(r["agent"], r["reason"]) for line in lines(out) for r in line["rejected"]}
    assert (3, "'model' is not finite") in rejected
    assert all(3 in {r["agent"] for r in line["rejected"]} for line in lines(out)[1:])
    assert (1, "it answered too late") in rejected
    taken = [
        set(line["cohort"]) - {r["agent"] for r in line["rejected"]} - set(line.get("dropped", ()))
        for line in lines(out)[1:]
    ]
    assert all(0 in each for each in taken)
    assert any(1 not in each for each in taken) and any(2 not in each for each in taken)


def test_without_a_quorum_the_run_fails_with_a_reason_and_resumes_when_sites_are_back(tmp_path):
    write_app(tmp_path / "app", 2, rounds=3, wait=60.0, deadline=60.0, top="min_updates = 2")
    out = tmp_path / "run"
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, sites=2)
        process = federation.run("--out", "run")
        assert wait(lambda: rounds_done(out) >= 1 or process.poll() is not None, 2 * TIMEOUT)
        kill(federation.sites[1])
        assert process.wait(4 * TIMEOUT) == 2, process.printed()
        assert "fewer than min_updates = 2" in process.printed()
        federation.start_site(1)
        process = federation.run("--resume", "run")
        assert process.wait(4 * TIMEOUT) == 0, process.printed()
    simulate(tmp_path / "app", tmp_path / "simulated")
    # except for the failed attempts
    assert (
        files_of(out)["model.safetensors"] == files_of(tmp_path / "simulated")["model.safetensors"]
    )
