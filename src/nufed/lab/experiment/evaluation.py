"""Scores of a method with one seed between rounds and at the end; the null baselines.

The null baselines are the majority class, the untrained model and local training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.protocol import Algorithm, Context, State
from nufed.data import ScoredOn
from nufed.evaluate import (
    AgentScores,
    ByScale,
    Evaluation,
    Measure,
    Scoring,
    can_be_drawn,
    choose_step_sizes,
    chooses,
    evaluate_with_choice,
    evaluation_context,
    fits,
    majority_class,
    preferred,
    summarise,
    training_loss,
)
from nufed.evaluate.null_baselines import OwnModel
from nufed.evaluate.null_baselines import local_training as training_alone
from nufed.lab.experiment.setup import Setup
from nufed.lab.runs.agent_states import personal_after, write_personal
from nufed.lab.runs.part_files import Recorder
from nufed.lab.runs.records import evaluation_line
from nufed.server import Progress, StatesOf, choose_cohort, to_send
from nufed.simulation import Engine, EngineName
from nufed.simulation.choose_engine import STACK


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
    score = scorer(setup, engine, algorithm, progress, part, agents, steps, measure)
    seen = [agent for agent in agents if agent in setup.validated(engine.seed)]
    validate = scorer(setup, engine, algorithm, progress, "validation", seen, steps)
    return evaluate_with_choice(
        score, validate if choose and seen else None, steps, setup.measure, preferred(algorithm)
    )


def with_fits(setup: Setup, engine: Engine, name: str, final: Final) -> Evaluation:
    """The final scores with the curves of some agents' models, where models are curves."""
    shown, evaluation = final
    if not can_be_drawn(setup.problem.example):
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


def scorer(
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
        algorithm, received, states, Scoring(steps, measure, scales, part)
    )


def _validate(
    setup: Setup, engine: Engine, name: str, progress: Progress, recorder: Recorder
) -> dict[str, Any]:
    """Add the score of a round on the validation samples of seen agents, if it is used."""
    if recorder.files.validation is None:
        return {}
    steps, agents = setup.config.steps_of(name)[0], sorted(setup.validated(engine.seed))
    score = scorer(setup, engine, setup.algorithms[name], progress, "validation", agents, steps)
    prefer = preferred(setup.algorithms[name])
    evaluation = evaluate_with_choice(score, None, steps, setup.measure, prefer)
    mean = summarise(evaluation.as_trained, steps, setup.measure).mean
    recorder.files.validation.add(progress.round, mean)
    return {
        "validation_score": mean,
        "evaluation_gradients": evaluation.gradients,
        "evaluation_hvps": evaluation.hvps,
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


def baselines(
    setup: Setup, seed: int, get_engine: Callable[[EngineName], Engine], wanted: Sequence[str]
) -> Iterator[tuple[str, Evaluation]]:
    """Evaluate the null baselines named in ``wanted``."""
    config, steps = setup.config, setup.config.steps_evaluated
    agents, engines = setup.evaluated[seed], setup.engines[seed]
    local, measure = local_training(setup), setup.measure.resampled(len(agents))
    short = local_training(setup, rounds=1)
    own_model, own_model_short = OwnModel.like(local), OwnModel.like(short)
    named = config.engine
    scorer = engines.choose(own_model, "auto" if named == "gram" else named, own_model_short)
    engine = get_engine(scorer)
    if "majority" in wanted:
        scores = [majority_class(engine.federation, a, steps, measure.resamples) for a in agents]
        yield "majority", Evaluation(scores)
    initial = {"model": engine.objective.initial()}
    if "untrained" in wanted:
        choose = chooses(config.eval_lr, True)
        yield "untrained", evaluate(setup, engine, local, Progress(0, initial), choose, True)
    if "local" not in wanted:
        return
    trainer = get_engine(engines.choose(local, named, short))

    def train_and_score(
        scale: float, score: Callable[[dict[int, State]], list[AgentScores]]
    ) -> list[AgentScores]:
        """Agents' scores after local training with ``scale`` times the step size."""
        sized = replace(local, meta_lr=scale * float(local.meta_lr))
        by_agent: dict[int, AgentScores] = {}
        for group in _groups(trainer, sized, agents, setup.workers):
            context = Context(1, len(agents), len(agents))
            results = trainer.agent_updates(sized, initial, {a: {} for a in group}, context)
            scores = score({agent: result.vectors for agent, result in results.items()})
            by_agent |= {agent_scores.agent: agent_scores for agent_scores in scores}
        return [by_agent[agent] for agent in agents if agent in by_agent]

    def validation(models: dict[int, State]) -> list[AgentScores]:
        (scores,) = engine.evaluate_scales(
            own_model,
            initial,
            {agent: model for agent, model in models.items() if agent in setup.validated(seed)},
            Scoring(0, setup.measure, part="validation"),
        )
        return scores

    def final(models: dict[int, State]) -> list[AgentScores]:
        return engine.evaluate(own_model, initial, models, steps=steps, measure=measure)

    sizes = None
    if config.tune_local:
        sizes = choose_step_sizes(
            lambda scales: [train_and_score(scale, validation) for scale in scales],
            [0],
            measure,
            "best",
        )
    scores = train_and_score(sizes.scale(0) if sizes else 1.0, final)
    yield "local", Evaluation(scores, step_sizes=sizes)


def _groups(
    engine: Engine, algorithm: Algorithm, agents: Sequence[int], workers: int
) -> Iterator[list[int]]:
    """Agents whose local models are in memory together: all, or one per worker if large.

    Groups consist of whole chunks of the engine, so that they change no bits.
    """
    if engine.objective.size <= STACK:  # small models are stacked, and groups would change stacks
        yield list(agents)
        return
    group: list[int] = []
    for chunk in engine.chunks(algorithm, agents):
        group += chunk
        if len(group) >= workers:
            yield group
            group = []
    if group:
        yield group


def local_training(setup: Setup, rounds: int | None = None) -> GMeta:
    """Local training with the settings of the first method, of all rounds by default."""
    first = next(iter(setup.algorithms.values()))
    return training_alone(first, setup.config.rounds if rounds is None else rounds)


def write_personal_models(
    setup: Setup, engine: Engine, name: str, final: Final, folder: Path
) -> None:
    """Write the personal models of all agents that have a state, as results show them.

    Other agents' are made from the global model, and can be recomputed.
    """
    config, federation, algorithm = setup.config, engine.federation, setup.algorithms[name]
    steps, (shown, evaluation) = config.steps_of(name)[0], final
    received, states = to_send(algorithm, shown.server), shown.states
    scale = evaluation.scale(steps)
    about = {"method": name, "round": shown.round, "fine_tuning_steps": steps, "lr_scale": scale}
    for agent in states.agents():
        batches = federation.batches(agent, engine.seed, "evaluate")
        context = evaluation_context(federation, engine.objective, batches, batches.samples)
        tensors = personal_after(algorithm, context, received, states.get(agent), steps, scale)
        write_personal(folder, agent, tensors, about)
