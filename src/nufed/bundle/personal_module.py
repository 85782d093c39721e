"""Personal models that are more than a module: further tensors, and an algorithm that predicts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from nufed.algorithms import ALGORITHMS
from nufed.algorithms.protocol import Algorithm, State
from nufed.bundle.about import About, PersonalAbout
from nufed.bundle.building import build_model, check_finite
from nufed.config.describe import name_of
from nufed.config.methods import MethodConfig, make_methods, table_of
from nufed.errors import InputError
from nufed.objective import Objective
from nufed.objective.modules import RunningStats
from nufed.registry import import_named

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
        training_data=algorithm.personal_data,
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
