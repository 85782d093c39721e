"""An adapted model: the result of adapting a bundle, saved as one self-contained file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nufed.bundle.about import About, InputsAbout, read_about
from nufed.bundle.adapting import Report, Score
from nufed.bundle.building import MissingPartError, build_model
from nufed.bundle.personal_module import build_personal
from nufed.data.samples import scaled
from nufed.errors import InputError
from nufed.files import unseal, write_sealed


class Prediction(NamedTuple):
    """A prediction for one sample: a class and its probability, or numbers."""

    answer: str | list[float]
    probability: float | None


class Prepare(nn.Module):
    """Preprocessing: converts raw inputs to the model's shape, scale and dtype."""

    def __init__(self, inputs: InputsAbout, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.scale, self.shift = tuple(inputs.shape), inputs.scale, inputs.shift
        self.input_dtype: torch.dtype = getattr(torch, inputs.dtype)
        self.model_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x.to(self.input_dtype), self.scale, self.shift).reshape(x.shape[0], *self.shape)
        return x.to(self.model_dtype) if x.is_floating_point() else x


def prepared(about: About, module: nn.Module) -> nn.Module:
    """The module with preprocessing, which takes raw inputs."""
    before = Prepare(about.inputs, getattr(torch, about.dtype))
    return nn.Sequential(OrderedDict(prepare=before, model=module)).eval()


@dataclass(frozen=True)
class Adapted:
    """A model for one agent.

    Args:
        about: the metadata of its bundle.
        module: takes raw inputs, as ``adapt`` does, in the units of the data.
        report: the effect of adapting; None for a model that was not adapted.
    """

    about: About
    module: nn.Module
    report: Report | None

    def predict(self, inputs: Any) -> list[Prediction]:
        """The model's prediction for every sample; warns of inputs on another scale."""
        given = self.about.read_inputs(inputs)
        self.about.warn_outside(given)
        return self._predict(given)

    def _predict(self, given: Tensor) -> list[Prediction]:
        with torch.no_grad():
            outputs = self.module(given)
        if not self.about.classes:
            return [Prediction(row.reshape(-1).tolist(), None) for row in outputs]
        probabilities = outputs.softmax(dim=1)
        best, numbers = probabilities.max(dim=1)
        return [
            Prediction(self.about.classes[number], probability)
            for number, probability in zip(numbers.tolist(), best.tolist(), strict=True)
        ]

    def save(self, path: str | Path) -> Path:
        """Write it as one sealed, self-contained safetensors file."""
        about = {
            "adapted": self.about.model_dump(mode="json"),
            "report": None if self.report is None else asdict(self.report),
        }
        write_sealed(Path(path), about, self.module.get_submodule("model").state_dict())
        return Path(path)


def load_adapted(
    path: str | Path, *, trust: bool = False, module: nn.Module | None = None
) -> Adapted:
    """Read a model written by :meth:`Adapted.save`; runs no code from the file.

    Args:
        path: the file.
        trust, module: as for :func:`nufed.load_bundle`.
    """
    path = Path(path)
    try:
        found = unseal(path.read_bytes())
        about = read_about(found.about["adapted"])
        if about.personal is None:
            built = build_model(about, found.tensors, trust, module)
        else:
            built = build_personal(about, about.personal, found.tensors, trust, module)
        adapted = Adapted(about, prepared(about, built), _report(found.about["report"]))
        if about.personal is not None:  # its tensors may be anything
            adapted._predict(about.read_inputs(torch.zeros(1, about.inputs.size)))
    except MissingPartError as error:
        raise InputError(f"{path} can't be loaded: {error}") from error
    except Exception as error:  # a foreign or crafted file may raise anything
        reason = "it does not contain an adapted model" if isinstance(error, KeyError) else error
        raise InputError(
            f"{path} can't be used as an adapted model ({reason}): make it with `nufed adapt`"
        ) from error
    return adapted


def _report(found: dict[str, Any] | None) -> Report | None:
    if found is None:
        return None
    curve: Sequence[dict[str, Any]] = found["curve"]
    return Report(**{**found, "curve": tuple(Score(**score) for score in curve)})
