"""Builds a module from metadata and weights; imports nothing untrusted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from nufed.bundle.about import About
from nufed.config.build import LOSSES, call_named, find_named
from nufed.errors import InputError
from nufed.models import MODELS
from nufed.objective import Loss


class MissingPartError(InputError):
    """Loading a file needs consent to import code, or an object that it does not hold."""


def build_model(
    about: About, weights: Mapping[str, Tensor], trust: bool, module: nn.Module | None
) -> nn.Module:
    """The module that the metadata name, with ``weights``; imports code only if trusted."""
    build, dtype = about.model.build, getattr(torch, about.dtype)
    if module is not None:
        module = copy.deepcopy(module).to(dtype)
    elif build is None:
        raise MissingPartError(
            "it was made from a module object and does not record how to build it: pass module=, "
            "with the same architecture"
        )
    elif build in MODELS:
        with torch.device("meta"):  # allocates nothing: a crafted width is detected first
            module = call_named("model", build, MODELS, about.model.args)
        module.to(dtype)
    elif trust:
        module = call_named("model", build, MODELS, about.model.args).to(dtype)
    else:
        raise MissingPartError(
            f"its model is built by {build}, code that would be imported: pass trust=True "
            "(--trust) if you trust the author of the bundle"
        )
    check_finite(weights)
    load_state(module, weights)
    return module.eval()


def build_loss(about: About, trust: bool, loss: Loss | None) -> Loss:
    """The loss that the metadata name."""
    if loss is not None:
        return loss
    if about.loss is None:
        raise MissingPartError("it was made with a loss object: pass loss=, the same function")
    if about.loss not in LOSSES and not trust:
        raise MissingPartError(
            f"its loss is {about.loss}, code that would be imported: pass trust=True (--trust) if "
            "you trust the author of the bundle"
        )
    found: Loss = find_named("loss", about.loss, LOSSES)
    return found


def check_finite(weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} holds non-finite numbers")


def load_state(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a module, whose names, shapes and dtypes they must match."""
    wanted = {n: (tuple(t.shape), t.dtype) for n, t in module.state_dict().items()}
    given = {n: (tuple(t.shape), t.dtype) for n, t in weights.items()}
    if wanted != given:
        odd = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise InputError(
            f"the weights do not match the module, first at {odd[0]!r}: given "
            f"{given.get(odd[0])}, expected {wanted.get(odd[0])}"
        )
    for tensor in chain(module.parameters(), module.buffers()):
        tensor.data = tensor.data.contiguous()  # an expanded one can't be written to
    module.load_state_dict(dict(weights), assign=_is_meta(module))


def _is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())
