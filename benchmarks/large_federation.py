"""A federation with a large model on loopback: seconds and memory of a round at server and sites.

``python benchmarks/large_federation.py [--rounds 3] [--sites 4] [--width 4950] [--codec off]``
trains the app of examples/federation with two hidden layers of that width (4950: 24.9 million
numbers, 100 MB) without encryption, and prints seconds per round and the peak memory of each
process: the SuperLink, the ServerApp, and sites with the children that they fork.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import tomllib
from pathlib import Path

import tomli_w
from federation import train, write_app

from nufed.flower.ops.site_runner import site_command

INTERVAL = 0.2  # seconds between two looks at the processes


def enlarge(app: Path, width: int, codec: str) -> None:
    config = tomllib.loads((app / "federation.toml").read_text())
    config["model"] = {"name": "fcnn", "args": {"hidden": [width, width]}}
    config["baselines"] = []
    config["method"] |= {"adapt_steps": 0, "local_steps": 1, "meta_lr": 0.01}
    if codec != "off":
        config["compression"] = {"codec": codec}
    (app / "federation.toml").write_text(tomli_w.dumps(config))


class Peaks(threading.Thread):
    """The peak resident memory of a single descendant of this process, by its kind, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: dict[str, float] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(INTERVAL):
            for pid in descendants(os.getpid()):
                try:
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                except OSError:  # it has ended
                    continue
                peak = next((int(x.split()[1]) for x in status if x.startswith("VmHWM")), 0)
                kind = kind_of(command)
                self.found[kind] = max(self.found.get(kind, 0.0), peak / 1000)


def kind_of(command: str) -> str:
    kinds = {"serverapp": "ServerApp", "app_process": "ServerApp", "site_process": "site"}
    kinds |= {"superlink": "SuperLink", "server_process": "SuperLink", "federate site": "site"}
    return next((kind for part, kind in kinds.items() if part in command), "others")


def descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return [*children, *(pid for child in children for pid in descendants(child))]


def measure(rounds: int, sites: int, width: int, codec: str) -> tuple[float, dict[str, float]]:
    """Seconds per round without evaluation, and the peaks of memory."""
    peaks = Peaks()
    with tempfile.TemporaryDirectory() as place:
        app = write_app(Path(place) / "federation", sites, rounds)
        enlarge(app, width, codec)
        peaks.start()
        done = train(app, Path(place) / "run", sites, site_command)
        peaks.stop.set()
    return (done[-2] - done[0]).total_seconds() / (len(done) - 2), peaks.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--width", type=int, default=4950)
    parser.add_argument("--codec", default="off")
    options = parser.parse_args()
    seconds, peaks = measure(**vars(options))
    print(f"{seconds:.1f} s per round, {options.sites} sites, without evaluation")
    for name, peak in sorted(peaks.items()):
        print(f"{name}: {peak:,.0f} MB")


if __name__ == "__main__":
    main()
