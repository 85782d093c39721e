"""The problem of a run: data, split, model, loss, metric and algorithms.

``Problem.make`` builds it from a configuration and objects that the user passes instead;
``Problem.rebuild`` rebuilds that of a run directory: code that the directory names is imported only
if the user trusts it, and data and splits must match the digests recorded there.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.algorithms.protocol import Algorithm, draws_halves
from nufed.data import (
    PARTITIONS,
    SHIFTS,
    DirichletReusing,
    Federation,
    Partition,
    Rows,
    Samples,
    Split,
    as_samples,
    check_arguments,
    check_dealt,
    choose_unseen,
    lazy_split,
    learn_preparation,
    make_split,
    part_sizes,
    prepare,
    rows_by_agent,
    settings_taken,
)
from nufed.data.augmentation import AUGMENTATIONS, Augmentation, augmented
from nufed.data.text import next_token_loss
from nufed.errors import InputError, NumericalWarning, RunError, in_short, require, shown
from nufed.evaluate import METRICS, Measure, Metric
from nufed.evaluate.metrics import OF_TOKENS
from nufed.lab.config.methods import GivenInPython
from nufed.lab.config.schema import AT_SITES, OWN, Config, DataConfig, LoraConfig
from nufed.lab.config.split_file import load_split
from nufed.lab.config.trust import require_trust
from nufed.lab.pretrained import PREFIX, add_adapters, pretrained
from nufed.lab.readers.sources import SOURCES, source_of
from nufed.meta.curvature import curvature_along
from nufed.models import MODELS
from nufed.models.trainable import checkpoint_layers, share_base, train_only
from nufed.objective import Loss, Objective
from nufed.objective.modules import copied, has_kernels
from nufed.registry import import_named, suggest
from nufed.seeding import stream, torch_seed

PROBED_AGENTS, PROBES = 8, 3  # agents, and gradients of each, for default step sizes


def build_samples(config: DataConfig) -> Samples:
    """The samples that ``[data]`` names."""
    if config.source == AT_SITES:
        raise InputError(
            "the data of this run is at the sites of its federation: commands that need it can't "
            "be run here"
        )
    name, place = source_of(config.source)
    return as_samples(call_named("data.source", name, SOURCES, {**place, **config.args}))


def resolved_partition(config: DataConfig, owners: bool) -> str:
    """The name of the partition; "auto" is "given" if the data names owners of its samples."""
    if config.partition != "auto":
        return config.partition
    return "given" if owners else "dirichlet"


def build_split(
    config: DataConfig, samples: Samples, seed: int, partition: Partition | None = None
) -> Split:
    """The split of ``samples`` among agents that ``[data]`` describes, or by ``partition``."""
    if config.stratify and not samples.classes:
        raise InputError("= True: this data has no classes; remove it", "data.stratify")
    if config.split_file is not None:
        if config.unseen is not None:
            raise InputError(
                f"= {shown(config.unseen)}: the split of data.split_file has unseen agents of its "
                "own; remove one of the two keys",
                "data.unseen",
            )
        require_unstratified(config, "the split of data.split_file is used as it is")
        path = Path(config.split_file.replace("{seed}", str(seed)))
        return load_split(path, samples.targets.numpy())
    held_out: int | Sequence[str] = config.held_out
    if partition is None:
        name = resolved_partition(config, samples.owners is not None)
        if name == "dirichlet" and config.reuse == "across_agents" and samples.classes:
            require_unstratified(config, 'data.reuse = "across_agents" draws every part by itself')
            return _split_sharing_samples(config, samples, seed)
        if name == "given" and config.unseen is None:
            held_out = config.unseen_agents or samples.unseen_owners
        partition = find_named("data.partition", name, PARTITIONS)
    rows, names = _deal(config, partition, samples, stream(seed, "partition"))
    return make_split(
        rows,
        seed,
        validation=config.validation,
        test=config.test,
        unseen_agents=held_out,
        names=names,
        classes=samples.targets.numpy() if config.stratify else None,
    )


def require_unstratified(config: DataConfig, why: str) -> None:
    """Refuse ``data.stratify`` where it can't be followed."""
    if config.stratify:
        raise InputError(f"= True: {why}; remove it", "data.stratify")


def _split_sharing_samples(config: DataConfig, samples: Samples, seed: int) -> Split:
    """The split of the Dirichlet partition whose agents may share samples."""
    size = config.samples_per_agent or max(1, len(samples) // config.agents)
    sizes = part_sizes(size, config.validation, config.test, "0")
    labels = samples.targets.numpy()
    recipe = DirichletReusing(labels, config.agents, sizes, config.dirichlet, seed)
    return lazy_split(recipe, choose_unseen(config.agents, config.held_out, seed))


def _deal(
    config: DataConfig, partition: Partition, samples: Samples, rng: np.random.Generator
) -> tuple[list[Rows], tuple[str, ...] | None]:
    """The rows of every agent by a partition, and the agents' names if it gives them."""
    settings = settings_taken(partition, config.partition_settings)
    size, arguments = config.samples_per_agent, config.partition_args
    check_arguments(config.partition, partition, arguments)
    try:
        dealt = partition(samples, config.agents, size, rng, **settings, **arguments)
    except InputError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise InputError(
            f"= {config.partition!r} fails with arguments {shown(arguments)}: {in_short(error)}",
            "data.partition",
        ) from error
    return check_dealt(dealt, len(samples), config.agents)


def build_preparation(config: DataConfig, samples: Samples, split: Split) -> Samples:
    """Samples whose raw columns, if they have any, are prepared as ``[data.prepare]`` says.

    What is not given there is learned from the training parts of agents that take part in training.
    """
    given = config.prepare.given
    if not samples.columns:
        if given is not None:
            raise InputError(
                f"names {len(given.columns)} columns, and this data has no columns by name: remove "
                "[data.prepare], or read the data as a table (data.args.table = true)",
                "data.prepare.columns",
            )
        return samples
    if given is None:
        seen = (split.train[agent] for agent in split.seen)
        given = learn_preparation(samples, seen, config.prepare.fill)
    prepared, notes = prepare(samples, given)
    for note in notes:
        warnings.warn(note, NumericalWarning, stacklevel=2)
    return prepared


def build_shift(config: DataConfig, samples: Samples, split: Split, seed: int) -> Samples:
    """The samples after the shift that ``[data]`` names: a copy, changed agent by agent."""
    if config.shift == "none":
        allowed = f"there is no shift; set data.shift to one of {', '.join(SHIFTS)}, or remove it"
        require(not config.shift_args, "data.shift_args", config.shift_args, allowed)
        return samples
    changed = {"samples": samples, "agents": rows_by_agent(split), "seed": seed}
    if clash := sorted(changed.keys() & config.shift_args.keys()):
        require(False, "data.shift_args", config.shift_args, f"must not set {clash[0]}")
    function = SHIFTS[config.shift]
    try:
        return function(**changed, **config.shift_args)
    except TypeError as error:
        raise InputError(
            f"= {config.shift!r} fails with arguments {shown(config.shift_args)}: "
            f"{in_short(error)}",
            "data.shift",
        ) from error


def build_augmentation(config: DataConfig, samples: Samples) -> Augmentation | None:
    """What ``data.augment`` names, tried on a sample; None if it is off."""
    if config.augment == "none":
        return None
    named = find_named("data.augment", config.augment, AUGMENTATIONS)
    augment: Augmentation = named(samples) if config.augment in AUGMENTATIONS else named
    augmented(augment, samples.take(np.arange(min(2, len(samples))))[0], seed=0)
    return augment


def build_federation(
    config: Config, samples: Samples, seed: int, partition: Partition | None = None
) -> Federation:
    """The samples, split among agents, by the user's ``partition`` if any, prepared and shifted."""
    split = build_split(config.data, samples, seed, partition)
    samples = build_preparation(config.data, samples, split)
    samples = build_shift(config.data, samples, split, seed)
    augment = build_augmentation(config.data, samples)
    federation = Federation(samples, split, config.data.small_agents, config.eval_on, augment)
    agents = [0] if split.recipe else split.agents  # in a lazy split all have equal sizes
    empty = next((agent for agent in agents if not len(federation.scored_rows(agent))), None)
    if empty is not None:
        raise InputError(
            f'= "{config.eval_on}": agent {shown(split.names[empty])} has no {config.eval_on} '
            f"part; set data.{config.eval_on}, for example to 0.1, or give a split that has one",
            "eval_on",
        )
    return federation


def build_module(
    config: Config, samples: Samples, seed: int, make: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The model that ``[model]`` names, or that of ``make``, initialised from the seed."""
    name, arguments = config.model.name, config.model.args
    if name in MODELS:
        shapes = {"input_shape": samples.input_shape, "outputs": samples.outputs}
        arguments = {**shapes, **arguments}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(stream(seed, "model")))
        if make is not None:
            module = make()
        elif name.startswith(PREFIX):
            place = name.removeprefix(PREFIX)
            module = pretrained(place, **{"outputs": samples.outputs, **arguments})
        else:
            module = call_named("model.name", name, MODELS, arguments)
        if not isinstance(module, nn.Module):
            raise InputError(
                f"the model function returned {type(module).__name__}: it must return a "
                "torch.nn.Module"
            )
        return with_trained_part(module, config.model.train, config.model.lora)


def with_trained_part(module: nn.Module, train: str, lora: LoraConfig) -> nn.Module:
    """The module, changed in place such that only what ``model.train`` names is trained."""
    if train == "lora":
        return add_adapters(module, **lora.model_dump())
    if train != "all":
        train_only(module, train)
    return module


def build_objective(config: Config, module: nn.Module, loss: Loss) -> Objective:
    """The module and loss as an objective in the configured precision."""
    place = {"dtype": getattr(torch, config.dtype), "device": _device(config.device)}
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(**place)
    frozen = [p for p in module.parameters() if not p.requires_grad]
    moves = any(p.dtype != place["dtype"] or p.device != place["device"] for p in frozen)
    module = (copy.deepcopy(module) if moves else copied(module)).to(**place)
    if config.memory_format != "contiguous" and not has_kernels(module):
        raise InputError(
            f'= "{config.memory_format}": the model has no convolution of two or three dimensions; '
            "remove the key",
            "memory_format",
        )
    if config.model.gradient_checkpointing:
        checkpoint_layers(module)
    return Objective(
        module,
        loss,
        running_stats=config.model.running_stats,
        precision=config.precision,
        memory_format=config.memory_format,
        micro_batch=config.model.micro_batch,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"= {name!r}: torch can't use it here ({str(error).splitlines()[0]}); "
            'use "cpu", or install the build of torch for it',
            "device",
        ) from None
    return device


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error that does not broadcast (n,) targets and (n, 1) outputs to (n, n)."""
    return F.mse_loss(outputs, targets.reshape(outputs.shape))


LOSSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "mse": squared_error,
    "next_token": next_token_loss,
}


def build_loss(config: Config, samples: Samples) -> Loss:
    """The loss that ``loss`` names; ``auto``: of classes or next tokens, else squared error."""
    name = loss_name(config, bool(samples.classes), _tokens(samples))
    numbers = not samples.classes and samples.targets.is_floating_point()
    if name == "cross_entropy" and numbers and samples.outputs == 1:
        raise InputError(
            '= "cross_entropy": this data has no classes, its targets are single numbers; set '
            'loss = "mse" or "auto", or name your own',
            "loss",
        )
    loss: Loss = find_named("loss", name, LOSSES)
    return loss


def loss_name(config: Config, classes: bool, tokens: bool) -> str:
    """``loss``, with ``auto`` resolved; ``tokens``: targets are whole numbers but not classes."""
    if config.loss == "auto":
        return "cross_entropy" if classes else "next_token" if tokens else "mse"
    return config.loss


def _tokens(samples: Samples) -> bool:
    """Whether targets are whole numbers in several dimensions."""
    return not (samples.classes or samples.targets.is_floating_point())


def build_measure(config: Config, samples: Samples, metric: Metric | None = None) -> Measure:
    """The measure that ``metric`` names.

    ``auto``: accuracy for classes, perplexity for tokens with the loss of next tokens, else the
    loss itself. The argument ``metric`` was given in Python instead.
    """
    if metric is not None:
        return Measure(getattr(metric, "__name__", "metric"), metric, config.metric_better)
    name = config.metric
    if name == "auto":
        name = "accuracy" if samples.classes and config.loss != "mse" else "none"
        if loss_name(config, bool(samples.classes), _tokens(samples)) == "next_token":
            name = "perplexity"
    metric = find_named("metric", name, METRICS)
    suits = samples.classes or (name in OF_TOKENS and _tokens(samples))
    if name in METRICS and metric is not None and not suits:
        raise InputError(
            f'= "{name}": this data has no classes, its targets are numbers; set metric = '
            '"none" or "auto" to score by the loss, or name your own',
            "metric",
        )
    if name in METRICS and config.metric_better == "lower":
        raise InputError(
            f'= "lower": is for a metric of your own, and metric is "{config.metric}"; remove it',
            "metric_better",
        )
    shown_name = "loss" if metric is None else name.rpartition(":")[2]
    return Measure(shown_name, metric, "lower" if name in OF_TOKENS else config.metric_better)


def call_named(
    key: str, name: str, known: Mapping[str, Callable[..., Any]], arguments: Mapping[str, Any]
) -> Any:
    """Call the function of a name; its errors name the key."""
    function = find_named(key, name, known)
    try:
        return function(**arguments)
    except InputError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise InputError(
            f"= {name!r} fails with arguments {dict(arguments)}: {in_short(error)}", key
        ) from error


def find_named(key: str, name: str, known: Mapping[str, Any]) -> Any:
    """The object of a name: one of nufed's own, or ``package.module:function``."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise InputError(
            f"= {name!r}: must be one of {', '.join(known)}, or your own as "
            "package.module:function" + suggest(name, known),
            key,
        )
    return import_named(key, name)


# the arguments that replace a key of the configuration
GIVEN_AS = {"data.source": "data", "data.partition": "partition", "model.name": "model"}


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
        objects = {
            "model.name": self.model,
            "data.source": self.data,
            "data.partition": self.partition,
            "loss": self.loss,
            "metric": self.metric,
        }
        return [key for key, value in objects.items() if value is not None]

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
            what = " and ".join(GIVEN_AS.get(key, key) for key in missing)
            raise InputError(
                f"{self.path} was given its {what} as Python objects, which its directory does not "
                "contain: pass them again in Python, or name them as package.module:function in a "
                "configuration"
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

    @property
    def example(self) -> Samples:
        """Samples in the format that models take: of tables those prepared for the first seed."""
        if not self.samples.columns:
            return self.samples
        return next(iter(self.federations.values())).samples

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
        """The problem of a configuration, for all its seeds or some of them.

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
                if draws_halves(algorithm):
                    federation.check_halves(federation.split.smallest_agent)
        modules: dict[int, nn.Module] = {}
        for seed, each in federations.items():
            modules[seed] = _module(config, given, each.samples, seed)
            if len(modules) > 1:
                share_base(modules[next(iter(modules))], modules[seed])
        objectives = {seed: build_objective(config, m, loss) for seed, m in modules.items()}
        return cls(config, samples, federations, objectives, algorithms, given)

    def with_step_sizes(self) -> Problem:
        """This problem with numbers for the step sizes that the configuration leaves open.

        They come from κ, the largest curvature along the first gradients of a few agents of the
        first seed. Where it can't be measured they are the classes' own defaults.
        """
        seed, config = self.config.seeds[0], self.config
        if not config.looks:
            return self
        objective, federation = self.objectives[seed].base, self.federations[seed]
        size, most = max(a.batch_size for a in self.algorithms.values()), 0.0
        try:
            for agent in federation.split.seen[:PROBED_AGENTS]:
                most = first_curvature(objective, federation, agent, (seed, size), most)
        except Exception:  # the user's model or loss may raise anything; it is tried later
            most = 0.0
        config = config.with_curvature(most)
        return replace(self, config=config, algorithms=algorithms_of(config, self.given.methods))

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


def first_curvature(
    objective: Objective,
    federation: Federation,
    agent: int,
    how: tuple[int, int],
    most: float = 0.0,
) -> float:
    """κ, the largest curvature along the first gradients of an agent; ``most`` is known before.

    ``how``: the seed, and the number of samples in a batch.
    """
    seed, size = how
    drawn = federation.batches(agent, seed, "look").draw("outer", size, PROBES)
    batches = [batch._replace(seed=None) for batch in drawn]
    return curvature_along(objective, objective.initial(), batches, most)


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
        module = given.model if config.model.train == "all" else copy.deepcopy(given.model)
        return with_trained_part(module, config.model.train, config.model.lora)
    return build_module(config, like, seed, given.model)


def algorithms_of(
    config: Config, given: Mapping[str, Algorithm] | None, needed: Sequence[str] | None = None
) -> dict[str, Algorithm]:
    """The algorithms of a run; ``needed`` ones (default: all) must not be placeholders."""
    algorithms = config.algorithms(given)
    for name in algorithms if needed is None else needed:
        if isinstance(algorithms[name], GivenInPython):
            raise InputError(
                f"methods.{name}.algorithm was given in Python: pass it again, "
                f"methods={{{name!r}: …}}"
            )
    return algorithms
