"""Which part of a model is trained: all of it, its head, or parameters by a pattern."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nufed.errors import InputError, require
from nufed.objective.modules import norm_layers
from nufed.objective.parts import find_part

ADAPTERS = "lora_"  # in the names of parameters that adapters add to a base model


def train_only(module: nn.Module, part: str) -> None:
    """Freeze all parameters but those of a part, named as for :meth:`nufed.Objective.part`.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    >>> train_only(net, "head")
    >>> [name for name, p in net.named_parameters() if p.requires_grad]
    ['1.weight', '1.bias']
    """
    parameters = dict(module.named_parameters())
    places = {name: slice(i, i + 1) for i, name in enumerate(parameters)}
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
    chosen = torch.zeros(len(parameters), dtype=torch.bool)
    chosen[find_part(part, places, layers, norm_layers(module)).index] = True
    nothing = "names no parameter: name what is trained, for example head"
    require(bool(chosen.any()), "model.train", part, nothing)
    for parameter, trained in zip(parameters.values(), chosen.tolist(), strict=True):
        parameter.requires_grad_(trained)


def checkpoint_layers(module: nn.Module) -> None:
    """Let backward passes call the layers of models of transformers again, to save memory."""
    every: Iterable[Any] = module.modules()
    models = [each for each in every if getattr(each, "supports_gradient_checkpointing", False)]
    if not models:
        raise InputError(
            "= true: the model has no layers that can be computed again; it is for models of "
            "transformers (hf:), others call torch.utils.checkpoint themselves",
            "model.gradient_checkpointing",
        )
    models[0].gradient_checkpointing_enable({"use_reentrant": False})


def base_parameters(module: nn.Module, *, tied: bool = False) -> dict[str, nn.Parameter]:
    """The frozen parameters of the base model, under all their names with ``tied``.

    Those that adapters add do not count, nor those that were drawn at random for a pretrained
    model (``drawn``, names that the model itself knows).
    """
    drawn = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in module.named_modules()
        for name in getattr(layer, "drawn", ())
    }
    return {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=not tied)
        if not parameter.requires_grad and ADAPTERS not in name and name not in drawn
    }


def base_digest(module: nn.Module) -> str:
    """The SHA-256 of the base model's frozen parameters; empty if there are none."""
    parameters = base_parameters(module)
    if not parameters:
        return ""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        tensor = parameter.detach().cpu().contiguous()
        digest.update(json.dumps([[name, str(tensor.dtype), list(tensor.shape)]]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def share_base(module: nn.Module, other: nn.Module) -> None:
    """Let ``other`` hold the frozen parameters of ``module`` that are equal to its own."""
    shared = base_parameters(module)
    for name, parameter in base_parameters(other).items():
        mine = shared.get(name)
        if mine is not None and mine.shape == parameter.shape and torch.equal(mine, parameter):
            parameter.data = mine.data
