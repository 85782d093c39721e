"""From a description and weights to a module; nothing untrusted is imported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain

import torch
from safetensors.torch import load
from torch import Tensor, nn

from nufed.bundle.about import About
from nufed.errors import InputError
from nufed.models import MODELS
from nufed.objective import Loss
from nufed.runs.build import LOSSES, call_named, find_named


def build_model(
    about: About, weights: Mapping[str, Tensor], trust: bool, module: nn.Module | None
) -> nn.Module:
    """The module that a description names, holding ``weights``; nothing is imported untrusted."""
    build, dtype = about.model.build, getattr(torch, about.dtype)
    if module is not None:
        module = copy.deepcopy(module).to(dtype)
    elif build is None:
        raise InputError(
            "it was made of a module that it does not know how to build: pass module=, with the "
            "same architecture"
        )
    elif build in MODELS:
        with torch.device("meta"):  # takes no memory: a crafted width is found out first
            module = call_named("model", build, MODELS, about.model.args)
        module.to(dtype)
    elif trust:
        module = call_named("model", build, MODELS, about.model.args).to(dtype)
    else:
        raise InputError(
            f"its model is built by {build}, code that would be imported: say trust=True "
            "(--trust) if you trust where the bundle comes from"
        )
    load_state(module, weights)
    return module.eval()


def build_loss(about: About, trust: bool, loss: Loss | None) -> Loss:
    """The loss that a description names."""
    if loss is not None:
        return loss
    if about.loss is None:
        raise InputError("it was made with a loss of its own: pass loss=, the same function")
    if about.loss not in LOSSES and not trust:
        raise InputError(
            f"its loss is {about.loss}, code that would be imported: say trust=True (--trust) if "
            "you trust where the bundle comes from"
        )
    found: Loss = find_named("loss", about.loss, LOSSES)
    return found


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's state as safetensors takes it: contiguous, tied weights under all their names."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }


def read_weights(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, all of them finite."""
    tensors = load(content)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} holds numbers that are not finite")
    return tensors


def load_state(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a module that has just these, in shape and dtype."""
    wanted = {n: (tuple(t.shape), t.dtype) for n, t in module.state_dict().items()}
    given = {n: (tuple(t.shape), t.dtype) for n, t in weights.items()}
    if wanted != given:
        odd = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise InputError(
            f"the weights do not fit the module, first at {odd[0]!r}: given {given.get(odd[0])}, "
            f"wanted {wanted.get(odd[0])}"
        )
    for tensor in chain(module.parameters(), module.buffers()):
        tensor.data = tensor.data.contiguous()  # an expanded one can't be written to
    module.load_state_dict(dict(weights), assign=_is_meta(module))


def _is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())
