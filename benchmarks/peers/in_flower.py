"""Flower's simulation with Ray: agents train with the PyTorch loop of plain.py in Ray's actors."""

import os
from functools import cache

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from problem import EVALUATION, LOCAL_STEPS, METHODS, load, paper_module

from jobs import CURVATURES, Plain  # isort: skip

client = ClientApp()


@cache  # once in every actor
def loop_of(folder, batch_size):
    torch.set_num_threads(1)
    data = load(folder)
    return Plain(paper_module(data.samples.inputs.shape[1]), data, batch_size, LOCAL_STEPS)


def started(message, context):
    """The loop with the received model, and the agent."""
    settings = message.content["settings"]
    plain = loop_of(settings["folder"], settings["batch"])
    arrays = message.content["model"].values()
    plain.loop.w = [torch.from_numpy(array.numpy().copy()) for array in arrays]
    return plain, settings, int(context.node_config["partition-id"])


def record(tensors):
    arrays = [Array(tensor.detach().numpy()) for tensor in tensors]
    return ArrayRecord({str(place): array for place, array in enumerate(arrays)})


@client.train()
def train(message, context):
    plain, settings, agent = started(message, context)
    loop = plain.loop
    loop.nu = settings["nu"]
    loop.curvature = type(CURVATURES[settings["curvature"]]).__name__
    with torch.no_grad():
        loop.train(agent)
    return Message(RecordDict({"model": record(loop.sent)}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    plain, _, agent = started(message, context)
    plain.evaluate([agent])
    return Message(RecordDict({"scores": MetricRecord({"agent": agent})}), reply_to=message)


def flower(folder, sizes, serve):
    server = ServerApp()

    @server.main()
    def main(grid, context):
        while len(nodes := sorted(grid.get_node_ids())) < sizes.agents:
            pass
        w = list(paper_module(sizes.inputs).parameters())

        def ask(kind, asked, **settings):
            content = RecordDict(
                {
                    "model": record(w),
                    "settings": ConfigRecord(
                        {"folder": str(folder), "batch": sizes.batch, **settings}
                    ),
                }
            )
            messages = [Message(content, node, kind) for node in asked]
            replies = list(grid.send_and_receive(messages))
            if failed := [reply.error for reply in replies if reply.has_error()]:
                raise RuntimeError(failed[0])
            return replies

        def one_round(nu, curvature):
            replies = ask("train", nodes[: sizes.cohort], nu=nu, curvature=curvature)
            models = [[a.numpy() for a in reply.content["model"].values()] for reply in replies]
            return [np.mean(tensors, axis=0) for tensors in zip(*models, strict=True)]

        jobs = {n: lambda job=job: one_round(*job) for n, job in METHODS.items()}
        serve(jobs | {EVALUATION: lambda: ask("evaluate", nodes)})

    backend = {
        "client_resources": {"num_cpus": 1},
        "init_args": {"num_cpus": 1, "include_dashboard": False},
    }
    run_simulation(server, client, sizes.agents, backend_config=backend)
