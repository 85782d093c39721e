"""The problem of a run: data, split, model, loss and algorithms.

``Problem.make`` builds it from a configuration and objects that the user passes instead;
``Problem.rebuild`` rebuilds that of a run directory: code that the directory names is imported only
if the user trusts it, and data and splits must match the digests recorded there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nufed.algorithms.protocol import Algorithm
from nufed.config.build import (
    build_federation,
    build_loss,
    build_measure,
    build_module,
    build_objective,
    build_samples,
)
from nufed.config.own_method import GivenInPython
from nufed.config.schema import OWN, Config
from nufed.config.trust import require_trust
from nufed.data import Federation, Partition, Samples, as_samples
from nufed.errors import InputError, RunError, shown
from nufed.evaluate import Measure, Metric
from nufed.objective import Loss, Objective


@dataclass(frozen=True)
class Given:
    """Objects that the user passes in Python; None: use what the configuration names."""

    model: Callable[[], nn.Module] | nn.Module | None = None
    data: Any = None
    loss: Loss | None = None
    metric: Metric | None = None
    methods: Mapping[str, Algorithm] | None = None
    partition: Partition | None = None

    @property
    def keys(self) -> list[str]:
        """The configuration keys that passed objects replace."""
        own = {
            "model.name": self.model,
            "data.source": self.data,
            "data.partition": self.partition,
            "loss": self.loss,
            "metric": self.metric,
        }
        return [key for key, value in own.items() if value is not None]

    def with_placeholders(self, config: Config) -> Config:
        """The configuration with placeholders for everything that is passed as an object."""
        update: dict[str, Any] = {key: OWN for key in ("loss", "metric") if key in self.keys}
        if self.model is not None:
            update["model"] = config.model.model_copy(update={"name": OWN, "args": {}})
        source = {} if self.data is None else {"source": OWN, "args": {}}
        partition = {} if self.partition is None else {"partition": OWN}
        update["data"] = config.data.model_copy(update={**source, **partition})
        return config.model_copy(update=update).with_objects(self.methods or {})


@dataclass(frozen=True)
class Recorded:
    """What a run directory records of its problem.

    Args:
        path: the directory.
        config: its configuration.
        data_sha256: of the samples; empty in a federation, whose data is at the sites.
        splits: the SHA-256 of every seed's split.
    """

    path: Path
    config: Config
    data_sha256: str
    splits: Mapping[int, str]

    def check_trusted(self, given: Given, trust: bool) -> None:
        """Refuse to import code that the configuration names, unless it is trusted."""
        require_trust(self.path, given.with_placeholders(self.config), trust)

    def check_given(self, given: Given, needed: Sequence[str]) -> None:
        """Refuse if an object for one of the keys ``needed`` was passed then but is not now, or if
        a method that is passed has other settings than then."""
        config = self.config
        names = {
            "data.source": config.data.source,
            "data.partition": config.data.partition,
            "model.name": config.model.name,
            "loss": config.loss,
        }
        missing = [key for key in needed if names[key] == OWN and key not in given.keys]
        if missing:
            raise InputError(
                f"{self.path} was given its {' and '.join(map(_word, missing))} as Python objects, "
                "which its directory does not contain: pass them again in Python, or name them as "
                "package.module:function in a configuration"
            )
        now = given.with_placeholders(config).methods
        for name in given.methods or {}:
            if name not in config.methods:
                raise InputError(
                    f"methods[{name!r}]: must be one of {', '.join(config.methods)}, those of "
                    f"{self.path}"
                )
            a, b = config.methods[name].model_dump(), now[name].model_dump()
            words = [
                f"methods.{name}.{key} was {shown(a.get(key))} and is {shown(b.get(key))}"
                for key in {**a, **b}
                if a.get(key) != b.get(key)
            ]
            if words:
                raise InputError(
                    f"{'; '.join(words)}: pass the same object as to the run of {self.path}"
                )


@dataclass(frozen=True)
class Problem:
    """What a run trains on, by seed where it depends on one.

    Args:
        config: the configuration, with placeholders for objects.
        samples: all data.
        federations: the samples, split among agents.
        objectives: the model, at its initial weights, and the loss.
        algorithms: the methods.
        given: the objects that the user passed.
    """

    config: Config
    samples: Samples
    federations: Mapping[int, Federation]
    objectives: Mapping[int, Objective]
    algorithms: Mapping[str, Algorithm]
    given: Given

    @cached_property
    def measure(self) -> Measure:
        """The measure that agents are scored by."""
        return build_measure(self.config, self.samples, self.given.metric)

    def belongs_to(self, seed: int) -> dict[str, str]:
        """Digests that the files of a part must match."""
        return {
            "configuration": self.config.fingerprint,
            "data": self.samples.fingerprint,
            "split": self.federations[seed].split.fingerprint,
        }

    @classmethod
    def make(
        cls,
        config: Config,
        given: Given | None = None,
        seeds: Sequence[int] | None = None,
        samples: Samples | None = None,
    ) -> Problem:
        """From a configuration, for all its seeds or some of them.

        ``samples`` are its data if they are loaded already.
        """
        given, seeds = given or Given(), config.seeds if seeds is None else seeds
        config = given.with_placeholders(config)
        if samples is None:
            samples = build_samples(config.data) if given.data is None else as_samples(given.data)
        samples.check_finite(getattr(torch, config.dtype))
        loss = given.loss or build_loss(config, samples)
        algorithms = algorithms_of(config, given.methods)
        given = replace(given, methods={name: algorithms[name] for name in given.methods or {}})
        federations = {
            seed: build_federation(config, samples, seed, given.partition) for seed in seeds
        }
        for federation in federations.values():
            for algorithm in algorithms.values():
                federation.check_batch_size(algorithm.batch_size)
        objectives = {
            seed: build_objective(config, _module(config, given, samples, seed), loss)
            for seed in seeds
        }
        return cls(config, samples, federations, objectives, algorithms, given)

    @classmethod
    def rebuild(
        cls,
        recorded: Recorded,
        given: Given | None = None,
        *,
        trust: bool,
        seeds: Sequence[int] | None = None,
        samples: Samples | None = None,
    ) -> Problem:
        """Rebuild the problem of a run directory.

        Args:
            recorded: what the directory records.
            given: the same objects that were passed to :func:`nufed.run`.
            trust: allow importing the code that the directory names, if any.
            seeds: some of its seeds; all by default.
            samples: its data, if they are loaded already.
        """
        given = given or Given()
        recorded.check_trusted(given, trust)
        recorded.check_given(given, ("data.source", "data.partition", "model.name", "loss"))
        problem = cls.make(recorded.config, given, seeds, samples)
        now, then = problem.samples.fingerprint, recorded.data_sha256
        if now != then:
            raise RunError(
                f"the data is not that of {recorded.path} (SHA-256 {now[:12]} instead of "
                f"{then[:12]}): give the same data, or start a new run"
            )
        for seed, federation in problem.federations.items():
            now, then = federation.split.fingerprint, recorded.splits[seed]
            if now != then:
                raise RunError(
                    f"the split of seed {seed} is not that of {recorded.path} (SHA-256 {now[:12]} "
                    f"instead of {then[:12]}): start a new run"
                )
        return problem


def rebuild_objective(
    recorded: Recorded, like: Samples, given: Given | None = None, *, trust: bool
) -> Objective:
    """The model and loss of a run directory, on the CPU, without its data.

    ``like`` is a sample with the format of the run's data; otherwise as :meth:`Problem.rebuild`.
    """
    given = given or Given()
    recorded.check_trusted(given, trust)
    recorded.check_given(given, ("model.name", "loss"))
    config = recorded.config.model_copy(update={"device": "cpu"})
    module = _module(config, given, like, config.seeds[0])
    return build_objective(config, module, given.loss or build_loss(config, like))


def _module(config: Config, given: Given, like: Samples, seed: int) -> nn.Module:
    if isinstance(given.model, nn.Module):
        return given.model
    return build_module(config, like, seed, given.model)


def algorithms_of(
    config: Config, own: Mapping[str, Algorithm] | None, needed: Sequence[str] | None = None
) -> dict[str, Algorithm]:
    """The algorithms of a run; ``needed`` ones (default: all) must not be placeholders."""
    algorithms = config.algorithms(own)
    for name in algorithms if needed is None else needed:
        if isinstance(algorithms[name], GivenInPython):
            raise InputError(
                f"methods.{name}.algorithm was given in Python: pass it again, "
                f"methods={{{name!r}: …}}"
            )
    return algorithms


def _word(key: str) -> str:
    words = {"data.source": "data", "data.partition": "partition", "model.name": "model"}
    return words.get(key, key)
