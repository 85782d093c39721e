"""A site's training in a round: its update, plain, noisy or masked."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

from flwr.app import RecordDict

from nufed.algorithms.compression import compress, without_residuals
from nufed.algorithms.protocol import AgentContext, AgentResult
from nufed.errors import InputError
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.app.payload import ARRAYS, RELEASE, content, release_record
from nufed.flower.app.privacy import Privacy, check_release, protect
from nufed.flower.app.secure_site import mask_update
from nufed.flower.app.site import Site
from nufed.flower.app.site_store import Release, load_record, save_record
from nufed.flower.app.site_task import Task, read_task

LOG = logging.getLogger("nufed")


def train(site: Site, request: RecordDict) -> RecordDict:
    """The site's update of a round; with privacy clipped and noisy."""
    agent, task = site.agent, read_task(site, request)
    if site.plan.site_keys is not None:
        raise InputError("this federation has secure aggregation: no update is sent unmasked")
    if site.plan.privacy is not None:
        return _train_privately(site, task, site.plan.privacy)
    result, codec = _agent_update(site, task), site.plan.rules.codec
    vectors, state = result.vectors, result.state
    if codec is not None:
        sent = compress(codec, vectors, task.received, task.state, site.plan.counted)
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


def train_masked(site: Site, request: RecordDict) -> RecordDict:
    """Like :func:`train`, under secure aggregation: the update leaves the site only masked."""
    task, release = read_task(site, request), None
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
    record = load_record(task.releases, {})
    initial = Release(secrets.token_hex(16), privacy.server_noise, before=task.released)
    last, digest = record.release or initial, task.digest
    if last.question == digest:
        return last
    sent = max(last.before + last.count, task.released)
    check_release(privacy, sent)
    if site.limit is not None:
        sent += site.releases_in_other_runs(task.releases, privacy.server_noise)
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
    save_record(task.releases, replace(record, release=release))
    return release
