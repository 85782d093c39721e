"""Everything that training needs, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nufed.algorithm import Algorithm
from nufed.algorithms import GMeta
from nufed.data import Federation, Samples, Split, as_samples
from nufed.errors import InputError
from nufed.evaluate import Measure
from nufed.metagrad import unchecked
from nufed.objective import Objective
from nufed.runs import Config
from nufed.runs.build import (
    build_federation,
    build_loss,
    build_measure,
    build_module,
    build_objective,
    build_samples,
)
from nufed.runs.schema import OWN
from nufed.seeding import stream
from nufed.server import Rules, to_send
from nufed.simulation import DirectEngine, EngineName, Engines, Faults, can_fork, usable_cores


@dataclass(frozen=True)
class Setup:
    """Everything that training needs, checked before a directory is made."""

    config: Config
    samples: Samples
    federations: dict[int, Federation]
    objectives: dict[int, Objective]
    algorithms: dict[str, Algorithm]
    measure: Measure
    engines: dict[int, Engines]
    engine_names: dict[str, EngineName]
    evaluated: dict[int, list[int]]
    workers: int

    @property
    def rules(self) -> Rules:
        config = self.config
        return Rules(config.min_updates, max_update_norm=config.max_update_norm)

    @property
    def faults(self) -> Faults:
        return Faults(**dict(self.config.faults))

    def belongs_to(self, seed: int) -> dict[str, str]:
        """What a checkpoint must share with the run to be used, as hashes."""
        return {
            "configuration": self.config.fingerprint,
            "data": self.samples.fingerprint,
            "split": self.federations[seed].split.fingerprint,
        }

    def validated(self, seed: int) -> frozenset[int]:
        """The seen agents on whose validation samples step sizes are chosen."""
        federation = self.federations[seed].scoring("validation")
        unseen = set(federation.split.unseen)
        seen = (agent for agent in self.evaluated[seed] if agent not in unseen)
        return frozenset(federation.scorable(seen))

    def baselines(self) -> list[str]:
        """The null baselines that are asked for and make sense here."""
        classes = self.samples.classes and self.measure.name == "accuracy"
        return [name for name in self.config.baselines if classes or name != "majority"]

    @classmethod
    def make(
        cls, config: Config, engines_then: Mapping[str, EngineName] | None = None, **own: Any
    ) -> Setup:
        """From a configuration; ``engines_then`` are those of a run that is taken up again."""
        for table in ("federation", "privacy"):
            if table in config.model_dump():
                raise InputError(
                    f"[{table}] is for sites that keep their data: start it with `nufed federate "
                    "run`, or remove the table to simulate"
                )
        samples = build_samples(config.data) if own["data"] is None else as_samples(own["data"])
        samples.check_finite(getattr(torch, config.dtype))
        loss = own["loss"] or build_loss(config, samples)
        metric = own["metric"]
        measure = (
            build_measure(config, samples)
            if metric is None
            else Measure(getattr(metric, "__name__", "metric"), metric)
        )
        algorithms = {name: _unchecked(a) for name, a in config.algorithms().items()}
        faults = Faults(**dict(config.faults))
        federations = {
            s: faults.spoil(build_federation(config, samples, s), s) for s in config.seeds
        }
        for federation in federations.values():
            for algorithm in algorithms.values():
                federation.check_batch_size(algorithm.batch_size)
        objectives = {
            seed: build_objective(config, _module(config, own["model"], samples, seed), loss)
            for seed in config.seeds
        }
        _try_model(config, samples, federations, objectives, algorithms, measure)
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
        first = engines[config.seeds[0]]
        chosen = {name: first.choose(a, config.engine) for name, a in algorithms.items()}
        names = {**chosen, **(engines_then or {})}
        if config.tune_local and not len(federations[config.seeds[0]].split.validation[0]):
            raise InputError(
                "tune_local = true: agents have no validation part to choose the step size on; set "
                "data.validation, for example to 0.1, or tune_local = false"
            )
        for seed in config.seeds:  # before processes are forked, so that they share what is kept
            for name in set(names.values()):
                engines[seed].get(name)
        return cls(
            _noting(config, own),
            samples,
            federations,
            objectives,
            algorithms,
            measure,
            engines,
            names,
            {seed: _evaluated(config, f.split, seed) for seed, f in federations.items()},
            _workers(config),
        )


def _unchecked(algorithm: Algorithm) -> Algorithm:
    """The same; training itself checks curvature, in rounds that no number of workers changes."""
    if not isinstance(algorithm, GMeta):
        return algorithm
    return replace(algorithm, curvature=unchecked(algorithm.curvature))


def _try_model(
    config: Config,
    samples: Samples,
    federations: Mapping[int, Federation],
    objectives: Mapping[int, Objective],
    algorithms: Mapping[str, Algorithm],
    measure: Measure,
) -> None:
    """Find out, before anything is written, whether model, loss, metric and data fit together.

    One agent works for one round with every method, and is evaluated.
    """
    seed = config.seeds[0]
    objective = objectives[seed]
    engine = DirectEngine(objective, federations[seed], seed)
    w = objective.initial()
    try:
        for algorithm in algorithms.values():
            server = algorithm.server_init(objective, w)
            states = {0: algorithm.client_init(w)}
            engine.client_updates(algorithm, to_send(algorithm, server), states, round=0)
            engine.evaluate(algorithm, server, states, steps=1, measure=measure)
    except InputError:
        raise
    except Exception as error:  # whatever the user's model, loss or metric does wrong
        cause = error.__cause__ or error
        raise InputError(
            f"the model, loss and metric can't be used on this data, inputs of shape "
            f"{samples.input_shape}: {type(cause).__name__}: {str(cause).splitlines()[0]}"
        ) from error


def _evaluated(config: Config, split: Split, seed: int) -> list[int]:
    """The agents to evaluate: all, or of those seen in training and of the others a sample each."""
    if config.eval_agents is None:
        return list(split.agents)
    rng = stream(seed, "evaluated agents")
    chosen: list[int] = []
    for group in (split.seen, split.unseen):
        picked = rng.choice(len(group), min(config.eval_agents, len(group)), replace=False)
        chosen += sorted(group[i] for i in picked)
    return chosen


def _workers(config: Config) -> int:
    """``workers`` as a number; ``auto`` is one per core where processes can be forked."""
    alone = [
        (not can_fork(), "this system can't fork processes safely"),
        (
            config.threads > 1,
            f"threads = {config.threads} and torch's threads don't survive a fork",
        ),
        (config.device != "cpu", f"device = {config.device!r}, which one process uses at a time"),
    ]
    reasons = [reason for applies, reason in alone if applies]
    if config.workers == "auto":
        return 1 if reasons else usable_cores()
    if config.workers > 1 and reasons:
        raise InputError(f"workers = {config.workers}: must be 1, because {reasons[0]}")
    return config.workers


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
