"""The null baselines of a federation, computed at its sites with the simulator's bits.

``untrained`` fine-tunes the initial model, ``local`` trains at the site alone for as many steps as
all rounds have (:mod:`nufed.evaluate.null_baselines`). The majority class comes with every
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.protocol import AgentContext, Context, State
from nufed.data import ScoredOn
from nufed.evaluate import (
    AgentScores,
    Evaluation,
    choose_step_sizes,
    chooses,
    evaluate_agent,
    evaluate_with_choice,
)
from nufed.evaluate.null_baselines import OwnModel, local_training
from nufed.flower.app.payload import PayloadError
from nufed.flower.app.plan import Plan
from nufed.flower.app.site import Site
from nufed.flower.logs import LOG

UNTRAINED, LOCAL = "untrained", "local"
Ask: TypeAlias = Callable[[str, Sequence[float], ScoredOn], list[list[AgentScores]]]
"""Asks sites for the scores of a baseline, by scale of its step size, on a part of the samples."""


def baselines(plan: Plan, ask: Ask, agents: Sequence[int]) -> dict[str, Evaluation]:
    """At the server: the baselines that the plan asks of these agents' sites, where all answer."""
    found = {}
    for name, evaluation in _evaluations(plan, ask):
        if [scores.agent for scores in evaluation.as_trained] == list(agents):
            found[name] = evaluation
        else:
            LOG.warning("the baseline %s is left out: not all sites sent its scores", name)
    return found


def _evaluations(plan: Plan, ask: Ask) -> Iterator[tuple[str, Evaluation]]:
    possible = plan.validation > 0
    if UNTRAINED in plan.baselines:
        validate = possible and chooses(plan.eval_lr, True)
        yield (
            UNTRAINED,
            evaluate_with_choice(
                lambda scales: ask(UNTRAINED, scales, plan.scored_on),
                (lambda scales: ask(UNTRAINED, scales, "validation")) if validate else None,
                plan.eval_steps,
                plan.measure,
                "smallest",
            ),
        )
    if LOCAL in plan.baselines:
        sizes = None
        if plan.tune_local and possible:
            sizes = choose_step_sizes(
                lambda scales: ask(LOCAL, scales, "validation"), [0], plan.measure, "best"
            )
        (scores,) = ask(LOCAL, [sizes.scale(0) if sizes else 1.0], plan.scored_on)
        yield LOCAL, Evaluation(scores, step_sizes=sizes)


def baseline_scores(
    site: Site, name: object, scales: Sequence[float], part: ScoredOn
) -> list[AgentScores]:
    """At a site: its scores of a baseline, for each scale of the step size."""
    plan, objective = site.plan, site.plan.objective
    federation, initial = site.federation.scoring(part), {"model": objective.initial()}
    local = local_training(plan.algorithm, plan.rounds)

    def score(algorithm: GMeta, state: State | None, own: Sequence[float]) -> list[AgentScores]:
        return evaluate_agent(
            algorithm,
            objective,
            federation,
            site.agent,
            initial,
            state,
            seed=plan.seed,
            steps=plan.eval_steps,
            measure=plan.scored_by(part),
            scales=own,
            context=plan.context(0),
        )

    if name == UNTRAINED:
        return score(local, None, scales)
    if name != LOCAL:
        raise PayloadError(f"baseline is {name!r}, not {UNTRAINED} or {LOCAL}")
    found = []
    for scale in scales:
        sized = replace(local, meta_lr=scale * float(local.meta_lr))
        batches = site.federation.batches(site.agent, plan.seed, "train", 1)
        everyone = Context(1, plan.agents, plan.agents)
        context = AgentContext.of(everyone, objective, batches, batches.samples)
        model = sized.agent_update(context, initial, {}).vectors
        found += score(OwnModel.like(local), model, [1.0])
    return found
