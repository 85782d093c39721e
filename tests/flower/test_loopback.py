"""One real federation on this machine: a SuperLink and two SuperNodes, over loopback only."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flower.in_memory import agents_data, plan_of
from flower.test_parity import simulated
from nufed import FirstOrder, GMeta
from nufed.flower import SETTINGS
from processes import wait_for

ALGORITHM = GMeta(1, 0.2, 0.3, 2, 6, FirstOrder())
BIN = Path(sys.executable).parent
TESTS = Path(__file__).parents[1]
LONGEST = 200  # seconds until a federation is given up

PROJECT = """
[project]
name = "loopback"
version = "1.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "nufed"

[tool.flwr.app.components]
serverapp = "loopback.app:server"
clientapp = "loopback.app:site"
"""
APP = """
import json
from pathlib import Path

from safetensors.torch import save_file

from flower.in_memory import agents_data
from flower.test_loopback import plan
from nufed.flower import client_app, server_app

OUT = Path("{out}")


def finish(outcome):
    save_file(dict(outcome.progress.server), OUT / "model.safetensors")
    (OUT / "unfinished").write_text(json.dumps([each.record() for each in outcome.scores]))
    (OUT / "unfinished").rename(OUT / "scores.json")


server = server_app(lambda context: plan(), finish)
site = client_app(
    lambda context: plan(), lambda context: agents_data(2)[context.node_config["partition-id"]]
)
"""


def plan():
    return plan_of(ALGORITHM, agents=2, rounds=2, wait=100.0, deadline=100.0)


def free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def processes(logs, environment):
    """Starts commands of Flower; all of them and what they started is ended, whatever happens."""
    started = []

    def start(name, *command):
        with (logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        wait_for(lambda: not end_all(environment["FLWR_HOME"]))
        for process in started:
            process.wait()


def end_all(home):
    """Kill the processes with this home, a folder of this test; some detach from their parents."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is not ours
            if f"FLWR_HOME={home}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


@pytest.mark.timeout(600)  # every message is a process that imports torch
def test_a_real_federation_gives_the_simulators_model_and_scores(tmp_path):
    home, out, app = (tmp_path / name for name in ("home", "out", "app"))
    for folder in (home, out, app / "loopback"):
        folder.mkdir(parents=True)
    link, *nodes = free_ports(3)
    address = f"127.0.0.1:{link}"
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n')
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "loopback" / "__init__.py").touch()
    (app / "loopback" / "app.py").write_text(APP.format(out=out))
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent / "src")))
    environment = {
        **os.environ,
        **SETTINGS,
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PYTHONPATH": paths,
        "PATH": os.pathsep.join((str(BIN), os.environ["PATH"])),  # Flower starts its own commands
    }

    with processes(tmp_path, environment) as start:
        superlink = start("superlink", "flower-superlink", "--insecure", "--port", str(link))
        wait_for(lambda: listens(link) or superlink.poll() is not None, LONGEST)
        assert superlink.poll() is None, logs(tmp_path)
        sites = [
            start(
                f"site-{number}",
                *("flower-supernode", "--insecure", "--superlink", address),
                *("--port", str(port), "--node-config", f"partition-id={number}"),
            )
            for number, port in enumerate(nodes)
        ]
        assert start("run", "flwr", "run", str(app), "here").wait(LONGEST) == 0, logs(tmp_path)

        def ended():
            return any(process.poll() is not None for process in (superlink, *sites))

        with suppress(AssertionError):  # the next one shows what happened
            wait_for(lambda: (out / "scores.json").exists() or ended(), LONGEST)
    assert (out / "scores.json").exists(), logs(tmp_path)
    right, scores = simulated(plan(), agents_data(2))
    assert torch.equal(load_file(out / "model.safetensors")["model"], right[-1].server["model"])
    assert json.loads((out / "scores.json").read_text()) == json.loads(
        json.dumps([each.record() for each in scores])
    )


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def logs(folder):
    return "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
