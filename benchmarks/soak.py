"""make soak: a federation on loopback under random kills, for hours.

    python benchmarks/soak.py --minutes 120 --sites 20

starts a server with TLS and keys, nginx in front of it with the shipped configuration, and sites as
`nufed federate` runs them, and trains while sites, the server, its run and nginx are killed at
random moments (seeded, bounded) and started again as a process supervisor does. At the end every
round must have the bits of a simulation that replays its recorded participants, and no process may
have grown by more than 5 % after the warm-up. Prints both as JSON; exit code 1 if one fails.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from soak_checks import Memory, different_rounds, recorded_rounds

from nufed.flower import App
from nufed.flower.ops.approvals import Approvals, read_app
from nufed.flower.ops.flower_processes import free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.local import new_app
from nufed.flower.ops.registration import register_site

NGINX_CONF = Path(__file__).parent.parent / "examples" / "federation" / "nginx.conf"
MARK = "NUFED_SOAK"  # in the environment of every process of a service
MOST_GROWTH = 0.05
END = 600.0  # seconds to finish the last rounds without kills
QUIET = 60.0  # seconds without kills at start and end
ROUNDS = 10**6  # more than fit into the time
CONFIG = """
name = "soak"
rounds = {rounds}
participation = 1.0
eval_every = 1000000
save_every = 1
min_updates = {quorum}
[data]
agents = {sites}
[model]
name = "fcnn"
args = {{hidden = [32]}}
[method]
algorithm = "scaffold"
meta_lr = 0.1
batch_size = 10
local_steps = 2
[federation]
input_shape = [20]
classes = ["a", "b", "c"]
wait = 60
deadline = 15
"""
DATA = """
import numpy as np


def load(site):
    number = site["partition-id"]
    inputs = np.random.default_rng(number).normal(size=(100 + number, 20)).astype("float32")
    return inputs, (inputs @ np.random.default_rng(99).normal(size=(20, 3))).argmax(axis=1)
"""


class Service:
    """A command that is started again after it has exited, as a process supervisor does."""

    def __init__(self, name, command, folder, stack):
        self.name, self._command, self._folder = name, command, folder
        self._mark = f"{folder}/{name}"
        self.process, self._due = None, 0.0
        stack.callback(self.kill)

    def keep(self, delay=3.0):
        """Start it if it does not run, ``delay`` seconds after it was found to have exited."""
        if self.process is None or (
            self.process.poll() is not None and time.monotonic() > self._due
        ):
            with (self._folder / f"{self.name}.log").open("ab") as log:
                self.process = subprocess.Popen(
                    self._command(),
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, MARK: self._mark},
                    start_new_session=True,
                )
            self._due = float("inf")
        elif self.process.poll() is not None and self._due == float("inf"):
            self._due = time.monotonic() + delay

    def processes(self):
        """The PIDs of the command and its descendants, with their command lines."""
        entry, found = f"{MARK}={self._mark}".encode(), {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if entry in path.read_bytes().split(b"\0"):
                    found[int(path.parent.name)] = path.with_name("cmdline").read_bytes().decode()
        return found

    def kill(self, part=""):
        """Kill all of its processes, or those with ``part`` in their command line."""
        while found := [pid for pid, line in self.processes().items() if part in line]:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if part:
                break
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)

    def stop(self):
        """Terminate it as its user does, and wait until it has exited."""
        self.process.terminate()
        self.process.wait(120)
        self._due = 0.0

    def printed(self):
        path = self._folder / f"{self.name}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""


class Soak:
    """A federation's services in a folder, and its one run."""

    def __init__(self, folder, sites, stack):
        self.folder, self.sites = folder, sites
        self.run, self.app = folder / "run", folder / "app"
        self._port, self._front = free_ports(2)
        new_app(self.app)
        (self.app / "my_data.py").write_text(DATA)
        self.set_rounds(ROUNDS)
        make_authority(folder / "keys")
        for n in range(sites):
            key = make_site_key(folder / f"site-{n}.key")
            register_site(folder / "keys", n, f"site-{n}", key)
        self.services = {
            "server": Service("server", self._server, folder, stack),
            "proxy": Service("proxy", self._nginx, folder, stack),
            **{
                f"site-{n}": Service(f"site-{n}", lambda n=n: self._site(n), folder, stack)
                for n in range(sites)
            },
        }
        self.trainer = Service("run", self._trainer, folder, stack)

    def set_rounds(self, rounds):
        """Write the app's configuration, and approve the app at every site."""
        text = CONFIG.format(rounds=rounds, sites=self.sites, quorum=max(1, self.sites // 2))
        (self.app / "federation.toml").write_text(text)
        for number in range(self.sites):
            Approvals.of_site(self.folder / f"site-{number}").add(read_app(self.app))

    def rounds_done(self):
        saved = self.run.glob("methods/*/seed-*/checkpoint-*.safetensors")
        return max((int(path.stem[-6:]) for path in saved), default=-1)

    def _server(self):
        return nufed("server", "--keys", "keys", "--port", str(self._port))

    def _nginx(self):
        text = NGINX_CONF.read_text()
        for was, now in (
            ("listen 443 ssl;", f"listen 127.0.0.1:{self._front} ssl;"),
            ("server 127.0.0.1:8000;", f"server 127.0.0.1:{self._port};"),
        ):
            assert text.count(was) == 1, was
            text = text.replace(was, now)
        place = self.folder / "keys"
        (place / "nginx.conf").write_text(text)
        user = " user root;" if os.geteuid() == 0 else ""
        where = ("-p", str(place), "-c", str(place / "nginx.conf"), "-e", "error.log")
        return [shutil.which("nginx"), *where, "-g", f"daemon off;{user}"]

    def _site(self, number):
        link = ("--server", f"127.0.0.1:{self._front}", "--ca", "keys/ca.crt")
        own = ("--key", f"site-{number}.key", "--folder", f"site-{number}", "--any-app")
        return nufed("site", "--number", str(number), *link, *own)

    def _trainer(self):
        begun = (self.run / "run.json").exists()
        link = ("--server", f"127.0.0.1:{self._port}", "--ca", "keys/ca.crt")
        return nufed("run", "app", "--resume" if begun else "--out", "run", *link)

    def keep(self, memory):
        """Start what has exited, and sample the memory of what lives."""
        for service in (*self.services.values(), self.trainer):
            service.keep()
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for name, service in self.services.items():
            for pid, line in service.processes().items():
                role = f"{name.partition('-')[0]}: {role_of(line)}"
                with suppress(OSError):
                    memory.sample(role, pid, now - started(pid))


def nufed(*arguments):
    return [sys.executable, "-m", "nufed", "federate", *arguments]


def role_of(line):
    """A short name of a process from its command line."""
    for name in ("server_process", "site_process", "flwr-serverapp", "flower-superexec"):
        if name in line:
            return name
    found = re.search(r"flower-\w+|nginx: \w+|nufed\.cli", line)
    return found[0] if found else "other"


def started(pid):
    """When a process started, in seconds since boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def schedule(seed, seconds, sites):
    """Moments and victims, ascending; the server and its run are killed once in 20 minutes."""
    draws, moment, kills = random.Random(seed), QUIET, []
    bounds = Counter(server=1 + int(seconds / 1200), run=1 + int(seconds / 1200))
    bounds["proxy"] = 1 + int(seconds / 600)
    while (moment := moment + draws.uniform(20, 70)) < seconds - QUIET:
        victim = draws.choice(["site"] * 6 + ["server", "run", "proxy", "proxy"])
        if victim == "site" or not bounds[victim]:
            kills.append((moment, f"site-{draws.randrange(sites)}"))
        else:
            bounds[victim] -= 1
            kills.append((moment, victim))
    return kills


def soak(folder, *, minutes, sites, seed, warm_up):
    """Run it; returns what was measured."""
    memory, done = Memory(60 * warm_up), Counter()
    with ExitStack() as stack:
        federation = Soak(folder, sites, stack)
        federation.services["server"].keep()
        ready = "the server is ready"
        assert wait(lambda: ready in federation.services["server"].printed(), 300)
        begun = time.monotonic()
        kills = schedule(seed, 60 * minutes, sites)
        while (now := time.monotonic() - begun) < 60 * minutes:
            federation.keep(memory)
            if kills and now > kills[0][0]:
                _, victim = kills.pop(0)
                if victim == "run":
                    federation.services["server"].kill("flwr-serverapp")
                else:
                    federation.services[victim].kill()
                done[victim.partition("-")[0]] += 1
                say(f"{now:.0f} s: killed {victim}; {federation.rounds_done()} rounds")
            time.sleep(2)
        federation.trainer.stop()
        finish(federation, memory)
    spec = spec_from_file_location("soak_data", federation.app / "my_data.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = [module.load({"partition-id": number}) for number in range(sites)]
    plan = App(federation.app / "federation.toml", module.load).plan()
    rounds, _ = recorded_rounds(federation.run)
    return {
        "minutes": minutes,
        "sites": sites,
        "seed": seed,
        "kills": dict(done),
        "rounds": len(rounds),
        "rounds_without_some_site": sum(len(line.participants) < sites for line in rounds),
        "rounds_with_other_bits": different_rounds(federation.run, plan, parts),
        "memory": memory.growth(),
    }


def finish(federation, memory):
    """Two more rounds without kills, so that the run completes, with its report."""
    federation.set_rounds(federation.rounds_done() + 2)
    end = time.monotonic() + END
    while not (federation.run / "report.html").exists():
        federation.keep(memory)
        assert time.monotonic() < end, federation.trainer.printed()[-2000:]
        time.sleep(2)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--warm-up", type=float, default=10, help="minutes")
    given = vars(parser.parse_args())
    if not shutil.which("nginx"):
        sys.exit("the soak needs nginx, which is not installed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the services, too
    folder = Path(tempfile.mkdtemp(prefix="nufed-soak-"))
    say(f"logs and the run: {folder}")
    measured = soak(folder, **given)
    print(json.dumps(measured, indent=2))
    grown = [name for name, each in measured["memory"].items() if each["growth"] > MOST_GROWTH]
    if measured["rounds_with_other_bits"] or grown:
        sys.exit(f"other bits in rounds {measured['rounds_with_other_bits']}; grown: {grown}")


if __name__ == "__main__":
    main()
