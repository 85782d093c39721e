"""The site's half: it works on its own data and sends vectors and numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from nufed.algorithm import State
from nufed.data import Federation, as_samples, site_split
from nufed.errors import InputError, NufedError, TrainingError, shown
from nufed.evaluate import evaluate_agent
from nufed.flower.memory import keep, recall
from nufed.flower.payload import (
    PayloadError,
    content,
    read_about,
    read_vectors,
    scores_content,
    whole,
)
from nufed.flower.plan import Plan
from nufed.threads import torch_threads

LOG = logging.getLogger("nufed")
NUMBER = "partition-id"
Answer: TypeAlias = Callable[["Site", RecordDict, RecordDict], RecordDict]


@dataclass(frozen=True)
class Site:
    """One agent, and a federation of which only its own part is here."""

    plan: Plan
    agent: int
    federation: Federation


def client_app(plan: Callable[[Context], Plan], load: Callable[[Context], Any]) -> ClientApp:
    """The app that runs at every site.

    The site's number is what its SuperNode was started with: ``--node-config "partition-id=3"``; a
    ``name`` there is what people call it.

    Args:
        plan: makes the plan, the same as at the server.
        load: reads this site's data: anything that :func:`nufed.data.as_samples` takes.
    """
    app = ClientApp()

    def answering(answer: Answer) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                made = plan(context)
                with torch_threads(made.threads):
                    site = _site(made, load, context)
                    reply = answer(site, message.content, context.state)
            except (NufedError, PayloadError) as error:
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


def _site(plan: Plan, load: Callable[[Context], Any], context: Context) -> Site:
    agent = context.node_config.get(NUMBER)
    if not isinstance(agent, int) or isinstance(agent, bool) or not 0 <= agent < plan.agents:
        raise InputError(
            f"{NUMBER} = {shown(agent)} in the node's config: must be the site's own number, "
            f"0 … {plan.agents - 1}"
        )
    samples = as_samples(load(context))
    split = site_split(
        len(samples),
        agent,
        plan.seed,
        validation=0.0,
        test=plan.test,
        name=str(context.node_config.get("name", agent)),
    )
    federation = Federation(samples, split, plan.small_agents)
    federation.batch_rows(agent, plan.algorithm.batch_size)  # refuses too few samples at once
    return Site(plan, agent, federation)


def _who(site: Site, asked: RecordDict, kept: RecordDict) -> RecordDict:
    return content(agent=site.agent, name=site.federation.split.names[site.agent])


def _train(site: Site, asked: RecordDict, kept: RecordDict) -> RecordDict:
    plan, agent = site.plan, site.agent
    round, taken, received, state = _read(site, asked, kept)
    batches = site.federation.batches(agent, plan.seed, "train", round)
    result = plan.algorithm.client_update(plan.objective, received, state, batches)
    reply = content(
        result.vectors,
        agent=agent,
        round=round,
        samples=len(site.federation.split.train[agent]),
        gradients=result.cost.gradients,
        hvps=result.cost.hvps,
    )
    keep(kept, taken, round, result.state)  # last: a site that fails keeps what it had
    return reply


def _evaluate(site: Site, asked: RecordDict, kept: RecordDict) -> RecordDict:
    plan, agent = site.plan, site.agent
    round, _, received, state = _read(site, asked, kept)
    scores = evaluate_agent(
        plan.algorithm,
        plan.objective,
        site.federation,
        agent,
        received,
        state,
        seed=plan.seed,
        steps=plan.eval_steps,
        measure=plan.measure,
    )
    return scores_content(scores, round)


def _read(site: Site, asked: RecordDict, kept: RecordDict) -> tuple[int, int, State, State]:
    """The round, the round of the update that was taken last, what was sent, and what was kept."""
    agent, round, taken = read_about(asked, "agent", "round", "taken")
    if agent != site.agent:
        raise InputError(f"the server takes agent {site.agent} for agent {shown(agent)}")
    received = read_vectors(asked, site.plan.received_like())
    taken = whole(taken, "taken", 10**9)
    state = recall(kept, taken, site.plan.algorithm.client_init(received["model"]))
    return whole(round, "round", 10**9), taken, received, state
