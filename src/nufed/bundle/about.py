"""What a bundle says about its model: how to build it, feed it, and fine-tune it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from nufed.data import Samples
from nufed.data.samples import as_tensor, check_finite
from nufed.errors import InputError, shown

FORMAT = 1  # of what About holds
MOST_NUMBERS = 2**40  # of one input, or of a model's arguments: more is no honest bundle
MOST_CHARACTERS = 20_000  # of a model's arguments as text

Size = Annotated[int, Field(ge=1, le=MOST_NUMBERS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
InputType = Literal["uint8", "int32", "int64", "float32", "float64"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelAbout(_Table):
    """How to build the module: a model of nufed's or an import path; None: pass it when loading."""

    build: str | None
    args: dict[str, Any] = {}
    running_stats: Literal["refuse", "frozen"] = "refuse"

    @field_validator("args")
    @classmethod
    def _short(cls, args: dict[str, Any]) -> dict[str, Any]:
        if len(str(args)) > MOST_CHARACTERS:
            raise ValueError(f"longer than {MOST_CHARACTERS} characters")
        return args


class InputsAbout(_Table):
    """One input as people give it; bytes then become x·scale + shift."""

    shape: list[Size]
    dtype: InputType = "float32"
    scale: Finite = 1.0
    shift: Finite = 0.0

    @field_validator("shape")
    @classmethod
    def _bounded(cls, shape: list[int]) -> list[int]:
        if prod(shape) > MOST_NUMBERS:
            raise ValueError(f"{shape} is too large")
        return shape

    @property
    def size(self) -> int:
        """Numbers per input."""
        return prod(self.shape)

    def read(self, inputs: Any, model: torch.dtype) -> Tensor:
        """The user's inputs, one per row, as they were in training; what does not fit is refused.

        Rows may be flat or in the shape of one input. Numbers must be finite in ``model``, the
        dtype that the model computes in.
        """
        given = as_tensor(inputs)
        rows = len(given) if given.ndim else 0
        if not rows:
            raise InputError("the data is empty: give at least one sample")
        numbers = prod(given.shape[1:])
        if numbers != self.size:
            raise InputError(
                f"every sample has {numbers} numbers and this model takes {self.size}, in the "
                f"shape {tuple(self.shape)}: give it the features it was trained on"
            )
        check_finite(given, "input", model)
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            self._check_whole(given, dtype)
        return given.to(dtype).reshape(rows, *self.shape)

    def _check_whole(self, given: Tensor, dtype: torch.dtype) -> None:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        smallest, largest = given.min(), given.max()
        whole = not given.is_floating_point() or bool((given == given.round()).all())
        if not whole or smallest < low or largest > high:
            raise InputError(
                f"inputs run from {smallest.item():g} to {largest.item():g}: this model was "
                f"trained on whole numbers in {low} … {high}, as they are in the data; it scales "
                "them itself"
            )


class AdaptAbout(_Table):
    """How the model is meant to be fine-tuned: ν steps of size α on batches of D samples.

    ``lr`` is one number, or one for every parameter by its name (learned step sizes). Where it was
    chosen on validation samples of agents seen in training, ``lr_scale`` is what it is over that of
    training.
    """

    steps: Annotated[int, Field(ge=0, le=100_000)]
    lr: Annotated[Finite, Field(ge=0)] | dict[str, Annotated[Finite, Field(ge=0)]]
    lr_scale: Annotated[Finite, Field(gt=0)] | None = None
    batch_size: Size
    optimiser: Literal["sgd"] = "sgd"


class About(_Table):
    """What ``bundle.json`` holds, but for hashes."""

    format: Literal[1] = 1
    nufed: str
    name: str
    model: ModelAbout
    inputs: InputsAbout
    adapt: AdaptAbout
    loss: str | None
    classes: list[str]
    dtype: Literal["float32", "float64"]
    trained: dict[str, Any] = {}
    measured: dict[str, Any] = {}

    def samples(self, inputs: Any, targets: Any) -> Samples:
        """The user's data, checked against what this model takes."""
        given = self.read_inputs(inputs)
        right = self.read_targets(targets)
        if len(right) != len(given):
            raise InputError(
                f"there are {len(given)} inputs and {len(right)} targets: give one target per input"
            )
        scale, shift = self.inputs.scale, self.inputs.shift
        return Samples(given, right, tuple(self.classes), scale=scale, shift=shift)

    def read_inputs(self, inputs: Any) -> Tensor:
        """The user's inputs, checked against what this model takes."""
        return self.inputs.read(inputs, getattr(torch, self.dtype))

    def read_targets(self, targets: Any) -> Tensor:
        """Class numbers from class names or numbers; for regression the numbers themselves."""
        if isinstance(targets, Tensor):
            targets = targets.numpy(force=True)
        if _are_words(targets):
            if self.classes:
                return torch.tensor([self._number(str(word)) for word in targets])
            targets = [_float(str(word)) for word in targets]
        numbers = as_tensor(targets)
        dtype: torch.dtype = getattr(torch, self.dtype)
        check_finite(numbers, "target", dtype)
        if not self.classes:
            return numbers.to(dtype)
        low, high = 0, len(self.classes) - 1
        whole = not numbers.is_floating_point() or bool((numbers == numbers.round()).all())
        if len(numbers) and not (whole and low <= numbers.min() and numbers.max() <= high):
            raise InputError(
                f"targets run from {numbers.min().item():g} to {numbers.max().item():g}: give "
                f"class numbers in {low} … {high}, or the names of classes ({self._known()})"
            )
        return numbers.long().reshape(-1)

    def _number(self, name: str) -> int:
        if name not in self.classes:
            raise InputError(f"unknown label {shown(name)}: this model knows {self._known()}")
        return self.classes.index(name)

    def _known(self) -> str:
        shown = ", ".join(self.classes[:12])
        return shown if len(self.classes) <= 12 else f"{shown}, … ({len(self.classes)} in all)"


def _are_words(targets: Any) -> bool:
    """Whether they are text; an array of a long list of it would be as wide as the longest."""
    if isinstance(targets, list | tuple):
        return bool(targets) and all(isinstance(target, str) for target in targets)
    return np.asarray(targets).dtype.kind in "US"


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(
            f"the target {shown(word)} is no number, and this model gives numbers"
        ) from None


def read_about(content: Mapping[str, Any]) -> About:
    """The description of a bundle or personal model, checked."""
    version = content.get("format")
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        raise InputError(
            f"it has format {version!r} and this nufed reads {FORMAT}"
            + ("; install a newer nufed" if newer else "")
        )
    return checked(lambda: About.model_validate(content))


def checked(make: Callable[[], About]) -> About:
    """What ``make`` makes; the first thing that is wrong with it as one sentence."""
    try:
        return make()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{key} can't be used: {first['msg']}") from None
