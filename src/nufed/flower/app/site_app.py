"""The site's half: trains and evaluates on its own data, sends vectors and numbers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import save

from nufed.algorithms.compression import compress, without_residuals
from nufed.algorithms.protocol import AgentContext, AgentResult, State
from nufed.errors import InputError, TrainingError, shown, visible
from nufed.evaluate import evaluate_agent, majority_class
from nufed.files import sha256
from nufed.flower.app.activity import observed
from nufed.flower.app.authentication import signed
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.app.payload import (
    ARRAYS,
    BASELINE,
    KEEP,
    RELEASE,
    SAME,
    PayloadError,
    content,
    read_about,
    read_int,
    read_run,
    read_vectors,
    read_version,
    release_record,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Privacy, check_release, protect
from nufed.flower.app.score_payload import read_part, read_scales, scores_content
from nufed.flower.app.secure_payload import ADVERTISE, CONFIRM, MASKED, SHARE, UNMASK
from nufed.flower.app.secure_site import (
    advertise_keys,
    confirm_sum,
    mask_update,
    share_secrets,
    unmask_sum,
)
from nufed.flower.app.site import Load, Site
from nufed.flower.app.site_baselines import baseline_scores
from nufed.flower.app.site_store import Release, load_record, save_record
from nufed.flower.app.versions import VERSION, works_with
from nufed.objective.threads import torch_threads
from nufed.runs.personal_models import personal_after, write_personal

LOG = logging.getLogger("nufed")
Handler: TypeAlias = Callable[[Site, RecordDict], RecordDict]


def client_app(plan: Callable[[], Plan], load: Load) -> ClientApp:
    """The app that runs at every site.

    A site is configured by its SuperNode's node config: its number (``partition-id``) and
    optionally its display ``name``, the ``folder`` of its state, its private ``key``, which signs
    its replies, and ``epsilon``, its budget against the server over all runs.

    Args:
        plan: makes the plan, the same as at the server.
        load: reads this site's data, given its node's config; returns anything that
            :func:`nufed.data.as_samples` takes.
    """
    app = ClientApp()

    def handler(respond: Handler) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                made = plan()
                with torch_threads(made.threads):
                    site = Site(made, context.node_config, load)
                    reply = observed(site, message, respond)
                    if site.key is not None:
                        reply = signed(reply, message.metadata.message_id, site.key)
            except InputError:  # by this class the server knows that a retry does not help
                raise
            except (TrainingError, PayloadError) as error:
                raise TrainingError(str(error)) from error
            except Exception as error:
                LOG.exception("the site failed")
                # other messages may reveal data, and what is raised here is sent to the server
                name = type(error).__name__
                raise TrainingError(f"{name}; see the site's log") from None
            return Message(reply, reply_to=message)

        return handle

    app.query()(handler(_identify))
    app.train()(handler(_train))
    app.train(ADVERTISE)(handler(advertise_keys))
    app.train(SHARE)(handler(share_secrets))
    app.train(MASKED)(handler(_train_masked))
    app.train(CONFIRM)(handler(confirm_sum))
    app.train(UNMASK)(handler(unmask_sum))
    app.evaluate()(handler(_evaluate))
    app.evaluate(KEEP)(handler(_keep_personal_model))
    app.evaluate(BASELINE)(handler(_baseline))
    return app


def _identify(site: Site, request: RecordDict) -> RecordDict:
    theirs = read_version(request)
    if not works_with(VERSION, theirs):  # the server excludes this site
        LOG.error("this site has nufed %s and the server %s: %s", VERSION, visible(theirs), SAME)
    return content(agent=site.agent, name=site.name, version=VERSION)


def _train(site: Site, request: RecordDict) -> RecordDict:
    agent, task = site.agent, _read_task(site, request)
    if site.plan.site_keys is not None:
        raise InputError("this federation has secure aggregation: no update is sent unmasked")
    if site.plan.privacy is not None:
        return _train_privately(site, task, site.plan.privacy)
    result, codec = _agent_update(site, task), site.plan.rules.codec
    vectors, state = result.vectors, result.state
    if codec is not None:
        sent = compress(codec, vectors, task.received, task.state)
        vectors, state = sent.codes, {**state, **sent.residuals}
    if state:
        record = load_record(task.file, task.state)
        save_record(task.file, record.with_update(task.began, task.state, task.round, state))
    return content(
        vectors,
        agent=agent,
        round=task.round,
        samples=len(site.federation.split.train[agent]),
        gradients=result.cost.gradients,
        hvps=result.cost.hvps,
        began=task.began,
    )


def _train_masked(site: Site, request: RecordDict) -> RecordDict:
    """Like :func:`_train`, under secure aggregation: the update leaves the site only masked."""
    task, release = _read_task(site, request), None
    if site.plan.privacy is not None:
        release = _release(site, task, site.plan.privacy)
        result = AgentResult(release.vectors, {}, release.cost)
    else:
        result = _agent_update(site, task)
    masked = mask_update(site, request, task.round, result.vectors, task.received)
    if result.state:
        record = load_record(task.file, task.state)
        save_record(task.file, record.with_update(task.began, task.state, task.round, result.state))
    reply = content(
        agent=site.agent,
        round=task.round,
        gradients=result.cost.gradients,
        hvps=result.cost.hvps,
        began=task.began,
    )
    reply[ARRAYS] = masked
    if release is not None:
        reply[RELEASE] = release_record(release.store, release.count)
    return reply


def _agent_update(site: Site, task: Task) -> AgentResult:
    plan = site.plan
    batches = site.federation.batches(site.agent, plan.seed, "train", task.round)
    context = AgentContext.of(plan.context(task.round), plan.objective, batches, batches.samples)
    state = without_residuals(task.state) or {}
    return plan.algorithm.agent_update(context, task.received, state)


def _train_privately(site: Site, task: Task, privacy: Privacy) -> RecordDict:
    release = _release(site, task, privacy)
    reply = content(
        release.vectors,
        agent=site.agent,
        round=task.round,
        samples=1,  # the uniform mean does not use the count
        gradients=release.cost.gradients,
        hvps=release.cost.hvps,
        began=0,
    )
    reply[RELEASE] = release_record(release.store, release.count)
    return reply


def _release(site: Site, task: Task, privacy: Privacy) -> Release:
    """The stored noisy update for an identical request, else a new one, stored before it is sent.

    Fresh noise on a repeated request would let the server average it away.
    """
    record = load_record(task.file, {})
    initial = Release(secrets.token_hex(16), privacy.server_noise, before=task.released)
    last, digest = record.release or initial, task.digest
    if last.question == digest:
        return last
    sent = max(last.before + last.count, task.released)
    check_release(privacy, sent)
    if site.limit is not None:
        sent += site.releases_in_other_runs(task.file, privacy.server_noise)
        check_release(replace(privacy, epsilon_server=site.limit), sent)
    _ = site.samples  # a mismatch with the federation's format may be told
    try:
        result = _agent_update(site, task)
    except InputError:  # its message may reveal the number of samples
        LOG.exception("this site's data can't be used")
        raise InputError("its data can't be used; see the site's log") from None
    release = last.after(digest, protect(result.vectors, task.received, privacy), result.cost)
    released = release.before + release.count
    site.notes["epsilon"] = server_epsilon(privacy.server_noise, released, privacy.delta)
    save_record(task.file, replace(record, release=release))
    return release


def _evaluate(site: Site, request: RecordDict) -> RecordDict:
    plan, task = site.plan, _read_task(site, request, "scales", "part")
    if not plan.sends_scores:
        raise TrainingError("this site sends no scores: privacy.scores is false")
    federation = site.federation.scoring(read_part(task.more["part"]))
    scores = evaluate_agent(
        plan.algorithm,
        plan.objective,
        federation,
        site.agent,
        task.received,
        task.kept,
        seed=plan.seed,
        steps=plan.eval_steps,
        measure=plan.measure,
        scales=read_scales(task.more["scales"]),
        context=plan.context(0),
    )
    if task.more["part"] == plan.scored_on:
        score = scores[0].score[plan.personal_steps]
        site.notes.update(score=score, measure=plan.measure.name)
    # where scores are per class
    majority = majority_class(federation, site.agent, 0) if scores[0].balanced else None
    return scores_content(scores, majority, task.round)


def _baseline(site: Site, request: RecordDict) -> RecordDict:
    task = _read_task(site, request, "scales", "part", "baseline")
    if not site.plan.sends_scores:
        raise TrainingError("this site sends no scores: privacy.scores is false")
    part, scales = read_part(task.more["part"]), read_scales(task.more["scales"])
    scores = baseline_scores(site, task.more["baseline"], scales, part)
    federation = site.federation.scoring(part)
    majority = majority_class(federation, site.agent, 0) if scores[0].balanced else None
    return scores_content(scores, majority, task.round)


def _keep_personal_model(site: Site, request: RecordDict) -> RecordDict:
    """Write this agent's personal model, as results show it, at the site only."""
    plan, agent, task = site.plan, site.agent, _read_task(site, request, "scales")
    (scale,) = read_scales(task.more["scales"])
    batches = site.federation.batches(agent, plan.seed, "evaluate")
    context = AgentContext.of(plan.context(0), plan.objective, batches, batches.samples)
    steps = plan.personal_steps
    tensors = personal_after(plan.algorithm, context, task.received, task.kept, steps, scale)
    about = {"run": task.run, "round": task.round, "fine_tuning_steps": steps, "lr_scale": scale}
    path = write_personal(task.file.parent, agent, tensors, about)
    LOG.info("this site's personal model: %s", path)
    return content(agent=agent, round=task.round)


@dataclass(frozen=True)
class Task:
    """A request of the server, and the state that the site starts from.

    ``began`` is the round of ``state``; 0: the initial state. ``released`` is the number of noisy
    updates of this agent that the server knows of. ``more`` holds further fields, not checked yet.
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
    def kept(self) -> State | None:
        """The state of an agent that took part in training; None for a newcomer."""
        return without_residuals(self.state) if self.began else None

    @property
    def digest(self) -> str:
        """Digest that identifies this request."""
        return sha256(f"{self.run}/{self.round}/".encode() + save(dict(self.received)))


def _read_task(site: Site, request: RecordDict, *more: str) -> Task:
    if site.limit is not None and site.plan.privacy is None:
        raise InputError(
            f"this site's limit is epsilon = {site.limit:g}, but the federation's configuration "
            "has no [privacy], so its privacy loss is unbounded"
        )
    run, agent, round, taken, released, *rest = read_about(
        request, "run", "agent", "round", "taken", "released", *more
    )
    if agent != site.agent:
        raise InputError(
            f"the request is for agent {shown(agent)}, but this site is agent {site.agent}"
        )
    received = read_vectors(request, site.plan.received_like())
    taken = read_int(taken, "taken", 10**9)
    run = read_run(run)
    file = site.folder / run / f"agent-{site.agent}"
    initial = site.plan.initial_state(received)
    kept = load_record(file, initial).state(taken) if initial and taken else None
    if initial and taken and kept is None:
        LOG.warning(
            "%s has no state of round %d: this site restarts from the initial state", file, taken
        )
    began = taken if kept is not None or not initial else 0
    return Task(
        run,
        read_int(round, "round", 10**9),
        read_int(released, "released", 10**9),
        received,
        kept or initial,
        began,
        file,
        dict(zip(more, rest, strict=True)),
    )
