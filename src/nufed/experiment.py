"""Runs a configuration: trains every method and seed, leaves a run directory and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from nufed.algorithm import Algorithm, State
from nufed.algorithms import GMeta, fedavg
from nufed.data import Federation, Samples, as_samples
from nufed.errors import InputError, TrainingError
from nufed.evaluate import AgentScores, Measure, Metric, majority_class, summarise
from nufed.objective import Loss, Objective
from nufed.runs import Config, Run, RunDirectory, load_config, load_run
from nufed.runs.build import (
    build_federation,
    build_loss,
    build_measure,
    build_module,
    build_objective,
    build_samples,
)
from nufed.runs.config import OWN
from nufed.runs.directory import write_json, write_line
from nufed.server import to_send
from nufed.simulation import DirectEngine, Progress, train
from nufed.threads import torch_threads


@dataclass(frozen=True)
class Event:
    """What a progress display needs: where the run is, and the last score measured there."""

    seed: int
    method: str
    round: int
    score: float | None


Listener: TypeAlias = Callable[[Event], None]


def run(
    config: str | Path | Mapping[str, Any] = "quickstart",
    overrides: Sequence[str] = (),
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    out: str | Path | None = None,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
) -> Run:
    """Train and evaluate every method of a configuration, as ``nufed run`` does.

    Args:
        config: a preset's name, a TOML file, or the same tables as a mapping.
        overrides: ``key=value`` strings, as on the command line.
        model: your own module, or a function that makes one, instead of ``[model]``.
        data: your own data instead of ``[data] source``: ``(inputs, targets)``, with ``owners`` as
            a third for a natural federation, a ``Dataset``, or :class:`nufed.Samples`.
        loss: your own ``loss(outputs, targets)``; metric: your own ``metric(outputs, targets)``,
            more is better.
        out: the run directory to make; ``runs/NAME-001`` and so on by default.
        on_start, on_progress: called with the directory, and after every round.

    Returns:
        The finished run, read back from its directory (``run.path``, ``run.rows()``).
    """
    checked = load_config(config, overrides)
    setup = _Setup.make(checked, model=model, data=data, loss=loss, metric=metric)
    directory = RunDirectory.create(checked.name, None if out is None else Path(out))
    directory.write_start(setup.config, setup.measure)
    if on_start:
        on_start(setup.config, directory.path)
    with torch_threads(checked.threads):
        for seed in checked.seeds:
            _run_seed(setup, seed, directory, on_progress or (lambda event: None))
    finished = load_run(directory.path)
    if not finished.methods:
        raise TrainingError(f"no method could be trained: {finished.failures[0]}")
    write_json(directory.path / "results.json", finished.to_json())
    from nufed.report import build_report  # charts take a moment to import

    build_report([finished], directory.path)
    return finished


@dataclass(frozen=True)
class _Setup:
    """Everything that training needs, checked before a directory is made."""

    config: Config
    samples: Samples
    federations: dict[int, Federation]
    objectives: dict[int, Objective]
    algorithms: dict[str, Algorithm]
    measure: Measure

    @classmethod
    def make(cls, config: Config, **own: Any) -> _Setup:
        samples = build_samples(config.data) if own["data"] is None else as_samples(own["data"])
        loss = own["loss"] or build_loss(config, samples)
        measure = build_measure(config, samples)
        if own["metric"] is not None:
            measure = Measure(getattr(own["metric"], "__name__", "metric"), own["metric"])
        algorithms = config.algorithms()
        federations = {s: build_federation(config.data, samples, s) for s in config.seeds}
        for federation in federations.values():
            for algorithm in algorithms.values():
                federation.check_batch_size(algorithm.batch_size)
        objectives = {
            seed: build_objective(config, _module(config, own["model"], samples, seed), loss)
            for seed in config.seeds
        }
        setup = cls(_noting(config, own), samples, federations, objectives, algorithms, measure)
        setup._try_model()
        return setup

    def _try_model(self) -> None:
        """Find out, before anything is written, whether model, loss, metric and data fit together.

        One agent works for one round with every method, and is evaluated.
        """
        seed = self.config.seeds[0]
        engine = DirectEngine(self.objectives[seed], self.federations[seed], seed)
        w = self.objectives[seed].initial()
        try:
            with torch_threads(self.config.threads):
                for algorithm in self.algorithms.values():
                    server, states = algorithm.server_init(w), {0: algorithm.client_init(w)}
                    engine.client_updates(algorithm, to_send(algorithm, server), states, round=0)
                    engine.evaluate(algorithm, server, states, steps=1, measure=self.measure)
        except InputError:
            raise
        except Exception as error:  # whatever the user's model, loss or metric does wrong
            raise InputError(
                f"the model, loss and metric can't be used on this data, inputs of shape "
                f"{self.samples.input_shape}: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error


def _module(config: Config, model: Any, samples: Samples, seed: int) -> nn.Module:
    return model if isinstance(model, nn.Module) else build_module(config, samples, seed, model)


def _noting(config: Config, own: Mapping[str, Any]) -> Config:
    """The configuration with a note in the place of everything that was passed as an object."""
    update: dict[str, Any] = {k: OWN for k in ("loss", "metric") if own[k] is not None}
    if own["model"] is not None:
        update["model"] = config.model.model_copy(update={"name": OWN, "args": {}})
    if own["data"] is not None:
        update["data"] = config.data.model_copy(update={"source": OWN, "args": {}})
    return config.model_copy(update=update)


def _run_seed(setup: _Setup, seed: int, directory: RunDirectory, listener: Listener) -> None:
    federation, objective = setup.federations[seed], setup.objectives[seed]
    directory.write_split(federation.split, setup.samples, seed)
    engine = DirectEngine(objective, federation, seed)
    listener(Event(seed, "null baselines", 0, None))
    for name, scores in _baselines(setup, engine):
        directory.write_scores("baselines", name, seed, scores)
    for name, algorithm in setup.algorithms.items():
        try:
            _run_method(setup, engine, name, algorithm, directory, listener)
        except TrainingError as error:  # the other methods go on
            directory.write_failure(name, seed, str(error))


def _run_method(
    setup: _Setup,
    engine: DirectEngine,
    name: str,
    algorithm: Algorithm,
    directory: RunDirectory,
    listener: Listener,
) -> None:
    config, seed = setup.config, engine.seed
    start, scores, score = time.perf_counter(), [], None
    with (directory.part("methods", name, seed) / "metrics.jsonl").open("w") as file:
        for progress in train(
            algorithm,
            engine,
            engine.objective.initial(),
            rounds=config.rounds,
            participation=config.participation,
        ):
            line = _record(algorithm, progress)
            if progress.round % config.eval_every == 0 or progress.round == config.rounds:
                scores = _evaluate(setup, engine, algorithm, progress)
                line["evaluation"] = _by_group(scores, setup)
                score = line["evaluation"]["seen"]["score"][-1]
            write_line(file, line)
            if config.save_every and progress.round and progress.round % config.save_every == 0:
                directory.write_model(name, seed, progress.server, progress.round)
            listener(Event(seed, name, progress.round, score))
    directory.write_scores("methods", name, seed, scores)
    directory.write_model(name, seed, progress.server)
    directory.write_timing(method=name, seed=seed, seconds=time.perf_counter() - start)


def _record(algorithm: Algorithm, progress: Progress) -> dict[str, Any]:
    """What one round took and did."""
    agents = len(progress.cohort)
    return {
        "round": progress.round,
        "cohort": progress.cohort,
        "rejected": [{"agent": r.agent, "reason": r.reason} for r in progress.rejected],
        "gradients": progress.cost.gradients,
        "hvps": progress.cost.hvps,
        "bytes_down": agents * _bytes(progress.server, algorithm.receives),
        "bytes_up": agents * _bytes(progress.server, algorithm.sends),
    }


def _bytes(server: State, names: Sequence[str]) -> int:
    return sum(server[name].nbytes for name in names)


def _evaluate(
    setup: _Setup, engine: DirectEngine, algorithm: Algorithm, progress: Progress
) -> list[AgentScores]:
    states = progress.client_states(algorithm, engine.federation.split.agents)
    return engine.evaluate(
        algorithm,
        progress.server,
        states,
        steps=setup.config.steps_evaluated,
        measure=setup.measure,
    )


def _by_group(scores: Sequence[AgentScores], setup: _Setup) -> dict[str, dict[str, list[float]]]:
    """Mean score and loss after 0 … eval_steps steps, over agents seen in training and others."""
    groups = {}
    for group in ("seen", "unseen"):
        chosen = [s for s in scores if s.seen == (group == "seen")]
        if chosen:
            steps = range(setup.config.steps_evaluated + 1)
            means = [summarise(chosen, step, setup.measure) for step in steps]
            groups[group] = {"score": [m.mean for m in means], "loss": [m.loss for m in means]}
    return groups


def _baselines(setup: _Setup, engine: DirectEngine) -> Iterator[tuple[str, list[AgentScores]]]:
    """The null baselines."""
    steps = setup.config.steps_evaluated
    agents = engine.federation.split.agents
    if setup.samples.classes and setup.measure.name == "accuracy":
        yield "majority", [majority_class(engine.federation, a, steps) for a in agents]
    alone = _alone(setup)
    initial = alone.server_init(engine.objective.initial())

    def evaluate(server: State, agents: Sequence[int]) -> list[AgentScores]:
        nothing: dict[int, State] = {agent: {} for agent in agents}
        return engine.evaluate(alone, server, nothing, steps=steps, measure=setup.measure)

    yield "untrained", evaluate(initial, agents)
    yield (
        "local",
        [
            evaluate(engine.client_updates(alone, initial, {a: {}}, round=1)[a].vectors, [a])[0]
            for a in agents
        ],
    )


def _alone(setup: _Setup) -> GMeta:
    """FedAvg without a server, in every round: with the settings of the first method."""
    first = next(iter(setup.algorithms.values()))
    settings = first if isinstance(first, GMeta) else setup.config.method
    return fedavg(
        adapt_lr=settings.adapt_lr,
        meta_lr=settings.meta_lr,
        batch_size=settings.batch_size,
        local_steps=settings.local_steps * setup.config.rounds,
    )
