"""Privacy budgets with real processes: kept across a kill, infeasible ones refused."""

import os
import signal
from contextlib import ExitStack

import pytest

from flower.ops.commands import TIMEOUT, Federation, find, home_of, rounds_done
from flower.ops.small_app import write_app
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.ops.flower_processes import wait
from nufed.lab.files import read_sealed
from nufed.lab.runs import load_run
from processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
ROUNDS, NOISE = 12, 4.0  # many more rounds than are done when the server is killed
PRIVACY = f"[privacy]\nclip = 0.5\nnoise = {NOISE}\nepsilon_server = "


def test_a_killed_private_federation_spends_the_same_as_an_uninterrupted_one(tmp_path):
    budget = server_epsilon(NOISE, ROUNDS, 1e-5) * 1.001  # no round may be charged twice
    write_app(tmp_path / "app", 2, rounds=ROUNDS, wait=180.0, tables=f"{PRIVACY}{budget}\n")
    out = tmp_path / "run"
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, sites=2)
        process = federation.run("--out", "run")
        assert wait(lambda: rounds_done(out) >= 1 or process.poll() is not None, 2 * TIMEOUT)
        wait(lambda: process.poll() is not None, 1)  # into the middle of a round
        server = home_of(min(descendants(federation.server.pid)))
        os.kill(find(server, "flwr-serverapp"), signal.SIGKILL)
        assert process.wait(TIMEOUT) == 2, process.printed()
        process = federation.run("--resume", "run")
        assert process.wait(4 * TIMEOUT) == 0, process.printed()
    spent = read_sealed(out / "privacy.json").about
    assert spent["rounds"] == ROUNDS
    assert spent["epsilon"]["server"] == pytest.approx(server_epsilon(NOISE, ROUNDS, 1e-5))
    run = load_run(out)
    (metrics,) = out.glob("methods/*/seed-*/metrics.jsonl")
    assert not run.rows() and "evaluation" not in metrics.read_text()
    assert (out / "report.html").exists() and list((out / "bundles").iterdir())


def test_an_infeasible_budget_is_refused_before_any_request(tmp_path):
    write_app(tmp_path / "app", 2, rounds=ROUNDS, tables=f"{PRIVACY}0.1\n")
    with ExitStack() as stack:
        federation = Federation(tmp_path, stack, sites=0)
        process = federation.run("--out", "run")
        assert process.wait(TIMEOUT) == 2
        assert f"epsilon_server = 0.1: {ROUNDS} rounds" in process.printed(), process.printed()
    assert not (tmp_path / "run" / "run.json").exists()
