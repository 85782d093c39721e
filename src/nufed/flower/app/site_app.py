"""The site's half: trains and evaluates on its own data, sends vectors and numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from nufed.algorithms.protocol import AgentContext
from nufed.errors import InputError, TrainingError, visible
from nufed.evaluate import evaluate_agent, majority_class
from nufed.flower.app.activity import observed
from nufed.flower.app.authentication import signed
from nufed.flower.app.payload import (
    BASELINE,
    KEEP,
    SAME,
    PayloadError,
    content,
    read_method,
    read_version,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.score_payload import read_part, read_scales, scores_content
from nufed.flower.app.secure_payload import ADVERTISE, CONFIRM, MASKED, SHARE, UNMASK
from nufed.flower.app.secure_site import advertise_keys, confirm_sum, share_secrets, unmask_sum
from nufed.flower.app.site import Load, Site
from nufed.flower.app.site_baselines import baseline_scores
from nufed.flower.app.site_task import read_task
from nufed.flower.app.site_training import train, train_masked
from nufed.flower.app.versions import VERSION, works_with
from nufed.objective.threads import torch_threads
from nufed.runs.personal_models import personal_after, write_personal

LOG = logging.getLogger("nufed")
Handler: TypeAlias = Callable[[Site, RecordDict], RecordDict]


def client_app(plan: Callable[..., Plan], load: Load) -> ClientApp:
    """The app that runs at every site.

    A site is configured by its node config: its number (``partition-id``) and
    optionally its display ``name``, the ``folder`` of its state, its private ``key``, which signs
    its replies, and ``epsilon``, its budget against the server over all runs.

    Args:
        plan: makes the plan, the same as at the server; called with the method that a request
            names, if it names one.
        load: reads this site's data, given its node's config; returns anything that
            :func:`nufed.data.as_samples` takes.
    """
    app = ClientApp()

    def handler(respond: Handler) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                method = read_method(message.content)
                made = plan() if method is None else plan(method)
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
    app.train()(handler(train))
    app.train(ADVERTISE)(handler(advertise_keys))
    app.train(SHARE)(handler(share_secrets))
    app.train(MASKED)(handler(train_masked))
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


def _evaluate(site: Site, request: RecordDict) -> RecordDict:
    plan, task = site.plan, read_task(site, request, "scales", "part")
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
    task = read_task(site, request, "scales", "part", "baseline")
    if not site.plan.sends_scores:
        raise TrainingError("this site sends no scores: privacy.scores is false")
    part, scales = read_part(task.more["part"]), read_scales(task.more["scales"])
    scores = baseline_scores(site, task.more["baseline"], scales, part)
    federation = site.federation.scoring(part)
    majority = majority_class(federation, site.agent, 0) if scores[0].balanced else None
    return scores_content(scores, majority, task.round)


def _keep_personal_model(site: Site, request: RecordDict) -> RecordDict:
    """Write this agent's personal model, as results show it, at the site only."""
    plan, agent, task = site.plan, site.agent, read_task(site, request, "scales")
    (scale,) = read_scales(task.more["scales"])
    batches = site.federation.batches(agent, plan.seed, "evaluate")
    context = AgentContext.of(plan.context(0), plan.objective, batches, batches.samples)
    steps = plan.personal_steps
    tensors = personal_after(plan.algorithm, context, task.received, task.kept, steps, scale)
    about = {"run": task.run, "round": task.round, "fine_tuning_steps": steps, "lr_scale": scale}
    path = write_personal(task.file.parent, agent, tensors, about)
    LOG.info("this site's personal model: %s", path)
    return content(agent=agent, round=task.round)
