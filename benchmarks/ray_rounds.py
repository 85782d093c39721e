"""What a round costs beside its agents' work: in worker processes, and on a cluster of Ray.

    python benchmarks/ray_rounds.py [ROUNDS]

Three agents return the vector that they receive, of 1 MB and of 100 MB, and do nothing else. The
cluster has three nodes on this machine, an actor on each, so that no vector crosses a network.
Prints the median, the least and the largest seconds of a round, and CPU-seconds of all processes.
"""

import statistics
import sys

import torch
from measure import interleaved
from ray_nodes import nodes

from nufed.algorithms import fedavg
from nufed.algorithms.protocol import AgentResult, Context, Cost
from nufed.simulation import RayCluster, RayEngine, WorkerEngine

AGENTS, MEGABYTES = 3, (1, 100)


class Echo:
    """An engine whose agents do no work."""

    objective = federation = None
    seed = 0

    def chunks(self, algorithm, agents):
        return [[agent] for agent in agents]

    def agent_updates(self, algorithm, received, states, context):
        return {
            agent: AgentResult({"model": received["model"].clone()}, {}, Cost()) for agent in states
        }


def rounds_of(engine, algorithm, vector):
    def work():
        context = Context(1, AGENTS, AGENTS)
        states = {agent: {} for agent in range(AGENTS)}
        results = engine.agent_updates(algorithm, {"model": vector}, states, context)
        assert len(results) == AGENTS

    return work


def main(rounds=20):
    algorithm = fedavg(meta_lr=0.1, batch_size=1)
    with nodes(3, megabytes=1000) as running:
        cluster = RayCluster(running.address)
        for size in MEGABYTES:
            vector = torch.ones(size * 10**6 // 4)
            with (
                WorkerEngine(Echo(), AGENTS, Echo) as processes,
                RayEngine(cluster, Echo(), Echo) as actors,
            ):
                engines = {"here": Echo(), "worker processes": processes, "Ray": actors}
                contenders = {n: rounds_of(e, algorithm, vector) for n, e in engines.items()}
                repeats = rounds if size < 10 else max(3, rounds // 4)
                for name, times in interleaved(contenders, repeats).items():
                    show(f"{size:4} MB  {name:17}", times)
        cluster.close()


def show(what, times):
    seconds, cpu = (sorted(times[key]) for key in ("seconds", "cpu"))
    middle = statistics.median(seconds)
    print(
        f"{what} {middle * 1e3:8.1f} ms ({seconds[0] * 1e3:.1f} … {seconds[-1] * 1e3:.1f}), "
        f"{statistics.median(cpu) * 1e3:.0f} ms of CPU",
        flush=True,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
