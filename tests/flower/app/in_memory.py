"""An in-memory Grid that passes messages to the real ClientApp, as a SuperNode does."""

import random
from itertools import count
from tempfile import TemporaryDirectory

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from nufed import Federation, Objective
from nufed.data import as_samples, make_split
from nufed.flower.app.plan import Plan
from nufed.flower.app.server_app import Server
from nufed.flower.app.site import load_record
from nufed.flower.app.site_app import client_app
from support import mlp

TEST = 0.25
RUN = "0123456789abcdef" * 2


class MemoryGrid:
    """Nodes with random ids, each with its own Context.

    ``tamper(agent, message, reply)`` may return another reply, None for a missing one, or raise an
    exception for pulling it to raise.
    """

    def __init__(self, app, numbers, folder, tamper=lambda agent, message, reply: reply):
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower does
        self.app, self.folder, self.tamper = app, folder, tamper
        self.contexts, self.requested, self._replies, self._ids = {}, [], {}, count(1)
        for number in numbers:
            self.add(number)

    def add(self, number, **config):
        node = random.getrandbits(62)
        config = {"partition-id": number, "folder": str(self.folder), **config}
        self.contexts[node] = Context(1, node, config, RecordDict(), {})
        return node

    def node_of(self, number):
        return next(n for n, c in self.contexts.items() if c.node_config["partition-id"] == number)

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = number
            context = self.contexts[message.metadata.dst_node_id]
            agent = context.node_config["partition-id"]
            self.requested.append((message.metadata.message_type, agent))
            try:
                reply = self.app(message, context)
            except Exception as error:
                reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            self._replies[number] = (agent, message, reply)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers):
        replies = [self.tamper(*self._replies[number]) for number in numbers]
        return [reply for reply in replies if reply is not None]


def agents_data(agents, seed=0, samples=24):
    """Every agent's inputs and classes."""
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=(5, 3))
    inputs = [rng.normal(size=(samples + 4 * agent, 5)) for agent in range(agents)]
    return [(x, (x @ rule).argmax(axis=1)) for x in inputs]


def federation_of(data, seed, unseen, validation=0.0):
    """The same data as one federation of the simulator."""
    sizes = [len(y) for _, y in data]
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    split = make_split(rows, seed, validation=validation, test=TEST, unseen_agents=unseen)
    inputs, targets = (np.concatenate(part) for part in zip(*data, strict=True))
    return Federation(as_samples((inputs, targets)), split)


def plan_of(algorithm, agents=4, rounds=3, **more):
    torch.manual_seed(3)
    settings = {"seed": 7, "test": TEST, "eval_steps": 2, "wait": 0.01, "deadline": 0.01}
    return Plan(algorithm, Objective(mlp()), agents, rounds, **{**settings, **more})


def sites_of(plan, data, folder, tamper=lambda agent, message, reply: reply):
    """A grid of the real ClientApps, one per agent, which keep their files in ``folder``."""
    site = client_app(lambda: plan, lambda config: data[config["partition-id"]])
    return MemoryGrid(site, range(plan.agents), folder, tamper)


def site_state(folder, server, agent, like):
    """The state that a site would continue from, read from its file; None if it has none."""
    taken = server.notes["taken"].get(str(agent), 0)
    return load_record(folder / RUN / f"agent-{agent}", like).state(taken) if taken else None


def federate(
    plan,
    data,
    tamper=lambda agent, message, reply: reply,
    prepare=lambda grid: None,
    choose=False,
):
    """The progress of every round and the outcome, from the real server and ClientApp."""
    with TemporaryDirectory() as folder:
        grid = sites_of(plan, data, folder, tamper)
        prepare(grid)
        server = Server(plan, grid, RUN)
        rounds = list(server.train())
        return rounds, server.scoring.evaluate(rounds[-1], choose), grid
