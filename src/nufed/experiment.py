"""Runs a configuration: trains every method and seed, leaves a run directory and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from nufed.algorithm import Algorithm, State
from nufed.algorithms import fedavg
from nufed.data import Federation, Samples, as_samples
from nufed.errors import InputError
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
from nufed.runs.directory import write_json, write_line
from nufed.simulation import DirectEngine, Progress, train
from nufed.threads import torch_threads

OWN = "given in Python"  # stands in the configuration for what was passed as an object


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
        elif own["loss"] is not None and not samples.classes:
            measure = Measure("loss", None)
        algorithms = config.algorithms()
        federations = {s: build_federation(config.data, samples, s) for s in config.seeds}
        for federation in federations.values():
            for algorithm in (*algorithms.values(), config.method.build()):
                federation.check_batch_size(algorithm.batch_size)
        objectives = {
            seed: build_objective(config, _module(config, own["model"], samples, seed), loss)
            for seed in config.seeds
        }
        setup = cls(_noting(config, own), samples, federations, objectives, algorithms, measure)
        setup._try_model()
        return setup

    def _try_model(self) -> None:
        """Find out before training whether model, loss and data go together."""
        seed, objective = next(iter(self.objectives.items()))
        size = self.config.method.batch_size
        (batch,) = self.federations[seed].batches(0, seed, "train").draw("outer", size)
        try:
            objective.value(objective.initial(), batch)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the model and loss can't be used on this data, inputs of shape "
                f"{self.samples.input_shape}: {str(error).splitlines()[0]}"
            ) from error


def _module(config: Config, model: Any, samples: Samples, seed: int) -> nn.Module:
    if model is None:
        return build_module(config, samples, seed)
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = model()
    return module


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
    for name, scores in _baselines(setup, engine):
        directory.write_scores("baselines", name, seed, scores)
    for name, algorithm in setup.algorithms.items():
        _run_method(setup, engine, name, algorithm, directory, listener)


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
        algorithm, progress.server, states, steps=setup.config.eval_steps, measure=setup.measure
    )


def _by_group(scores: Sequence[AgentScores], setup: _Setup) -> dict[str, dict[str, list[float]]]:
    """Mean score and loss after 0 … eval_steps steps, over agents seen in training and others."""
    groups = {}
    for group in ("seen", "unseen"):
        chosen = [s for s in scores if s.seen == (group == "seen")]
        if chosen:
            steps = range(setup.config.eval_steps + 1)
            means = [summarise(chosen, step, setup.measure) for step in steps]
            groups[group] = {"score": [m.mean for m in means], "loss": [m.loss for m in means]}
    return groups


def _baselines(setup: _Setup, engine: DirectEngine) -> Iterator[tuple[str, list[AgentScores]]]:
    """The null baselines, with the settings of ``[method]``."""
    shared, steps = setup.config.method, setup.config.eval_steps
    agents = engine.federation.split.agents
    if setup.samples.classes and setup.measure.name == "accuracy":
        yield "majority", [majority_class(engine.federation, a, steps) for a in agents]
    alone = fedavg(
        adapt_lr=shared.adapt_lr,
        meta_lr=shared.meta_lr,
        batch_size=shared.batch_size,
        local_steps=shared.local_steps * setup.config.rounds,
    )
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
