"""Everything that training needs, validated before anything is written.

It is made for a new run, whose directory is then started, or rebuilt from an existing one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from nufed.algorithms.protocol import Algorithm, Context
from nufed.data import Federation, Samples, Split, check_single_sample
from nufed.errors import InputError, in_short, shown
from nufed.evaluate import Measure
from nufed.lab.config import Config, load_config
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.problem import Given, Problem
from nufed.lab.config.schema import DataConfig
from nufed.lab.runs import RunDirectory
from nufed.lab.runs.provenance import Provenance
from nufed.objective import Objective
from nufed.seeding import stream
from nufed.server import Rules, cohort_size, initial_server, to_send
from nufed.server.rounds import warn_of_memory
from nufed.simulation import (
    DirectEngine,
    EngineName,
    Engines,
    Faults,
    RayCluster,
    device_count,
    start_method,
    unsendable,
    usable_cores,
)


@dataclass(frozen=True)
class Setup:
    """Everything that training needs, validated before a directory is created."""

    config: Config
    problem: Problem
    samples: Samples
    federations: dict[int, Federation]
    objectives: dict[int, Objective]
    algorithms: dict[str, Algorithm]
    measure: Measure
    engines: dict[int, Engines]
    engine_names: dict[str, EngineName]
    evaluated: dict[int, list[int]]
    workers: int
    cluster: RayCluster | None = None  # instead of processes on this machine

    @property
    def rules(self) -> Rules:
        config = self.config
        return Rules(
            config.min_updates,
            max_update_norm=config.norm_bound(),
            codec=config.compression.make(),
        )

    @property
    def faults(self) -> Faults:
        return Faults(**dict(self.config.faults))

    @property
    def validates(self) -> bool:
        """Whether validation scores decide when training stops or which model is kept."""
        return self.config.stop_when is not None or self.config.keep == "best"

    def validated(self, seed: int) -> frozenset[int]:
        """The seen agents on whose validation samples step sizes are chosen."""
        federation = self.federations[seed].scoring("validation")
        unseen = set(federation.split.unseen)
        seen = (agent for agent in self.evaluated[seed] if agent not in unseen)
        return frozenset(federation.scorable(seen))

    def baselines(self) -> list[str]:
        """The configured null baselines that apply to this data and measure."""
        classes = bool(self.samples.classes) and self.measure.name == "accuracy"
        one_input = isinstance(self.samples.inputs, Tensor)
        applies = {"majority": classes, "centroid": classes and one_input}
        return [name for name in self.config.baselines if applies.get(name, True)]

    @classmethod
    def make(cls, problem: Problem, engines_then: Mapping[str, EngineName] | None = None) -> Setup:
        """The setup of a problem; ``engines_then`` are the engines of a run to resume."""
        config, workers = problem.config, worker_count(problem.config)
        # the training loop checks curvature instead, in rounds that don't depend on workers
        algorithms = {name: a.checks.without_warnings() for name, a in problem.algorithms.items()}
        made = cls._assembled(problem, algorithms, {}, workers)
        _check_labels(made)
        _check_single_samples(made)
        _try_model(made)
        first = made.engines[config.seeds[0]]
        then = engines_then or {}
        new = {name: a for name, a in algorithms.items() if name not in then}
        chosen = {name: first.choose(a, config.engine) for name, a in new.items()}
        made = replace(made, engine_names={**chosen, **then})
        if config.tune_local and not len(made.federations[config.seeds[0]].split.validation[0]):
            raise InputError(
                "tune_local = true: agents have no validation part to choose the step size on; set "
                "data.validation, for example to 0.1, or tune_local = false"
            )
        for engines in made.engines.values():  # before processes are forked, to share its caches
            for name in set(made.engine_names.values()):
                engines.get(name)
        if made.validates and not all(made.validated(seed) for seed in config.seeds):
            key = f"stop_when = {config.stop_when}" if config.stop_when else 'keep = "best"'
            raise InputError(
                f"{key}: agents seen in training have no validation part to score on; set "
                "data.validation, for example to 0.2, or remove the key"
            )
        return replace(made, workers=_startable_workers(made))

    def on_ray(self, address: str | None) -> Setup:
        """This setup on a cluster of Ray, whose nodes get it as spawned processes do."""
        if address is None:
            return self
        config = self.config
        if config.device != "cpu":
            raise InputError(f"--ray {address}: device = {config.device!r}, and must be 'cpu'")
        cluster = RayCluster(address, config.threads)
        return replace(self, cluster=cluster, workers=cluster.slots)

    @contextmanager
    def closing(self) -> Iterator[Setup]:
        """Leaves the cluster at the end, if there is one."""
        try:
            yield self
        finally:
            if self.cluster is not None:
                self.cluster.close()

    @classmethod
    def _assembled(
        cls,
        problem: Problem,
        algorithms: dict[str, Algorithm],
        engine_names: dict[str, EngineName],
        workers: int,
    ) -> Setup:
        """The setup from its parts, without checks."""
        config, objectives = problem.config, problem.objectives
        faults = Faults(**dict(config.faults))
        federations = {seed: faults.flip_labels(f, seed) for seed, f in problem.federations.items()}
        engines = {
            seed: Engines(
                objectives[seed],
                federations[seed],
                seed,
                visits=config.rounds * config.participation,
                seeds=len(config.seeds),
            )
            for seed in config.seeds
        }
        return cls(
            config,
            problem,
            problem.samples,
            federations,
            dict(objectives),
            algorithms,
            problem.measure,
            engines,
            engine_names,
            {seed: _evaluated(config, f.split, seed) for seed, f in federations.items()},
            workers,
        )

    def __reduce__(self) -> tuple[Callable[..., Setup], tuple[Any, ...]]:
        """For spawned processes, which rebuild it; the samples are in shared memory."""
        given = replace(self.problem.given, data=None)
        parts = self.algorithms, self.engine_names, self.workers
        return _rebuilt, (self.problem.config, self.config, given, self.samples, *parts)


def _rebuilt(
    of_problem: Config, config: Config, given: Given, samples: Samples, *parts: Any
) -> Setup:
    problem = Problem.make(of_problem, given, samples=samples)
    return replace(Setup._assembled(problem, *parts), config=config)


def _check_labels(setup: Setup) -> None:
    """Refuse whole-number targets that the loss can't be computed for: it is tried on the largest.

    A loss that fails for a small target, too, is left to :func:`_try_model`.
    """
    for seed, federation in setup.federations.items():
        samples, split = federation.samples, federation.split
        if samples.targets.is_floating_point():
            return
        parts = [*split.train, *split.validation, *split.test] if split.recipe is None else []
        held = np.unique(np.concatenate(parts)) if parts else np.arange(len(samples))
        largest = samples.targets[held].long().reshape(len(held), -1).amax(dim=1)
        row, other = (int(held[int(place)]) for place in (largest.argmax(), largest.argmin()))
        error, outputs = _loss_error(setup.objectives[seed], samples, row)
        width = outputs.shape[1] if outputs is not None and outputs.ndim == 2 else None
        beyond = width is not None and int(largest.max()) >= width
        if error and (beyond or not _loss_error(setup.objectives[seed], samples, other)[0]):
            holds = (
                f", of agent {shown(split.names[agent])}"
                for agent in (split.agents if parts else [])
                if any(row in part[agent] for part in (split.train, split.validation, split.test))
            )
            given = "" if outputs is None else f" for outputs of shape {tuple(outputs.shape[1:])}"
            raise InputError(
                f"the target of sample {row} (counted from 0{next(holds, '')}) is "
                f"{int(largest.max())}{given}: {error}; correct it, or give the model an output "
                "for every class"
            )


def _loss_error(
    objective: Objective, samples: Samples, row: int
) -> tuple[str | None, Tensor | None]:
    """Why the loss of a sample can't be computed, if so, and the model's outputs for it."""
    outputs = None
    inputs, targets = samples.take(np.array([row]))
    try:
        outputs = objective.predict(objective.initial(), inputs)
        objective.loss(outputs, targets)
    except Exception as error:  # the user's model or loss may raise anything
        return in_short(error), outputs if isinstance(outputs, Tensor) else None
    return None, outputs


def _check_single_samples(setup: Setup) -> None:
    """Refuse batches of one sample, which epochs may end with, if the model can't train on one."""
    for seed, federation in setup.federations.items():
        objective, split = setup.objectives[seed], federation.split
        for name, algorithm in setup.algorithms.items():
            for agent in [0] if split.recipe else split.agents:
                if check_single_sample(federation, agent, name, algorithm, objective):
                    return  # the same for all


def _try_model(setup: Setup) -> None:
    """Check, before anything is written, that model, loss, metric and data are compatible.

    Runs one round of every method at one agent, and evaluates it.
    """
    seed, measure = setup.config.seeds[0], setup.measure
    objective, federation = setup.objectives[seed], setup.federations[seed]
    engine = DirectEngine(objective, federation, seed)
    w = objective.initial()
    context = Context(0, len(federation.split.seen), 1)
    cohort = cohort_size(context.agents, setup.config.participation)
    for name, algorithm in setup.algorithms.items():
        try:
            server = initial_server(algorithm, objective, w)
            received = to_send(algorithm, server)
            states = {0: algorithm.agent_init(objective, received)}
            engine.agent_updates(algorithm, received, states, context)
            engine.evaluate(algorithm, received, states, steps=1, measure=measure)
            warn_of_memory(name, algorithm, server, replace(context, cohort=cohort))
        except InputError:
            raise
        except Exception as error:  # the user's algorithm, model, loss or metric may raise anything
            cause = error.__cause__ or error
            known = _known_cause(objective, federation)
            if known is not None:
                raise InputError(f"{known} ({in_short(cause)})") from error
            raise InputError(
                f"the model, loss and metric can't be used on this data, inputs of shape "
                f"{federation.samples.input_shape}, by the method {name}: {in_short(cause)}"
            ) from error


def _known_cause(objective: Objective, federation: Federation) -> str | None:
    """What of the data or the model's output can't be used, and the remedy; None if unknown."""
    w, rows = objective.initial(), federation.split.train[0][:2]
    inputs, targets = federation.samples.take(rows)
    outputs: Any = None
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        plain = not _fails(lambda: objective.predict(w, inputs.to(w.dtype)))
        if plain and _fails(lambda: objective.predict(w, inputs)):
            kind = str(inputs.dtype).removeprefix("torch.")
            return (
                f"the inputs are {kind}, and this model computes with floating-point numbers: give "
                'them as such, for example inputs.astype("float32")'
            )
    with suppress(Exception):
        outputs = objective.predict(w, inputs)
    if outputs is not None and not isinstance(outputs, Tensor):
        return (
            f"the model gives a {type(outputs).__name__} and not a tensor: wrap it in a module "
            "whose forward returns one of its tensors"
        )
    if targets.ndim == 2 and targets.shape[1] == 1:
        return (
            f"the targets have shape {tuple(federation.samples.targets.shape)}: give class numbers "
            "in one dimension, for example targets.reshape(-1), and numbers to predict as "
            "floating-point numbers"
        )
    numbers = targets.is_floating_point() and outputs is not None
    if numbers and not _fails(lambda: objective.loss(cast(Tensor, outputs), targets.long())):
        return (
            "the targets are floating-point numbers, and this loss takes class numbers: give whole "
            "numbers, for example targets.astype(int), or another loss"
        )
    return None


def _fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # the user's model or loss may raise anything
        return True
    return False


def _evaluated(config: Config, split: Split, seed: int) -> list[int]:
    """The agents to evaluate: all, or a sample each of seen and of unseen agents."""
    if config.eval_agents is None:
        return list(split.agents)
    rng = stream(seed, "evaluated agents")
    chosen: list[int] = []
    for group in (split.seen, split.unseen):
        picked = rng.choice(len(group), min(config.eval_agents, len(group)), replace=False)
        chosen += sorted(group[i] for i in picked)
    return chosen


def worker_count(config: Config) -> int:
    """``workers`` as a number; ``auto`` is one per core, or per accelerator of this machine."""
    devices = device_count(config.device)
    reason = None
    if config.threads > 1:
        most, reason = 1, f"threads = {config.threads}, which one process uses"
    elif config.device != "cpu":
        most = devices
        reason = f"device = {config.device!r}, and there are as many of these: one for each process"
        if devices == 1:
            reason = f"device = {config.device!r}, which one process uses at a time"
    else:
        most = usable_cores()
    if config.workers == "auto":
        return most
    if reason and config.workers > most:
        allowed = "1" if most == 1 else f"{most} or fewer"
        raise InputError(f"workers = {config.workers}: must be {allowed}, because {reason}")
    return config.workers


def _startable_workers(setup: Setup) -> int:
    """The number of workers; 1, with a warning, if spawned processes can't get the setup."""
    spawned = setup.config.device != "cpu" or start_method() == "spawn"
    if setup.workers == 1 or not spawned:
        return setup.workers
    reason = unsendable(setup)
    if reason is None:
        return setup.workers
    warnings.warn(
        "this run uses one process, because worker processes can't import what it was given "
        f"({reason}): define models, losses, metrics and methods in a module of their own, not in "
        "the script, a notebook or another function",
        stacklevel=2,
    )
    return 1


def load_one_run(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    methods: Mapping[str, Algorithm] | None = None,
) -> Config:
    """The configuration of one simulated run; refuses those of a sweep or a federation."""
    checked = load_config(config, overrides, methods)
    check_simulated(checked)
    if checked.sweep:
        raise InputError(
            "[sweep] is for several runs: start them with `nufed sweep`, or remove the table"
        )
    return checked


def check_simulated(config: Config) -> None:
    """Refuse the tables of a real federation."""
    for table in ("federation", "privacy"):
        if table in config.model_dump():
            raise InputError(
                f"[{table}] is for a federation whose sites keep their data: start it with `nufed "
                "federate run`, or remove the table to simulate"
            )


def begin_run(setup: Setup, directory: RunDirectory) -> None:
    """Write the splits and settings of a new run."""
    for seed, federation in setup.problem.federations.items():
        directory.write_split(federation.split, federation.samples, seed)
    Provenance(directory).write(
        setup.config,
        setup.measure,
        setup.engine_names,
        setup.problem.example,
        setup.samples.fingerprint,
    )


def reopen_run(
    directory: RunDirectory,
    overrides: Sequence[str],
    given: Given,
    *,
    trust: bool,
    load_samples: Callable[[DataConfig], Samples | None] = lambda data: None,
) -> Setup:
    """The setup of an existing run, whose files must match it; nothing but a missing split is
    written.

    Args:
        directory: the run's directory.
        overrides: only ``rounds=…`` and ``workers=…``.
        given: the objects that were passed to the run.
        trust: allow importing the code that the directory names.
        load_samples: gives the data if it is loaded already, else None.
    """
    provenance = Provenance(directory)
    config = provenance.read_to_resume(overrides)
    recorded = provenance.recorded(config)
    recorded.check_trusted(given, trust)
    engines = provenance.engines()
    provenance.check_config(given.with_placeholders(config))
    with torch_threads(config.threads):
        samples = load_samples(config.data)
        problem = Problem.rebuild(recorded, given, trust=trust, samples=samples)
        provenance.check_split_files({seed: f.split for seed, f in problem.federations.items()})
        return Setup.make(problem, engines)
