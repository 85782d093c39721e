"""An agent's own model: what adapting returns, as one file that can be used anywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from nufed.bundle.about import About, InputsAbout, read_about
from nufed.bundle.adapting import Report, Score
from nufed.bundle.building import build_model, read_weights, state_of
from nufed.data.samples import scaled
from nufed.errors import InputError
from nufed.runs.durable import sha256, signed, verified, write_durably


class Prediction(NamedTuple):
    """What a model says about one sample: a class and how probable it holds it, or numbers."""

    answer: str | list[float]
    probability: float | None


class Prepare(nn.Module):
    """Inputs as people give them, in the shape and numbers that the model takes."""

    def __init__(self, inputs: InputsAbout, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.scale, self.shift = tuple(inputs.shape), inputs.scale, inputs.shift
        self.given: torch.dtype = getattr(torch, inputs.dtype)
        self.taken = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x.to(self.given), self.scale, self.shift).reshape(x.shape[0], *self.shape)
        return x.to(self.taken) if x.is_floating_point() else x


def prepared(about: About, module: nn.Module) -> nn.Module:
    """A module that takes inputs as people give them."""
    before = Prepare(about.inputs, getattr(torch, about.dtype))
    return nn.Sequential(OrderedDict(prepare=before, model=module)).eval()


@dataclass(frozen=True)
class Adapted:
    """A model for one agent.

    Args:
        about: the description of the bundle it came from.
        module: takes inputs as they were given to ``adapt``, in the units of the data.
        report: what adapting did; None for a model that was not adapted.
    """

    about: About
    module: nn.Module
    report: Report | None

    def predict(self, inputs: Any) -> list[Prediction]:
        """What the model says about every sample."""
        with torch.no_grad():
            outputs = self.module(self.about.read_inputs(inputs))
        if not self.about.classes:
            return [Prediction(row.reshape(-1).tolist(), None) for row in outputs]
        probabilities = outputs.softmax(dim=1)
        best, numbers = probabilities.max(dim=1)
        return [
            Prediction(self.about.classes[number], probability)
            for number, probability in zip(numbers.tolist(), best.tolist(), strict=True)
        ]

    def save(self, path: str | Path) -> Path:
        """Write it as one safetensors file, with all that is needed to use it."""
        write_durably(Path(path), self._serialised())
        return Path(path)

    def _serialised(self) -> bytes:
        tensors = state_of(self.module.get_submodule("model"))
        about = {
            "about": self.about.model_dump(mode="json"),
            "report": None if self.report is None else asdict(self.report),
            "tensors_sha256": sha256(save(tensors)),
        }
        # one metadata key: safetensors does not keep the order of several
        return save(tensors, metadata={"nufed": signed(about).decode()})


def load_adapted(
    path: str | Path, *, trust: bool = False, module: nn.Module | None = None
) -> Adapted:
    """Read a model that :meth:`Adapted.save` wrote; no code of it is run.

    Args:
        path: the file.
        trust, module: as for :func:`nufed.load_bundle`.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            found = verified((file.metadata() or {})["nufed"].encode())
        content = path.read_bytes()
        about, weights = read_about(found["about"]), read_weights(content)
        built = build_model(about, weights, trust, module)
        adapted = Adapted(about, prepared(about, built), _report(found["report"]))
        if adapted._serialised() != content:
            raise InputError("it is damaged, its SHA-256 differs")
    except Exception as error:  # whatever a foreign or crafted file does
        reason = "it does not hold a nufed model" if isinstance(error, KeyError) else error
        raise InputError(
            f"{path} can't be used as an adapted model ({reason}): make it with `nufed adapt`"
        ) from error
    return adapted


def _report(found: dict[str, Any] | None) -> Report | None:
    if found is None:
        return None
    curve: Sequence[dict[str, Any]] = found["curve"]
    return Report(**{**found, "curve": tuple(Score(**score) for score in curve)})
