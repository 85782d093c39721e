"""Nodes of Ray on this machine, in a process of its own.

`python ray_nodes.py NODES MEGABYTES` prints the cluster's address and then obeys lines of its
standard input: "kill" kills the node that was added last, "add" adds one; it ends with the input.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; avoids a warning
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class Nodes:
    """The process, from outside; ``address`` is for `nufed run --ray`."""

    def __init__(self, process):
        self._process = process
        self.pid, self.address = process.pid, process.stdout.readline().strip()

    def __call__(self, command):
        """Do it, and wait until it is done."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == command


@contextmanager
def nodes(number=3, megabytes=150):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets need a short path
        with (Path(short) / "printed").open("w") as printed:
            process = subprocess.Popen(
                [sys.executable, __file__, str(number), str(megabytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                env={**os.environ, **RAY, "RAY_TMPDIR": short},
            )
        try:
            found = Nodes(process)
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
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(added.pop(), allow_graceful=False)
        else:
            add()
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
