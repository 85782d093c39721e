"""Scores of a method with one seed between rounds and at the end; the null baselines.

The null baselines are the majority class, the nearest centroid, the untrained model and local
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.protocol import Algorithm, Context, State
from nufed.data import ScoredOn
from nufed.evaluate import (
    AgentScores,
    ByScale,
    Evaluation,
    Examples,
    Measure,
    Scoring,
    choose_step_sizes,
    chooses,
    evaluate_with_choice,
    evaluation_context,
    majority_class,
    nearest_centroid,
    preferred,
    summarise,
    training_loss,
)
from nufed.evaluate.null_baselines import OwnModel, local_training as training_alone
from nufed.lab.experiment.setup import Setup
from nufed.lab.runs.agent_states import personal_after, write_personal
from nufed.lab.runs.part_files import Recorder
from nufed.lab.runs.records import evaluation_line
from nufed.server import Downlink, Progress, StatesOf, choose_cohort, to_send
from nufed.simulation import GRAM, Engine, EngineName
from nufed.simulation.choose_engine import STACK


class Final(NamedTuple):
    """The training state whose model results show, and its scores."""

    shown: Progress
    evaluation: Evaluation


@dataclass(frozen=True)
class Evaluator:
    """Scores the models of a training on its engine.

    Args:
        setup: of the run.
        engine: of the seed.
        algorithm: what was trained.
        steps: the number of fine-tuning steps that results show.
    """

    setup: Setup
    engine: Engine
    algorithm: Algorithm
    steps: int

    @classmethod
    def of(cls, setup: Setup, engine: Engine, name: str) -> Evaluator:
        """The evaluator of a method of the run."""
        return cls(setup, engine, setup.algorithms[name], setup.config.steps_of(name)[0])

    def scorer(
        self,
        progress: Progress,
        part: ScoredOn,
        agents: Sequence[int],
        steps: int,
        measure: Measure | None = None,
    ) -> ByScale:
        """Scores agents on one part of their samples, after up to ``steps`` fine-tuning steps."""
        algorithm, measure = self.algorithm, measure or self.setup.measure
        received, states = to_send(algorithm, progress.server), StatesOf(agents, progress.states)
        return lambda scales: self.engine.evaluate_scales(
            algorithm, received, states, Scoring(steps, measure, scales, part)
        )

    def round(self, progress: Progress, recorder: Recorder) -> tuple[dict[str, Any], Final | None]:
        """The entries of an evaluation in a round's line; after the last also the final scores.

        First comes the validation score, which decides whether this round is the last.
        """
        config, measure = self.setup.config, self.setup.measure
        validated = self._validate(progress, recorder)
        last = recorder.is_last(progress)
        shown = recorder.shown(progress) if last else progress
        evaluation = self.evaluate(progress, last and shown is progress)
        entries = evaluation_line(evaluation, config.steps_evaluated, measure)
        trained = self._training_loss(progress)
        costs = [validated, trained, dict(entries)]
        final = Final(shown, evaluation) if last else None
        if shown is not progress:
            final = Final(shown, self.evaluate(shown, True))
            costs.append(evaluation_line(final.evaluation, config.steps_evaluated, measure))
        for key in ("evaluation_gradients", "evaluation_hvps"):
            entries[key] = sum(each.get(key, 0) for each in costs)
        return {**validated, **trained, **entries}, final

    def evaluate(self, progress: Progress, final: bool) -> Evaluation:
        """Scores of the evaluated agents as trained and, if ``eval_lr`` says so and they have
        validation samples, with step sizes chosen on these; ``final`` ones with resamples, if
        agents are few."""
        setup, seed, measure = self.setup, self.engine.seed, self.setup.measure
        steps, agents = setup.config.steps_evaluated, setup.evaluated[seed]
        resampled = measure.resampled(len(agents)) if final else measure
        score = self.scorer(progress, setup.config.eval_on, agents, steps, resampled)
        seen = [agent for agent in agents if agent in setup.validated(seed)]
        validate = None
        if seen and chooses(setup.config.eval_lr, final):
            validate = self.scorer(progress, "validation", seen, steps)
        return evaluate_with_choice(score, validate, steps, measure, preferred(self.algorithm))

    def with_examples(self, final: Final) -> Evaluation:
        """The final scores with the curves of some agents' models, where models are curves, and
        their guesses on some images, where samples are small images."""
        shown, evaluation = final
        examples = Examples(
            self.algorithm,
            self.engine.objective,
            self.engine.federation,
            to_send(self.algorithm, shown.server),
            shown.states.get,
            self.engine.seed,
            self.setup.config.steps_evaluated,
            evaluation.scale,
        )
        return replace(evaluation, fits=examples.fits(), guesses=examples.guesses())

    def write_personal_models(self, name: str, final: Final, folder: Path) -> None:
        """Write the personal models of all agents that have a state, as results show them.

        Other agents' are made from the global model, and can be recomputed. ``name`` is the
        method's.
        """
        engine, algorithm, steps = self.engine, self.algorithm, self.steps
        shown, scale = final.shown, final.evaluation.scale(steps)
        received, states = to_send(algorithm, shown.server), shown.states
        about = {
            "method": name,
            "round": shown.round,
            "fine_tuning_steps": steps,
            "lr_scale": scale,
        }
        for agent in states.agents():
            batches = engine.federation.batches(agent, engine.seed, "evaluate")
            context = evaluation_context(
                engine.federation, engine.objective, batches, batches.samples
            )
            mine = Downlink.of(received).to(agent)
            tensors = personal_after(algorithm, context, mine, states.get(agent), steps, scale)
            write_personal(folder, agent, tensors, about)

    def _validate(self, progress: Progress, recorder: Recorder) -> dict[str, Any]:
        """Add the score of a round on the validation samples of seen agents, if it is used."""
        scores, measure, steps = recorder.files.validation, self.setup.measure, self.steps
        if scores is None:
            return {}
        agents = sorted(self.setup.validated(self.engine.seed))
        score = self.scorer(progress, "validation", agents, steps)
        evaluation = evaluate_with_choice(score, None, steps, measure, preferred(self.algorithm))
        mean = summarise(evaluation.as_trained, steps, measure).mean
        scores.add(progress.round, mean)
        return {
            "validation_score": mean,
            "evaluation_gradients": evaluation.gradients,
            "evaluation_hvps": evaluation.hvps,
        }

    def _training_loss(self, progress: Progress) -> dict[str, Any]:
        """The training loss of the round's cohort; before training, of the first one."""
        federation, seed = self.engine.federation, self.engine.seed
        rate, seen = self.setup.config.participation, federation.split.seen
        loss, cost = training_loss(
            self.algorithm,
            self.engine.objective,
            federation,
            progress.cohort or choose_cohort(seen, rate, seed, 1),
            to_send(self.algorithm, progress.server),
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
    scorer = engines.choose(own_model, "auto" if named in GRAM else named, own_model_short)
    engine = get_engine(scorer)
    for name, guess in (("majority", majority_class), ("centroid", nearest_centroid)):
        if name in wanted:
            scores = [guess(engine.federation, a, steps, measure.resamples) for a in agents]
            yield name, Evaluation(scores)
    initial = {"model": engine.objective.initial()}
    if "untrained" in wanted:
        untrained = Evaluator(setup, engine, local, steps)
        yield "untrained", untrained.evaluate(Progress(0, initial), True)
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
    first, config = next(iter(setup.algorithms.values())), setup.config
    alone = training_alone(first, config.rounds if rounds is None else rounds)
    return alone if config.local_lr is None else replace(alone, meta_lr=config.local_lr)
