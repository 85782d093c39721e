"""Builds the model of a file from metadata and weights; imports nothing untrusted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from nufed.algorithms import ALGORITHMS
from nufed.algorithms.protocol import Algorithm, State
from nufed.errors import InputError
from nufed.lab.bundle.about import About, PersonalAbout
from nufed.lab.config.describe import name_of
from nufed.lab.config.methods import MethodConfig, make_methods, table_of
from nufed.lab.config.problem import LOSSES, call_named, find_named, with_trained_part
from nufed.lab.config.schema import LoraConfig
from nufed.models import MODELS
from nufed.objective import Loss, Objective
from nufed.objective.modules import RunningStats
from nufed.registry import import_named


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
    module = with_trained_part(module, about.model.train, about.model.lora or LoraConfig())
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
    named: Loss = find_named("loss", about.loss, LOSSES)
    return named


def check_finite(weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} holds non-finite numbers")


def load_state(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load finite weights into a module, whose names, shapes and dtypes they must match."""
    check_finite(weights)
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
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    module.load_state_dict(dict(weights), assign=is_meta)


MODEL, FURTHER = "module.", "further."  # what the names of tensors in a file begin with


class PersonalModule(nn.Module):
    """A personal model as a module: ``Algorithm.predict`` is its forward pass.

    Args:
        algorithm: what predicts.
        module: the model, with the personal vector ``"model"`` as its parameters.
        running_stats: as for :class:`~nufed.objective.Objective`.
        further: the personal model's other tensors.
    """

    def __init__(
        self, algorithm: Algorithm, module: nn.Module, running_stats: RunningStats, further: State
    ) -> None:
        super().__init__()
        self.module, self.further = module, nn.Module()
        for name, tensor in further.items():
            self.further.register_buffer(f"{name}_", tensor.cpu())  # "_": not a module's own names
        self._algorithm = algorithm
        self._objective = Objective(module, running_stats=running_stats)

    def forward(self, x: Tensor) -> Tensor:
        further = {name[:-1]: tensor for name, tensor in self.further.named_buffers()}
        personal = {"model": self._objective.initial(), **further}
        return self._algorithm.predict(self._objective, personal, x)


def about_algorithm(method: str, algorithm: Algorithm) -> PersonalAbout:
    """What a file says about the algorithm that predicts."""
    return PersonalAbout(
        algorithm=name_of(type(algorithm), ALGORITHMS),
        settings=table_of(method, algorithm, None).settings,
        training_data=algorithm.notes.personal_data,
    )


def build_personal(
    about: About,
    personal: PersonalAbout,
    tensors: Mapping[str, Tensor],
    trust: bool,
    module: nn.Module | None,
) -> PersonalModule:
    """The module of a file that :class:`PersonalModule` was saved in."""
    check_finite(tensors)
    further = {n.removeprefix(FURTHER): t for n, t in tensors.items() if n.startswith(FURTHER)}
    weights = {n.removeprefix(MODEL): t for n, t in tensors.items() if not n.startswith(FURTHER)}
    built = build_model(about, weights, trust, module)
    return PersonalModule(
        _algorithm(personal, trust),
        built,
        about.model.running_stats,
        {name.removesuffix("_"): tensor for name, tensor in further.items()},
    )


def _algorithm(personal: PersonalAbout, trust: bool) -> Algorithm:
    table = MethodConfig.model_validate({**personal.settings, "algorithm": personal.algorithm})
    code = table.code()
    if code and not trust:
        raise InputError(
            f"it is used by {', '.join(code.values())}, code that would be imported: say "
            "trust=True (--trust) if you trust where the file comes from"
        )
    for key, name in code.items():
        import_named(key, name)
    return make_methods(MethodConfig(), {"personal": table})["personal"].algorithm
