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
from nufed.lab.pretrained import PREFIX, pretrained, with_architecture
from nufed.models import MODELS
from nufed.models.trainable import base_digest, base_parameters
from nufed.objective import Inputs, Loss, Objective
from nufed.objective.modules import RunningStats
from nufed.registry import import_named


class MissingPartError(InputError):
    """Loading a file needs consent to import code, or an object that it does not hold."""


def build_model(
    about: About,
    weights: Mapping[str, Tensor],
    trust: bool,
    module: nn.Module | None,
    base: str | None = None,
) -> nn.Module:
    """The module that the metadata name, with ``weights``; imports code only if trusted.

    ``base``: where its pretrained base model is, if not where the metadata say.
    """
    build, dtype = about.model.build, getattr(torch, about.dtype)
    elsewhere = about.model.base is not None and not about.model.base.carried
    if base is not None and not elsewhere:
        raise MissingPartError(f"it needs no base model, and {base} was given: leave that out")
    given = module is not None
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
    elif build.startswith(PREFIX):
        module = (_pretrained(about, base) if elsewhere else _untrained(about, weights)).to(dtype)
    elif trust:
        module = call_named("model", build, MODELS, about.model.args).to(dtype)
    else:
        raise MissingPartError(
            f"its model is built by {build}, code that would be imported: pass trust=True "
            "(--trust) if you trust the author of the bundle"
        )
    module = _with_part(about, module)
    if elsewhere:
        place = "the given module" if given else base
        weights = {**weights, **_base_state(about, module, place)}
    load_state(module, weights)
    return module.eval()


def _with_part(about: About, module: nn.Module) -> nn.Module:
    return with_trained_part(module, about.model.train, about.model.lora or LoraConfig())


def _pretrained(about: About, base: str | None) -> nn.Module:
    """The model of transformers, with the weights of its base model."""
    known = about.model.base
    assert known is not None and known.name is not None
    arguments = (
        {**about.model.args, "revision": known.revision} if base is None else about.model.args
    )
    arguments = {**arguments, "name": base or known.name}
    if base is not None:
        arguments.pop("revision", None)
    try:
        return pretrained(**arguments)
    except InputError as error:
        raise MissingPartError(
            f"it needs its base model, {known}: {error}; or say where it is with --base (base=)"
        ) from None


def _untrained(about: About, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model of transformers, for weights that the file holds itself."""
    architecture, task = about.model.architecture or {}, about.model.args.get("task", "sequence")
    with torch.device("meta"):  # allocates nothing: a crafted width is detected first
        like = with_architecture(architecture, task)
    check_state(_with_part(about, like.to(getattr(torch, about.dtype))), weights)
    return with_architecture(architecture, task)


def _base_state(about: About, module: nn.Module, place: str | None) -> dict[str, Tensor]:
    """The frozen parameters of a base model; refuses another than the metadata name."""
    known, digest = about.model.base, base_digest(module)
    assert known is not None
    if digest != known.sha256:
        raise MissingPartError(
            f"its base model is {known}, and that of {place or known.name} is another (SHA-256 "
            f"{digest[:12]}): say where the right one is with --base (base=)"
        )
    return {name: p.detach() for name, p in base_parameters(module, tied=True).items()}


def stored_state(about: About, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module that its file holds: without a base model that is elsewhere."""
    base = about.model.base
    left_out = {} if base is None or base.carried else base_parameters(module, tied=True)
    return {name: x for name, x in module.state_dict().items() if name not in left_out}


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
    check_state(module, weights)
    for tensor in chain(module.parameters(), module.buffers()):
        tensor.data = tensor.data.contiguous()  # an expanded one can't be written to
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    module.load_state_dict(dict(weights), assign=is_meta)


def check_state(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights whose names, shapes and dtypes are not those of a module."""
    wanted = {n: (tuple(t.shape), t.dtype) for n, t in module.state_dict().items()}
    given = {n: (tuple(t.shape), t.dtype) for n, t in weights.items()}
    if wanted != given:
        odd = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise InputError(
            f"the weights do not match the module, first at {odd[0]!r}: given "
            f"{given.get(odd[0])}, expected {wanted.get(odd[0])}"
        )


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

    def forward(self, *arrays: Tensor, **named: Tensor) -> Tensor:
        further = {name[:-1]: tensor for name, tensor in self.further.named_buffers()}
        personal = {"model": self._objective.initial(), **further}
        inputs: Inputs = named or (arrays[0] if len(arrays) == 1 else arrays)
        return self._algorithm.predict(self._objective, personal, inputs)


def about_algorithm(method: str, algorithm: Algorithm) -> PersonalAbout:
    """The metadata of the algorithm that predicts."""
    return PersonalAbout(
        algorithm=name_of(type(algorithm), ALGORITHMS),
        settings=table_of(method, algorithm, MethodConfig()).settings,
        training_data=algorithm.notes.personal_data,
    )


def build_personal(
    about: About,
    personal: PersonalAbout,
    tensors: Mapping[str, Tensor],
    trust: bool,
    module: nn.Module | None,
    base: str | None = None,
) -> PersonalModule:
    """The module of a file that :class:`PersonalModule` was saved in."""
    check_finite(tensors)
    further = {n.removeprefix(FURTHER): t for n, t in tensors.items() if n.startswith(FURTHER)}
    weights = {n.removeprefix(MODEL): t for n, t in tensors.items() if not n.startswith(FURTHER)}
    built = build_model(about, weights, trust, module, base)
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
