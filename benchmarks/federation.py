"""Seconds per round of a federation: sites as processes of nufed, and as Flower's SuperNodes.

``python benchmarks/federation.py [--rounds 5] [--sites 4]`` trains the app of examples/federation
on this machine twice, one after the other, with the same server process and without encryption,
and checks that both give the same model.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import tomli_w

from nufed.flower.ops.flower_processes import flower, free_ports
from nufed.flower.ops.link import Link
from nufed.flower.ops.site_runner import SiteOptions, site_command
from nufed.flower.ops.submit import follow
from nufed.flower.ops.superlink import start_superlink
from nufed.lab.files import sha256_of

EXAMPLE = Path(__file__).parent.parent / "examples" / "federation"
Command = Callable[[SiteOptions, Link], list[str]]


def supernode_command(site: SiteOptions, link: Link) -> list[str]:
    """Flower's SuperNode, which starts a process for every message."""
    (port,) = free_ports(1)
    config = " ".join(f"{key}={value!r}" for key, value in site.config().items())
    where = ["--superlink", link.address, "--port", str(port), "--node-config", config]
    return ["flower-supernode", "--insecure", *where]


def train(app: Path, out: Path, sites: int, command: Command) -> list[datetime]:
    """Train with sites that are started by a command; returns when each round was recorded."""
    with flower() as commands:
        (port,) = free_ports(1)
        log = out.with_suffix(".log")
        _, link = start_superlink(commands, "127.0.0.1", port, None, log=log)
        link.connect(commands)
        for number in range(sites):
            site = SiteOptions(number, None, folder=out.with_name(f"{out.name}-{number}"))
            commands.start(*command(site, link), log=log)
        follow(commands, app, out, print, "")
    lines = (out / "log.txt").read_text().splitlines()
    return [datetime.fromisoformat(line[:23]) for line in lines if " INFO round " in line]


def write_app(folder: Path, sites: int, rounds: int) -> Path:
    shutil.copytree(EXAMPLE, folder)
    config = tomllib.loads((folder / "federation.toml").read_text())
    config |= {"rounds": rounds, "eval_every": rounds}
    config["data"]["agents"] = sites
    (folder / "federation.toml").write_text(tomli_w.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=4)
    options = parser.parse_args()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import nufed.flower"], check=True)
    print(f"starting Python and importing nufed: {time.perf_counter() - began:.1f} s")
    models = set()
    with tempfile.TemporaryDirectory() as place:
        app = write_app(Path(place) / "federation", options.sites, options.rounds)
        ways: dict[str, Command] = {"nufed": site_command, "supernode": supernode_command}
        for name, command in ways.items():
            out = Path(place) / name
            done = train(app, out, options.sites, command)
            # the last round is evaluated too
            seconds = (done[-2] - done[0]).total_seconds() / (len(done) - 2)
            print(f"{name}: {seconds:.1f} s per round, {options.sites} sites, one message each")
            models.add(sha256_of(next(out.rglob("model.safetensors"))))
    if len(models) != 1:
        sys.exit("the models differ")


if __name__ == "__main__":
    main()
