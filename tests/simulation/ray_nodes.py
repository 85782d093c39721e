"""Nodes of Ray on this machine, in a process of its own.

`python ray_nodes.py NODES MEGABYTES` prints the cluster's address and then obeys lines of its
standard input: "kill PID" kills a node that is seen to work while the driver with this PID runs,
"kill idle" one that does not, "add" adds one. A node dies with all its processes. It ends with the
input.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import alive, children, descendants, state_and_parent, wait_for

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; avoids a warning
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
# a dead node is seen in about two seconds instead of fifteen; a slow one is not called dead
SOON = {"RAY_health_check_period_ms": "400", "RAY_health_check_initial_delay_ms": "0"}
AT_WORK = "ray::_Actor.run"  # Ray's title of a process that performs a task
ENDED = "no node was seen to work before the run ended"


class Nodes:
    """The process, from outside; ``address`` is for `nufed run --ray`."""

    def __init__(self, process, printed):
        self._process, self._printed = process, printed
        self.pid, self.address = process.pid, process.stdout.readline().strip()

    def __call__(self, command):
        """Do it, and wait until it is done."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer in (command, ENDED), answer or self._printed.read_text()
        return answer == command

    def kill_one_of(self, driver):
        """Kill a node that works for a driver; False if the driver ended before that."""
        return self(f"kill {driver.pid}")


@contextmanager
def nodes(number=3, megabytes=150, *, soon=False):
    """``soon``: a death is noticed soon."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets need a short path
        with (Path(short) / "printed").open("w") as printed:
            process = subprocess.Popen(
                [sys.executable, __file__, str(number), str(megabytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                env={
                    **os.environ,
                    **RAY,
                    **(SOON if soon else {}),
                    "RAY_TMPDIR": short,
                    "PYTHONPATH": str(Path(__file__).parents[1]),
                },
            )
        try:
            found = Nodes(process, Path(short) / "printed")
            assert found.address, (Path(short) / "printed").read_text()
            yield found
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    except OSError:  # it has ended
        return ""


def stop_at_work(pid):
    """Stop the process in the middle of a task, if it performs one."""
    if title(pid) != AT_WORK:
        return False
    with suppress(ProcessLookupError):  # it has ended since
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: state_and_parent(Path(f"/proc/{pid}/stat"))[0] in "TZ")
        if title(pid) == AT_WORK:
            return True
        os.kill(pid, signal.SIGCONT)  # it has just finished
    return False


def at_work(nodes, raylet, driver):
    """One of these nodes, which has a process that is stopped in the middle of a task."""
    while alive({driver}):
        for node in nodes:
            if any(map(stop_at_work, children(raylet(node)))):
                return node
    raise TimeoutError(ENDED)


def main():
    from ray.cluster_utils import Cluster

    number, megabytes = map(int, sys.argv[1:])
    node = {
        "num_cpus": 1,
        "object_store_memory": megabytes * 2**20,
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
    }
    cluster, added = Cluster(initialize_head=True, head_node_args=node), []

    def add():
        added.append(cluster.add_node(**node))

    for _ in range(number - 1):
        add()
    print(cluster.address, flush=True)

    def raylet(node):
        return node.all_processes["raylet"][0].process.pid

    def kill(node):
        added.remove(node)
        below = descendants(raylet(node))
        cluster.remove_node(node, allow_graceful=False)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    for line in sys.stdin:
        command = line.strip()
        try:
            if command == "kill idle":
                kill(added[-1])
            elif command.startswith("kill "):
                kill(at_work(added, raylet, int(command.split()[1])))
            else:
                add()
        except TimeoutError as error:
            command = str(error)
        print(command, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
