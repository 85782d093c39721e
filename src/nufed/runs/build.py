"""From a configuration to data, a model, a loss and a metric."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.data import (
    SOURCES,
    DirichletReusing,
    Federation,
    Samples,
    Split,
    as_samples,
    choose_unseen,
    dirichlet,
    given,
    iid,
    lazy_split,
    make_split,
    part_sizes,
    shards,
)
from nufed.errors import InputError, shown
from nufed.evaluate import Measure, accuracy
from nufed.models import MODELS
from nufed.objective import Loss, Objective
from nufed.runs.schema import AT_SITES, Config, DataConfig
from nufed.seeding import stream, torch_seed


def build_samples(config: DataConfig) -> Samples:
    """The samples that ``[data]`` names."""
    if config.source == AT_SITES:
        raise InputError(
            "the data of this run is at the sites of its federation: what needs it can't be done "
            "here"
        )
    return as_samples(call_named("data.source", config.source, SOURCES, config.args))


def build_split(config: DataConfig, samples: Samples, seed: int) -> Split:
    """The split of ``samples`` among agents that ``[data]`` describes."""
    if config.split_file is not None:
        path = Path(config.split_file.replace("{seed}", str(seed)))
        return Split.load(path, samples.targets.numpy())
    rng = stream(seed, "partition")
    partition, names = config.partition, None
    if partition == "auto":
        partition = "dirichlet" if samples.owners is None else "given"
    if partition in ("dirichlet", "shards") and not samples.classes:
        raise InputError(
            f"data.partition = {config.partition!r}: this data has no classes; use 'iid', or "
            "'given' with owners"
        )
    labels, size = samples.targets.numpy(), config.samples_per_agent
    if partition == "given":
        if samples.owners is None:
            raise InputError(
                "data.partition = 'given': this data does not say who owns which sample; give "
                "owners with the data, or use another partition"
            )
        rows, names = given(samples.owners)
    elif partition == "iid":
        rows = iid(len(samples), config.agents, size, rng)
    elif partition == "shards":
        rows = shards(labels, config.agents, config.classes_per_agent, size, rng)
    else:
        size = size or max(1, len(samples) // config.agents)
        if config.reuse == "across_agents":
            sizes = part_sizes(size, config.validation, config.test, "0")
            recipe = DirichletReusing(labels, config.agents, sizes, config.dirichlet, seed)
            unseen = choose_unseen(config.agents, config.unseen_agents, seed)
            return lazy_split(recipe, unseen)
        rows = dirichlet(labels, config.agents, size, config.dirichlet, rng)
    return make_split(
        rows,
        seed,
        validation=config.validation,
        test=config.test,
        unseen_agents=config.unseen_agents,
        names=names,
    )


def build_federation(config: Config, samples: Samples, seed: int) -> Federation:
    """The samples dealt out to agents."""
    split = build_split(config.data, samples, seed)
    federation = Federation(samples, split, config.data.small_agents, config.eval_on)
    agents = [0] if split.recipe else split.agents  # those of a recipe have equal parts
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
    """Mean squared error, where (n,) targets of (n, 1) outputs are not broadcast to (n, n)."""
    return F.mse_loss(outputs, targets.reshape(outputs.shape))


LOSSES: dict[str, Loss] = {"cross_entropy": F.cross_entropy, "mse": squared_error}


def build_loss(config: Config, samples: Samples) -> Loss:
    """The loss that ``loss`` names; ``auto`` is cross-entropy for classes, else squared error."""
    loss: Loss = find_named("loss", loss_name(config, bool(samples.classes)), LOSSES)
    return loss


def loss_name(config: Config, classes: bool) -> str:
    """``loss``, with ``auto`` resolved."""
    if config.loss == "auto":
        return "cross_entropy" if classes else "mse"
    return config.loss


def build_measure(config: Config, samples: Samples) -> Measure:
    """What ``metric`` names; ``auto`` is accuracy for classes, else the loss itself."""
    known: dict[str, Any] = {"accuracy": accuracy, "none": None}
    name = config.metric
    if name == "auto":
        name = "accuracy" if samples.classes and config.loss != "mse" else "none"
    metric = find_named("metric", name, known)
    return Measure("loss" if metric is None else name.rpartition(":")[2], metric)


def call_named(
    key: str, name: str, known: Mapping[str, Callable[..., Any]], arguments: Mapping[str, Any]
) -> Any:
    """What the function that ``name`` stands for returns; its errors name the key."""
    function = find_named(key, name, known)
    try:
        return function(**arguments)
    except InputError:
        raise
    except Exception as error:  # whatever the user's function does wrong
        raise InputError(
            f"{key} = {name!r} fails with arguments {dict(arguments)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def find_named(key: str, name: str, known: Mapping[str, Any]) -> Any:
    """What ``name`` stands for: one of nufed's own, or ``package.module:function``."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(
            f"{key} = {name!r}: must be one of {', '.join(known)}, or your own as "
            "package.module:function"
        )
    if str(Path.cwd()) not in sys.path:  # as `python -m` would: the user's own files come first
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # also whatever goes wrong while the user's module is imported
        raise InputError(
            f"{key} = {name!r} can't be imported ({type(error).__name__}: {error}); it is looked "
            "up from the directory where the command is run"
        ) from error
