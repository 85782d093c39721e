"""The site's half: trains and evaluates on its own data, sends vectors and numbers.

An update is sent plain, noisy or masked. Of its work a site keeps an account for its administrator,
log lines and counts in a file of its folder, which ``nufed federate site --metrics-port`` serves;
nothing of it is sent.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from nufed.algorithms.compression import compress, without_residuals
from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.protocol import AgentContext, AgentResult, Context as RoundContext, State
from nufed.data import Federation, ScoredOn
from nufed.errors import InputError, RunError, TrainingError, in_short, visible
from nufed.evaluate import AgentScores, Measure, Scoring, evaluate_agent, majority_class
from nufed.evaluate.null_baselines import OwnModel, local_training
from nufed.flower.app.epsilon import server_epsilon
from nufed.flower.app.payload import (
    ABOUT,
    ARRAYS,
    BASELINE,
    KEEP,
    LOCAL,
    LOOK,
    RELEASE,
    SAME,
    UNTRAINED,
    VERSION,
    PayloadError,
    content,
    read_curvature,
    read_method,
    read_part,
    read_scales,
    read_version,
    release_record,
    scores_content,
    size_of,
    works_with,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Privacy, check_release, protect
from nufed.flower.app.registry import signed
from nufed.flower.app.site import Load, Release, Site, Task, load_record, read_task, save_record
from nufed.flower.logs import LOG, event
from nufed.flower.secure_sum.messages import ADVERTISE, CONFIRM, MASKED, SHARE, TRAINS, UNMASK
from nufed.flower.secure_sum.site import (
    advertise_keys,
    confirm_sum,
    mask_update,
    share_secrets,
    unmask_sum,
)
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.problem import first_curvature
from nufed.lab.runs.agent_states import personal_after, write_personal
from nufed.lab.runs.federation_records import add_activity
from nufed.server import replaced


def _record(
    site: Site, message: Message, began: float, counts: dict[str, Any], latest: dict[str, Any]
) -> None:
    kind, seconds = message.metadata.message_type, time.perf_counter() - began
    about = message.content.get(ABOUT)
    round = about.get("round") if isinstance(about, ConfigRecord) else None
    if isinstance(round, int) and round >= 0:
        latest = {**latest, "round": round, "rounds": site.plan.rounds}
        if "failures" not in counts:
            _log(site, kind, round, seconds)
    counts = {
        **counts,
        "requests": {kind: 1},
        "seconds": {kind: seconds},
        "bytes_received": size_of(message.content),
    }
    latest = {**latest, "name": site.name, "updated": time.time(), **site.notes}
    with suppress(OSError, RunError):  # the run does not need it
        add_activity(site.folder, site.agent, counts, latest)


def _log(site: Site, kind: str, round: int, seconds: float) -> None:
    """One line about a round."""
    notes, of = site.notes, {"round": round, "rounds": site.plan.rounds, "seconds": seconds}
    method = site.plan.method
    where = f"{method}, round" if method else "round"
    where = f"{where} {round} of {site.plan.rounds}"
    if kind in TRAINS:
        samples = notes.get("samples", {}).get("training", 0)
        event(
            "%s: trained on %d samples in %.1f s", where, samples, seconds,
            event="trained", samples=samples, **of,
        )  # fmt: skip
    if "score" in notes:
        score, measure = notes["score"], notes["measure"]
        shown = f"{100 * score:.0f} %" if measure == "accuracy" else f"{score:.4g}"
        event(
            "%s: score %s (%s)", where, shown, measure,
            event="scored", score=score, measure=measure, **of,
        )  # fmt: skip


def train(site: Site, request: RecordDict) -> RecordDict:
    """The site's update of a round; with privacy clipped and noisy."""
    agent, task = site.agent, read_task(site, request)
    if site.plan.site_keys is not None:
        raise InputError("this federation has secure aggregation: no update is sent unmasked")
    if site.plan.privacy is not None:
        return _train_privately(site, task, site.plan.privacy)
    result = site.plan.algorithm.agent_update(*_of_round(site, task))
    codec = site.plan.rules.codec
    vectors, state = result.vectors, result.state
    if codec is not None:
        before = replaced(task.received, vectors)
        sent = compress(codec, vectors, before, task.state, site.plan.counted)
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
        result = site.plan.algorithm.agent_update(*_of_round(site, task))
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


def _of_round(site: Site, task: Task) -> tuple[AgentContext, State, State]:
    """The arguments of ``agent_update``: the context, the received vectors, the state."""
    return site.context(task.round), task.received, without_residuals(task.state) or {}


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
    _ = site.samples  # raises on a mismatch with the federation's format
    try:
        result = site.plan.algorithm.agent_update(*_of_round(site, task))
    except InputError:  # its message may reveal the number of samples
        LOG.exception("this site's data can't be used")
        raise InputError("its data can't be used; see the site's log") from None
    release = last.after(digest, protect(result.vectors, task.received, privacy), result.cost)
    released = release.before + release.count
    site.notes["epsilon"] = server_epsilon(privacy.server_noise, released, privacy.delta)
    save_record(task.releases, replace(record, release=release))
    return release


Handler: TypeAlias = Callable[[Site, RecordDict], RecordDict]


def client_app(plan: Callable[..., Plan], load: Load) -> ClientApp:
    """The app that runs at every site.

    A site is configured by its node config: its number (``partition-id``) and
    optionally its display ``name``, the ``folder`` of its state, its private ``key``, which signs
    its replies, and ``epsilon``, its budget against the server over all runs.

    Args:
        plan: makes the plan, the same as at the server; called with the method that a request
            names, if it names one, and with the ``curvature`` that it states, if it does.
        load: reads this site's data, given its node's config; returns anything that
            :func:`nufed.data.as_samples` takes.
    """
    app = ClientApp()

    def handler(respond: Handler) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                method = read_method(message.content)
                curvature = read_curvature(message.content)
                stated = {} if curvature is None else {"curvature": curvature}
                made = plan(**stated) if method is None else plan(method, **stated)
                with torch_threads(made.threads):
                    site, began = Site(made, context.node_config, load), time.perf_counter()
                    try:
                        reply = respond(site, message.content)
                    except Exception as error:
                        latest = {"last_failure": in_short(error)}
                        _record(site, message, began, {"failures": 1}, latest)
                        raise
                    _record(site, message, began, {"bytes_sent": size_of(reply)}, {})
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
    app.train()(handler(train))
    app.train(ADVERTISE)(handler(advertise_keys))
    app.train(SHARE)(handler(share_secrets))
    app.train(MASKED)(handler(train_masked))
    app.train(CONFIRM)(handler(confirm_sum))
    app.train(UNMASK)(handler(unmask_sum))
    app.evaluate()(handler(_evaluate))
    app.evaluate(LOOK)(handler(_look))
    app.evaluate(KEEP)(handler(_keep_personal_model))
    app.evaluate(BASELINE)(handler(_baseline))
    return app


def _identify(site: Site, request: RecordDict) -> RecordDict:
    theirs = read_version(request)
    if not works_with(VERSION, theirs):  # the server excludes this site
        LOG.error("this site has nufed %s and the server %s: %s", VERSION, visible(theirs), SAME)
    return content(agent=site.agent, name=site.name, version=VERSION)


def _look(site: Site, request: RecordDict) -> RecordDict:
    """The curvature of this site's first gradients, which step sizes that are not given need."""
    plan, _ = site.plan, read_task(site, request)
    if plan.hides_single_numbers:
        raise InputError("this site measures no curvature: its numbers are sent in sums only")
    how = plan.seed, plan.algorithm.batch_size
    most = first_curvature(plan.objective, site.federation, site.agent, how)
    return content(agent=site.agent, curvature=[most])


def _evaluate(site: Site, request: RecordDict) -> RecordDict:
    plan, task = site.plan, read_task(site, request, "scales", "part")
    if not plan.sends_scores:
        raise TrainingError("this site sends no scores: privacy.scores is false")
    part = read_part(task.more["part"])
    federation, measure = site.federation.scoring(part), plan.scored_by(part)
    scores = evaluate_agent(
        plan.algorithm,
        site.context(),
        task.received,
        task.kept,
        federation,
        Scoring(plan.eval_steps, measure, read_scales(task.more["scales"]), part),
    )
    if part == plan.scored_on:
        score = scores[0].score[plan.personal_steps]
        site.notes.update(score=score, measure=plan.measure.name)
    return scores_content(scores, _majority(site, federation, scores, measure), task.round)


def _baseline(site: Site, request: RecordDict) -> RecordDict:
    task = read_task(site, request, "scales", "part", "baseline")
    if not site.plan.sends_scores:
        raise TrainingError("this site sends no scores: privacy.scores is false")
    part, scales = read_part(task.more["part"]), read_scales(task.more["scales"])
    scores = _baseline_scores(site, task.more["baseline"], scales, part)
    federation, measure = site.federation.scoring(part), site.plan.scored_by(part)
    return scores_content(scores, _majority(site, federation, scores, measure), task.round)


def _baseline_scores(
    site: Site, name: object, scales: Sequence[float], part: ScoredOn
) -> list[AgentScores]:
    """Scores of a null baseline, for each scale of the step size."""
    plan, objective = site.plan, site.plan.objective
    federation, initial = site.federation.scoring(part), {"model": objective.initial()}
    local = local_training(plan.algorithm, plan.rounds)

    def score(algorithm: GMeta, state: State | None, tried: Sequence[float]) -> list[AgentScores]:
        scoring = Scoring(plan.eval_steps, plan.scored_by(part), tried, part)
        return evaluate_agent(algorithm, site.context(), initial, state, federation, scoring)

    if name == UNTRAINED:
        return score(local, None, scales)
    if name != LOCAL:
        raise PayloadError(f"baseline is {name!r}, not {UNTRAINED} or {LOCAL}")
    scores: list[AgentScores] = []
    for scale in scales:
        sized = replace(local, meta_lr=scale * float(local.meta_lr))
        batches = site.federation.batches(site.agent, plan.seed, "train", 1)
        everyone = RoundContext(1, plan.agents, plan.agents)
        context = AgentContext.of(everyone, objective, batches, batches.samples)
        model = sized.agent_update(context, initial, {}).vectors
        scores += score(OwnModel.like(local), model, [1.0])
    return scores


def _majority(
    site: Site, federation: Federation, scores: Sequence[AgentScores], measure: Measure
) -> AgentScores | None:
    """The scores of the majority class, where scores are per class."""
    if not scores[0].balanced:
        return None
    return majority_class(federation, site.agent, 0, measure.resamples)


def _keep_personal_model(site: Site, request: RecordDict) -> RecordDict:
    """Write this agent's personal model, as results show it, at the site only."""
    plan, agent, task = site.plan, site.agent, read_task(site, request, "scales")
    (scale,) = read_scales(task.more["scales"])
    algorithm, steps = plan.algorithm, plan.personal_steps
    tensors = personal_after(algorithm, site.context(), task.received, task.kept, steps, scale)
    about = {"run": task.run, "round": task.round, "fine_tuning_steps": steps, "lr_scale": scale}
    path = write_personal(task.file.parent, agent, tensors, about)
    LOG.info("this site's personal model: %s", path)
    return content(agent=agent, round=task.round)
