"""The evaluation of one method and seed on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nufed.algorithms.protocol import Algorithm
from nufed.data import ScoredOn
from nufed.evaluate import (
    ByScale,
    Evaluation,
    Measure,
    can_be_drawn,
    chooses,
    evaluate_with_choice,
    fits,
    preferred,
    summarise,
    training_loss,
)
from nufed.experiment.setup import Setup
from nufed.runs.metric_lines import evaluation_line
from nufed.runs.recorder import Recorder
from nufed.server import Progress, StatesOf, choose_cohort, to_send
from nufed.simulation import Engine


class Final(NamedTuple):
    """The training state whose model results show, and its scores."""

    shown: Progress
    evaluation: Evaluation


def evaluate_round(
    setup: Setup, engine: Engine, name: str, progress: Progress, recorder: Recorder
) -> tuple[dict[str, Any], Final | None]:
    """The entries of an evaluation in a round's line; after the last round also the final scores.

    First comes the validation score, which decides whether this round is the last.
    """
    config, algorithm = setup.config, setup.algorithms[name]
    validated = _validate(setup, engine, name, progress, recorder)
    last = recorder.is_last(progress)
    shown = recorder.shown(progress) if last else progress
    final_here = last and shown is progress
    choose = chooses(config.eval_lr, final_here)
    evaluation = evaluate(setup, engine, algorithm, progress, choose, final_here)
    entries = evaluation_line(evaluation, config.steps_evaluated, setup.measure)
    trained = _training_loss(setup, engine, algorithm, progress)
    costs = [validated, trained, dict(entries)]
    final = Final(shown, evaluation) if last else None
    if shown is not progress:
        final = Final(
            shown, evaluate(setup, engine, algorithm, shown, chooses(config.eval_lr, True), True)
        )
        costs.append(evaluation_line(final.evaluation, config.steps_evaluated, setup.measure))
    for key in ("evaluation_gradients", "evaluation_hvps"):
        entries[key] = sum(each.get(key, 0) for each in costs)
    return {**validated, **trained, **entries}, final


def evaluate(
    setup: Setup,
    engine: Engine,
    algorithm: Algorithm,
    progress: Progress,
    choose: bool,
    final: bool,
) -> Evaluation:
    """Scores of the evaluated agents as trained and, if ``choose`` and they have validation
    samples, with step sizes chosen on these; ``final`` ones with resamples, if agents are few."""
    steps, agents = setup.config.steps_evaluated, setup.evaluated[engine.seed]
    measure = setup.measure.resampled(len(agents)) if final else setup.measure
    part = setup.config.eval_on
    score = _scorer(setup, engine, algorithm, progress, part, agents, steps, measure)
    seen = [agent for agent in agents if agent in setup.validated(engine.seed)]
    validate = _scorer(setup, engine, algorithm, progress, "validation", seen, steps)
    return evaluate_with_choice(
        score, validate if choose and seen else None, steps, setup.measure, preferred(algorithm)
    )


def with_fits(setup: Setup, engine: Engine, name: str, final: Final) -> Evaluation:
    """The final scores with the curves of some agents' models, where models are curves."""
    shown, evaluation = final
    if not can_be_drawn(setup.samples):
        return evaluation
    algorithm = setup.algorithms[name]
    curves = fits(
        algorithm,
        engine.objective,
        engine.federation,
        to_send(algorithm, shown.server),
        shown.states.get,
        seed=engine.seed,
        steps=setup.config.steps_evaluated,
        scale=evaluation.scale,
    )
    return replace(evaluation, fits=curves)


def _scorer(
    setup: Setup,
    engine: Engine,
    algorithm: Algorithm,
    progress: Progress,
    part: ScoredOn,
    agents: Sequence[int],
    steps: int,
    measure: Measure | None = None,
) -> ByScale:
    """Scores agents on one part of their samples, after up to ``steps`` fine-tuning steps."""
    measure = measure or setup.measure
    received, states = to_send(algorithm, progress.server), StatesOf(agents, progress.states)
    return lambda scales: engine.evaluate_scales(
        algorithm, received, states, steps=steps, measure=measure, scales=scales, part=part
    )


def _validate(
    setup: Setup, engine: Engine, name: str, progress: Progress, recorder: Recorder
) -> dict[str, Any]:
    """Add the score of a round on the validation samples of seen agents, if it is used."""
    if recorder.files.validation is None:
        return {}
    steps, agents = setup.config.steps_of(name)[0], sorted(setup.validated(engine.seed))
    score = _scorer(setup, engine, setup.algorithms[name], progress, "validation", agents, steps)
    prefer = preferred(setup.algorithms[name])
    found = evaluate_with_choice(score, None, steps, setup.measure, prefer)
    mean = summarise(found.as_trained, steps, setup.measure).mean
    recorder.files.validation.add(progress.round, mean)
    return {
        "validation_score": mean,
        "evaluation_gradients": found.gradients,
        "evaluation_hvps": found.hvps,
    }


def _training_loss(
    setup: Setup, engine: Engine, algorithm: Algorithm, progress: Progress
) -> dict[str, Any]:
    """The training loss of the round's cohort; before training, of the first one."""
    seen, rate, seed = engine.federation.split.seen, setup.config.participation, engine.seed
    loss, cost = training_loss(
        algorithm,
        engine.objective,
        engine.federation,
        progress.cohort or choose_cohort(seen, rate, seed, 1),
        to_send(algorithm, progress.server),
        progress.states,
        seed,
    )
    return {
        "training_loss": loss,
        "evaluation_gradients": cost.gradients,
        "evaluation_hvps": cost.hvps,
    }
