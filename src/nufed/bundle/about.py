"""A bundle's metadata: how to build its model, preprocess inputs, and fine-tune it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from nufed.data import Samples
from nufed.data.input_range import InputRange
from nufed.data.labels import as_words, class_numbers, listed
from nufed.data.samples import as_tensor, check_finite
from nufed.errors import InputError, NumericalWarning, shown
from nufed.objective.modules import RunningStats

FORMAT = 2  # version of About; format 1 has no inputs.range
MAX_SIZE = 2**40  # numbers per input; larger values are refused as crafted
MAX_ARGS_CHARACTERS = 20_000  # of a model's arguments as text

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
InputType = Literal["uint8", "int32", "int64", "float32", "float64"]
TargetType = Literal["bool", "uint8", "int8", "int16", "int32", "int64"]


class _AboutRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelAbout(_AboutRecord):
    """How to build the module: a model of nufed or an import path; None: pass it when loading."""

    build: str | None
    args: dict[str, Any] = {}
    running_stats: RunningStats = "refuse"

    @field_validator("args")
    @classmethod
    def _short(cls, args: dict[str, Any]) -> dict[str, Any]:
        if len(str(args)) > MAX_ARGS_CHARACTERS:
            raise ValueError(f"longer than {MAX_ARGS_CHARACTERS} characters")
        return args


class RangeAbout(_AboutRecord):
    """The range of the raw inputs of training (:class:`nufed.data.input_range.InputRange`)."""

    low: Finite
    high: Finite
    mean: Finite
    std: Annotated[Finite, Field(ge=0)]


class InputsAbout(_AboutRecord):
    """The format of one raw input; bytes are then converted to x·scale + shift."""

    shape: list[Size]
    dtype: InputType = "float32"
    scale: Finite = 1.0
    shift: Finite = 0.0
    range: RangeAbout | None = None  # unknown in a federation, whose sites keep their data

    @field_validator("shape")
    @classmethod
    def _bounded(cls, shape: list[int]) -> list[int]:
        if prod(shape) > MAX_SIZE:
            raise ValueError(f"{shape} is too large")
        return shape

    @property
    def size(self) -> int:
        """Numbers per input."""
        return prod(self.shape)

    def read(self, inputs: Any, model: torch.dtype) -> Tensor:
        """Validate the user's inputs, one per row, and convert them to the format of training.

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
                f"every sample has {numbers} numbers, and this model takes {self.size}, of "
                f"shape {tuple(self.shape)}: give the features that it was trained on"
            )
        check_finite(given, "input", model)
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            _check_whole(given, dtype, "inputs", "; give raw values, which it scales itself")
        return given.to(dtype).reshape(rows, *self.shape)

    def far_outside(self, given: Tensor) -> str | None:
        """A sentence, if inputs that were read are on another scale than those of training."""
        if self.range is None:
            return None
        own, trained = InputRange.of(given), InputRange(**self.range.model_dump())
        if not own.far_from(trained, given.numel()):
            return None
        return (
            f"the inputs range {own}, and those that this model was trained on {trained}: give "
            "them in the same units and on the same scale"
        )


def _check_whole(given: Tensor, dtype: torch.dtype, what: str, remedy: str = "") -> None:
    """Refuse numbers that this integer dtype does not hold."""
    limits = None if dtype == torch.bool else torch.iinfo(dtype)
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    smallest, largest = given.min(), given.max()
    whole = not given.is_floating_point() or bool((given == given.round()).all())
    if not whole or smallest < low or largest > high:
        raise InputError(
            f"{what} range from {smallest.item():g} to {largest.item():g}: this model was trained "
            f"on integers in {low} … {high}{remedy}"
        )


class AdaptAbout(_AboutRecord):
    """How the model is meant to be fine-tuned: ν steps of size α on batches of D samples.

    ``lr`` is one number, or one for every parameter by its name (learned step sizes). If it was
    chosen on validation samples of agents seen in training, ``lr_scale`` is its ratio to that of
    training; 0: no step lowered the loss there, so that ``steps`` is 0.
    """

    steps: Annotated[int, Field(ge=0, le=100_000)]
    lr: Annotated[Finite, Field(ge=0)] | dict[str, Annotated[Finite, Field(ge=0)]]
    lr_scale: Annotated[Finite, Field(ge=0)] | None = None
    batch_size: Size
    optimiser: Literal["sgd"] = "sgd"


class PersonalAbout(_AboutRecord):
    """Of a personal model that is more than a module: the algorithm that predicts with it.

    ``algorithm`` is a name of nufed's or an import path, ``settings`` are its settings, and
    ``training_data`` says what the file holds of the agent's training data.
    """

    algorithm: str
    settings: dict[str, bool | int | Finite | str]
    training_data: str | None


class About(_AboutRecord):
    """The metadata of a bundle or an adapted model."""

    format: Literal[1, 2] = 2
    nufed: str
    name: str
    model: ModelAbout
    inputs: InputsAbout
    adapt: AdaptAbout
    loss: str | None
    classes: list[str]
    dtype: Literal["float32", "float64"]
    # of whole numbers that are no classes, such as tokens; not written otherwise
    target_dtype: TargetType | None = Field(default=None, exclude_if=lambda value: value is None)
    trained: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    personal: PersonalAbout | None = None

    def samples(self, inputs: Any, targets: Any) -> Samples:
        """The user's data, validated against the model's format."""
        given = self.read_inputs(inputs)
        right = self.read_targets(targets)
        if len(right) != len(given):
            raise InputError(
                f"there are {len(given)} inputs and {len(right)} targets: give one target per input"
            )
        scale, shift = self.inputs.scale, self.inputs.shift
        return Samples(given, right, tuple(self.classes), scale=scale, shift=shift)

    def read_inputs(self, inputs: Any) -> Tensor:
        """The user's inputs, validated against the model's format."""
        return self.inputs.read(inputs, getattr(torch, self.dtype))

    def warn_outside(self, inputs: Tensor) -> str | None:
        """Warn, once, of inputs on another scale than those of training; returns the sentence."""
        outside = self.inputs.far_outside(inputs)
        if outside is not None:
            warnings.warn(outside, NumericalWarning, stacklevel=3)
        return outside

    def read_targets(self, targets: Any) -> Tensor:
        """Class numbers from names or numbers; else the numbers themselves, as in training."""
        if isinstance(targets, Tensor):
            targets = targets.numpy(force=True)
        words = as_words(targets)
        if words is not None:
            if self.classes:
                return class_numbers(words, self.classes)
            targets = [_float(word) for word in words]
        numbers = as_tensor(targets)
        dtype: torch.dtype = getattr(torch, self.dtype)
        check_finite(numbers, "target", dtype)
        if self.target_dtype is not None:
            dtype = getattr(torch, self.target_dtype)
            _check_whole(numbers, dtype, "targets")
        if not self.classes:
            return numbers.to(dtype)
        low, high = 0, len(self.classes) - 1
        whole = not numbers.is_floating_point() or bool((numbers == numbers.round()).all())
        if len(numbers) and not (whole and low <= numbers.min() and numbers.max() <= high):
            raise InputError(
                f"targets range from {numbers.min().item():g} to {numbers.max().item():g}: give "
                f"class numbers in {low} … {high}, or the names of classes ({listed(self.classes)})"
            )
        return numbers.long().reshape(-1)


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(
            f"the target {shown(word)} is not a number, and this is a regression model"
        ) from None


def read_about(content: Mapping[str, Any]) -> About:
    """The validated metadata of a bundle or personal model."""
    version = content.get("format")
    if version not in range(1, FORMAT + 1) or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT
        raise InputError(
            f"it has format {version!r}, and this nufed reads 1 … {FORMAT}"
            + ("; install a newer nufed" if newer else "")
        )
    return checked(lambda: About.model_validate(content))


def checked(make: Callable[[], About]) -> About:
    """The result of ``make``; a validation error becomes one sentence."""
    try:
        return make()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{key} is invalid: {first['msg']}") from None
