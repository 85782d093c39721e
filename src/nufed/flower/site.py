"""The site's half: it works on its own data and sends vectors and numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from nufed.algorithm import State
from nufed.data import Federation, Samples, as_samples, site_split
from nufed.errors import InputError, TrainingError, shown
from nufed.evaluate import evaluate_agent
from nufed.flower.memory import load_memory, save_memory
from nufed.flower.payload import (
    PayloadError,
    content,
    read_about,
    read_run,
    read_vectors,
    scores_content,
    whole,
)
from nufed.flower.plan import Plan
from nufed.threads import torch_threads

LOG = logging.getLogger("nufed")
NUMBER = "partition-id"
Load: TypeAlias = Callable[[Mapping[str, Any]], Any]
Answer: TypeAlias = Callable[["Site", RecordDict], RecordDict]


@dataclass(frozen=True)
class Site:
    """One agent: what its node's config says of it, and its own data, loaded when it is needed."""

    plan: Plan
    config: Mapping[str, Any]
    load: Load

    @cached_property
    def agent(self) -> int:
        """The site's own number."""
        agent, agents = self.config.get(NUMBER), self.plan.agents
        if not isinstance(agent, int) or isinstance(agent, bool) or not 0 <= agent < agents:
            raise InputError(
                f"{NUMBER} = {shown(agent)} in the node's config: must be the site's own number, "
                f"0 … {agents - 1}"
            )
        return agent

    @property
    def name(self) -> str:
        """What people call it."""
        return str(self.config.get("name", self.agent))

    @property
    def folder(self) -> Path:
        """Where it keeps its state."""
        return Path(self.config.get("folder") or Path.home() / ".nufed" / "sites")

    @cached_property
    def federation(self) -> Federation:
        """A federation of which only this agent's part is here."""
        plan, samples = self.plan, self._samples()
        plan.check_data(samples)
        split = site_split(
            len(samples),
            self.agent,
            plan.seed,
            validation=plan.validation,
            test=plan.test,
            name=self.name,
        )
        return Federation(samples, split, plan.small_agents, plan.scored_on)

    def _samples(self) -> Samples:
        """This site's data. What goes wrong with it is told at the site only."""
        try:
            return as_samples(self.load(self.config))
        except Exception as error:
            LOG.exception("this site's data can't be loaded")
            raise TrainingError(
                f"its data can't be loaded ({type(error).__name__}); the site's own log says more"
            ) from None


def client_app(plan: Callable[[], Plan], load: Load) -> ClientApp:
    """The app that runs at every site.

    What a site is comes from the config that its SuperNode was started with: its number
    (``partition-id``), and if given the ``name`` that people call it and the ``folder`` where it
    keeps its state.

    Args:
        plan: makes the plan, the same as at the server.
        load: reads this site's data, from what its node's config says: anything that
            :func:`nufed.data.as_samples` takes.
    """
    app = ClientApp()

    def answering(answer: Answer) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                made = plan()
                with torch_threads(made.threads):
                    reply = answer(Site(made, context.node_config, load), message.content)
            except (InputError, TrainingError, PayloadError) as error:
                raise TrainingError(str(error)) from error
            except Exception as error:
                LOG.exception("the site failed")
                # what another error says may be about data, and what is raised here travels
                name = type(error).__name__
                raise TrainingError(f"{name}; the site's own log says more") from None
            return Message(reply, reply_to=message)

        return handle

    app.query()(answering(_who))
    app.train()(answering(_train))
    app.evaluate()(answering(_evaluate))
    return app


def _who(site: Site, asked: RecordDict) -> RecordDict:
    return content(agent=site.agent, name=site.name)


def _train(site: Site, asked: RecordDict) -> RecordDict:
    plan, agent = site.plan, site.agent
    task = _read(site, asked)
    batches = site.federation.batches(agent, plan.seed, "train", task.round)
    result = plan.algorithm.client_update(plan.objective, task.received, task.state, batches)
    if result.state:
        memory = load_memory(task.file, task.state)
        save_memory(task.file, memory.with_work(task.began, task.state, task.round, result.state))
    return content(
        result.vectors,
        agent=agent,
        round=task.round,
        samples=len(site.federation.split.train[agent]),
        gradients=result.cost.gradients,
        hvps=result.cost.hvps,
        began=task.began,
    )


def _evaluate(site: Site, asked: RecordDict) -> RecordDict:
    plan, task = site.plan, _read(site, asked)
    scores = evaluate_agent(
        plan.algorithm,
        plan.objective,
        site.federation,
        site.agent,
        task.received,
        task.state,
        seed=plan.seed,
        steps=plan.eval_steps,
        measure=plan.measure,
    )
    return scores_content(scores, task.round)


@dataclass(frozen=True)
class Task:
    """What the server asks for, and what the site sets out from.

    ``began`` is the round that ``state`` is of; 0 is the state of an agent that never took part.
    """

    round: int
    received: State
    state: State
    began: int
    file: Path


def _read(site: Site, asked: RecordDict) -> Task:
    run, agent, round, taken = read_about(asked, "run", "agent", "round", "taken")
    if agent != site.agent:
        raise InputError(f"the server takes agent {site.agent} for agent {shown(agent)}")
    received = read_vectors(asked, site.plan.received_like())
    taken = whole(taken, "taken", 10**9)
    file = site.folder / read_run(run) / f"agent-{site.agent}"
    fresh = site.plan.algorithm.client_init(received["model"])
    kept = load_memory(file, fresh).state(taken) if fresh and taken else None
    if fresh and taken and kept is None:
        LOG.warning("the state of round %d is not in %s: this site starts anew", taken, file)
    began = taken if kept is not None or not fresh else 0
    return Task(whole(round, "round", 10**9), received, kept or fresh, began, file)
