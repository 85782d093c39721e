"""The site's half: it works on its own data and sends vectors and numbers."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import save

from nufed.algorithm import ClientResult, State
from nufed.data import Federation, Samples, as_samples, site_split
from nufed.errors import InputError, TrainingError, require, shown
from nufed.evaluate import evaluate_agent, majority_class
from nufed.flower.epsilon import is_above_0
from nufed.flower.memory import Memory, Release, load_memory, save_memory
from nufed.flower.payload import (
    RELEASE,
    VERSION,
    PayloadError,
    content,
    read_about,
    read_part,
    read_run,
    read_scales,
    read_vectors,
    release_record,
    scores_content,
    whole,
)
from nufed.flower.plan import Plan
from nufed.flower.privacy import Privacy, check_release, protect
from nufed.runs.durable import sha256
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

    @property
    def limit(self) -> float | None:
        """The most epsilon that it spends against the server, over all runs; None: any."""
        limit: float | None = self.config.get("epsilon")
        if limit is not None:
            require(is_above_0(limit), "epsilon", limit, "in the node's config: must be above 0")
        return limit

    def releases_elsewhere(self, file: Path, noise: float) -> int:
        """How many updates with this noise would say as much as all that it sent in other runs."""
        others = [other for other in self.folder.glob(f"*/agent-{self.agent}") if other != file]
        known = {other: load_memory(other, {}) for other in others}
        for other, memory in known.items():
            if memory == Memory():
                LOG.error(
                    "%s is damaged, so that what this site sent in that run is not counted: put "
                    "back a copy, or take it away and lower the limit by what it stood for",
                    other,
                )
                raise TrainingError("it lost count of what it sent, and has a limit")
        releases = [memory.release for memory in known.values() if memory.release]
        return math.ceil(sum(r.count * (noise / r.noise) ** 2 for r in releases))

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
            known_classes = self.plan.like.outputs if self.plan.like else 0
            samples = as_samples(self.load(self.config), known_classes)
            samples.check_finite(self.plan.objective.dtype)
            return samples
        except Exception as error:
            LOG.exception("this site's data can't be loaded")
            raise TrainingError(
                f"its data can't be loaded ({type(error).__name__}); the site's own log says more"
            ) from None


def client_app(plan: Callable[[], Plan], load: Load) -> ClientApp:
    """The app that runs at every site.

    What a site is comes from the config that its SuperNode was started with: its number
    (``partition-id``), and if given the ``name`` that people call it, the ``folder`` where it keeps
    its state, and ``epsilon``, the most that it spends against the server over all runs.

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
    return content(agent=site.agent, name=site.name, version=VERSION)


def _train(site: Site, asked: RecordDict) -> RecordDict:
    agent, task = site.agent, _read(site, asked)
    if site.plan.privacy is not None:
        return _train_privately(site, task, site.plan.privacy)
    result = _work(site, task)
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


def _work(site: Site, task: Task) -> ClientResult:
    plan = site.plan
    batches = site.federation.batches(site.agent, plan.seed, "train", task.round)
    return plan.algorithm.client_update(plan.objective, task.received, task.state, batches)


def _train_privately(site: Site, task: Task, privacy: Privacy) -> RecordDict:
    release = _release(site, task, privacy)
    reply = content(
        release.vectors,
        agent=site.agent,
        round=task.round,
        samples=1,  # the uniform mean does not need their number
        gradients=release.cost.gradients,
        hvps=release.cost.hvps,
        began=0,
    )
    reply[RELEASE] = release_record(release.store, release.count)
    return reply


def _release(site: Site, task: Task, privacy: Privacy) -> Release:
    """The noisy update that was made for this very question, or a new one, kept before it is sent.

    Noise drawn anew would let the server average it away.
    """
    memory = load_memory(task.file, {})
    fresh = Release(secrets.token_hex(16), privacy.noise, before=task.released)
    last, question = memory.release or fresh, task.question
    if last.question == question:
        return last
    sent = max(last.before + last.count, task.released)
    check_release(privacy, sent)
    if site.limit is not None:
        sent += site.releases_elsewhere(task.file, privacy.noise)
        check_release(replace(privacy, epsilon_server=site.limit), sent)
    try:
        result = _work(site, task)
    except InputError:  # it may say how many samples there are
        LOG.exception("this site's data can't be used")
        raise TrainingError("its data can't be used; the site's own log says more") from None
    release = last.after(question, protect(result.vectors, task.received, privacy), result.cost)
    save_memory(task.file, replace(memory, release=release))
    return release


def _evaluate(site: Site, asked: RecordDict) -> RecordDict:
    plan, task = site.plan, _read(site, asked, "scales", "part")
    if not plan.sends_scores:
        raise InputError("this site sends no scores: privacy.scores is false")
    federation = site.federation.scoring(read_part(task.more["part"]))
    scores = [
        evaluate_agent(
            plan.algorithm,
            plan.objective,
            federation,
            site.agent,
            task.received,
            task.state,
            seed=plan.seed,
            steps=plan.eval_steps,
            measure=plan.measure,
            scale=scale,
        )
        for scale in read_scales(task.more["scales"])
    ]
    # its classes are counted where scores by class are
    majority = majority_class(federation, site.agent, 0) if scores[0].balanced else None
    return scores_content(scores, majority, task.round)


@dataclass(frozen=True)
class Task:
    """What the server asks for, and what the site sets out from.

    ``began`` is the round that ``state`` is of; 0 is the state of an agent that never took part.
    ``released`` is how many noisy updates of this agent the server knows of. ``more`` is what else
    it says, not checked yet.
    """

    run: str
    round: int
    released: int
    received: State
    state: State
    began: int
    file: Path
    more: Mapping[str, object]

    @property
    def question(self) -> str:
        """The same for the same work only."""
        return sha256(f"{self.run}/{self.round}/".encode() + save(dict(self.received)))


def _read(site: Site, asked: RecordDict, *more: str) -> Task:
    if site.limit is not None and site.plan.privacy is None:
        raise InputError(
            f"this site spends at most epsilon = {site.limit:g}, and without [privacy] in the "
            "federation's configuration there is no bound"
        )
    run, agent, round, taken, released, *rest = read_about(
        asked, "run", "agent", "round", "taken", "released", *more
    )
    if agent != site.agent:
        raise InputError(f"the server takes agent {site.agent} for agent {shown(agent)}")
    received = read_vectors(asked, site.plan.received_like())
    taken = whole(taken, "taken", 10**9)
    run = read_run(run)
    file = site.folder / run / f"agent-{site.agent}"
    fresh = site.plan.algorithm.client_init(received["model"])
    kept = load_memory(file, fresh).state(taken) if fresh and taken else None
    if fresh and taken and kept is None:
        LOG.warning("the state of round %d is not in %s: this site starts anew", taken, file)
    began = taken if kept is not None or not fresh else 0
    return Task(
        run,
        whole(round, "round", 10**9),
        whole(released, "released", 10**9),
        received,
        kept or fresh,
        began,
        file,
        dict(zip(more, rest, strict=True)),
    )
