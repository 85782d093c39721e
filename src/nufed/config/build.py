"""Builds data, splits, models, losses and metrics from a configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.config.schema import AT_SITES, Config, DataConfig
from nufed.data import (
    PARTITIONS,
    SHIFTS,
    SOURCES,
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
    make_split,
    part_sizes,
    rows_by_agent,
    settings_taken,
)
from nufed.errors import InputError, in_short, shown
from nufed.evaluate import METRICS, Measure, Metric
from nufed.models import MODELS
from nufed.objective import Loss, Objective
from nufed.registry import import_named, suggest
from nufed.seeding import stream, torch_seed


def build_samples(config: DataConfig) -> Samples:
    """The samples that ``[data]`` names."""
    if config.source == AT_SITES:
        raise InputError(
            "the data of this run is at the sites of its federation: commands that need it can't "
            "be run here"
        )
    return as_samples(call_named("data.source", config.source, SOURCES, config.args))


def resolved_partition(config: DataConfig, owners: bool) -> str:
    """The name of the partition; "auto" is "given" if the data names owners of its samples."""
    if config.partition != "auto":
        return config.partition
    return "given" if owners else "dirichlet"


def build_split(
    config: DataConfig, samples: Samples, seed: int, own: Partition | None = None
) -> Split:
    """The split of ``samples`` among agents that ``[data]`` describes, or the partition ``own``."""
    if config.split_file is not None:
        path = Path(config.split_file.replace("{seed}", str(seed)))
        return Split.load(path, samples.targets.numpy())
    if own is None:
        name = resolved_partition(config, samples.owners is not None)
        if name == "dirichlet" and config.reuse == "across_agents" and samples.classes:
            return _split_sharing_samples(config, samples, seed)
        own = find_named("data.partition", name, PARTITIONS)
    rows, names = _deal(config, own, samples, stream(seed, "partition"))
    return make_split(
        rows,
        seed,
        validation=config.validation,
        test=config.test,
        unseen_agents=config.unseen_agents,
        names=names,
    )


def _split_sharing_samples(config: DataConfig, samples: Samples, seed: int) -> Split:
    """The split of the Dirichlet partition whose agents may share samples."""
    size = config.samples_per_agent or max(1, len(samples) // config.agents)
    sizes = part_sizes(size, config.validation, config.test, "0")
    labels = samples.targets.numpy()
    recipe = DirichletReusing(labels, config.agents, sizes, config.dirichlet, seed)
    return lazy_split(recipe, choose_unseen(config.agents, config.unseen_agents, seed))


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
            f"data.partition = {config.partition!r} fails with arguments {shown(arguments)}: "
            f"{in_short(error)}"
        ) from error
    return check_dealt(dealt, len(samples), config.agents)


def build_shift(config: DataConfig, samples: Samples, split: Split, seed: int) -> Samples:
    """The samples after the shift that ``[data]`` names: a copy, changed agent by agent."""
    if config.shift == "none":
        if config.shift_args:
            raise InputError(
                f"data.shift_args = {shown(config.shift_args)}: there is no shift; set data.shift "
                f"to one of {', '.join(SHIFTS)}, or remove it"
            )
        return samples
    changed = {"samples": samples, "agents": rows_by_agent(split), "seed": seed}
    if clash := sorted(changed.keys() & config.shift_args.keys()):
        raise InputError(f"data.shift_args = {shown(config.shift_args)}: must not set {clash[0]}")
    function = SHIFTS[config.shift]
    try:
        return function(**changed, **config.shift_args)
    except TypeError as error:
        raise InputError(
            f"data.shift = {config.shift!r} fails with arguments {shown(config.shift_args)}: "
            f"{in_short(error)}"
        ) from error


def build_federation(
    config: Config, samples: Samples, seed: int, partition: Partition | None = None
) -> Federation:
    """The samples, split among agents, by the user's ``partition`` if any, and shifted."""
    split = build_split(config.data, samples, seed, partition)
    samples = build_shift(config.data, samples, split, seed)
    federation = Federation(samples, split, config.data.small_agents, config.eval_on)
    agents = [0] if split.recipe else split.agents  # in a lazy split all have equal sizes
    empty = next((agent for agent in agents if not len(federation.scored_rows(agent))), None)
    if empty is not None:
        raise InputError(
            f'eval_on = "{config.eval_on}": agent {shown(split.names[empty])} has no '
            f"{config.eval_on} part; set "
            f"data.{config.eval_on}, for example to 0.1, or give a split that has one"
        )
    return federation


def build_module(
    config: Config, samples: Samples, seed: int, own: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The model that ``[model]`` names, or ``own``, its initial weights drawn from the seed."""
    name, arguments = config.model.name, config.model.args
    if name in MODELS:
        shapes = {"input_shape": samples.input_shape, "outputs": samples.outputs}
        arguments = {**shapes, **arguments}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(stream(seed, "model")))
        module = call_named("model.name", name, MODELS, arguments) if own is None else own()
    if not isinstance(module, nn.Module):
        raise InputError(
            f"the model function returned {type(module).__name__}: it must return a torch.nn.Module"
        )
    return module


def build_objective(config: Config, module: nn.Module, loss: Loss) -> Objective:
    """The module and loss as an objective in the configured precision."""
    place = {"dtype": getattr(torch, config.dtype), "device": _device(config.device)}
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(**place)
    module = copy.deepcopy(module).to(**place)
    return Objective(module, loss, running_stats=config.model.running_stats)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device = {name!r}: torch can't use it here ({str(error).splitlines()[0]}); "
            'use "cpu", or install the build of torch for it'
        ) from None
    return device


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error that does not broadcast (n,) targets and (n, 1) outputs to (n, n)."""
    return F.mse_loss(outputs, targets.reshape(outputs.shape))


LOSSES: dict[str, Loss] = {"cross_entropy": F.cross_entropy, "mse": squared_error}


def build_loss(config: Config, samples: Samples) -> Loss:
    """The loss that ``loss`` names; ``auto``: cross-entropy for classes, else squared error."""
    name = loss_name(config, bool(samples.classes))
    numbers = not samples.classes and samples.targets.is_floating_point()
    if name == "cross_entropy" and numbers and samples.outputs == 1:
        raise InputError(
            'loss = "cross_entropy": this data has no classes, its targets are single numbers; set '
            'loss = "mse" or "auto", or name your own'
        )
    loss: Loss = find_named("loss", name, LOSSES)
    return loss


def loss_name(config: Config, classes: bool) -> str:
    """``loss``, with ``auto`` resolved."""
    if config.loss == "auto":
        return "cross_entropy" if classes else "mse"
    return config.loss


def build_measure(config: Config, samples: Samples, own: Metric | None = None) -> Measure:
    """The measure that ``metric`` names; ``auto``: accuracy for classes, else the loss itself.

    ``own`` is a metric that was given in Python instead.
    """
    if own is not None:
        return Measure(getattr(own, "__name__", "metric"), own, config.metric_better)
    name = config.metric
    if name == "auto":
        name = "accuracy" if samples.classes and config.loss != "mse" else "none"
    metric = find_named("metric", name, METRICS)
    if name in METRICS and metric is not None and not samples.classes:
        raise InputError(
            f'metric = "{name}": this data has no classes, its targets are numbers; set metric = '
            '"none" or "auto" to score by the loss, or name your own'
        )
    if name in METRICS and config.metric_better == "lower":
        raise InputError(
            f'metric_better = "lower": is for a metric of your own, and metric is "{config.metric}"'
            "; remove it"
        )
    shown_name = "loss" if metric is None else name.rpartition(":")[2]
    return Measure(shown_name, metric, config.metric_better)


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
            f"{key} = {name!r} fails with arguments {dict(arguments)}: {in_short(error)}"
        ) from error


def find_named(key: str, name: str, known: Mapping[str, Any]) -> Any:
    """The object of a name: one of nufed's own, or ``package.module:function``."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise InputError(
            f"{key} = {name!r}: must be one of {', '.join(known)}, or your own as "
            "package.module:function" + suggest(name, known)
        )
    return import_named(key, name)
