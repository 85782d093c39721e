"""A bundle's metadata: how to build its model, preprocess inputs, and fine-tune it; its card."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from torch import Tensor

from nufed.data import Preparation, Samples
from nufed.data.samples import (
    InputRange,
    as_tensor,
    as_words,
    check_finite,
    class_numbers,
    listed,
    named_inputs,
)
from nufed.errors import InputError, NumericalWarning, shown, visible
from nufed.lab.config.describe import optional
from nufed.lab.config.schema import LoraConfig
from nufed.lab.pretrained import PREFIX, tokens
from nufed.lab.runs.json_files import DataclassJson
from nufed.lab.runs.records import zeros_of
from nufed.objective import Inputs
from nufed.objective.modules import RunningStats

# version of About: 1 has no inputs.range, only 3 and later have a preparation, several inputs, a
# part that is trained or an architecture, only 4 has step sizes beside the weights
FORMAT = 4
MAX_SIZE = 2**40  # numbers per input; larger values are refused as crafted
MAX_ARGS_CHARACTERS = 20_000  # of a model's arguments as text

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
InputType = Literal["uint8", "int32", "int64", "float32", "float64"]
TargetType = Literal["bool", "uint8", "int8", "int16", "int32", "int64"]


_RANGE = DataclassJson(InputRange, std=Annotated[float, Field(ge=0)])


def _range(value: Any) -> Any:
    return _RANGE.model_validate_json(json.dumps(value)) if isinstance(value, dict) else value


class _AboutRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BaseAbout(_AboutRecord):
    """The base model: the parameters that are frozen. ``carried``: whether the file holds them.

    Otherwise ``name``, a folder or a name at Hugging Face, says where they are.
    """

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    parameters: Size
    carried: bool
    name: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        name = self.name or "without a name"
        revision = f", revision {self.revision}" if self.revision else ""
        return f"{name}{revision}, SHA-256 {self.sha256[:12]}"


class ModelAbout(_AboutRecord):
    """How to build the module: a model of nufed or an import path; None: pass it when loading.

    ``architecture`` is the configuration of a model of transformers, whose ``build`` begins with
    ``hf:``.
    """

    build: str | None
    args: dict[str, Any] = {}
    running_stats: RunningStats = "refuse"
    train: str = optional("all")
    lora: LoraConfig | None = optional(None)
    architecture: dict[str, Any] | None = optional(None)
    base: BaseAbout | None = optional(None)

    @field_validator("args", "architecture")
    @classmethod
    def _short(cls, args: dict[str, Any] | None) -> dict[str, Any] | None:
        if len(str(args)) > MAX_ARGS_CHARACTERS:
            raise ValueError(f"longer than {MAX_ARGS_CHARACTERS} characters")
        return args


class InputsAbout(_AboutRecord):
    """The format of one raw input; bytes are then converted to x·scale + shift."""

    shape: list[Size]
    dtype: InputType = "float32"
    scale: Finite = 1.0
    shift: Finite = 0.0
    # of the raw inputs of training; unknown in a federation, whose sites keep their data
    range: Annotated[InputRange, BeforeValidator(_range)] | None = None

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
        current, trained = InputRange.of(given), self.range
        if not current.far_from(trained, given.numel()):
            return None
        return (
            f"the inputs range {current}, and those that this model was trained on {trained}: give "
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
    """The fine-tuning that the model was trained for: ν steps of size α on batches of D samples.

    ``lr`` is one number, one for every parameter by its name (learned step sizes), or ``"stored"``:
    one for every coordinate, or these for every step, in a tensor beside the weights. If it was
    chosen on validation samples of agents seen in training, ``lr_scale`` is its ratio to that of
    training; 0: no step lowered the loss there, so that ``steps`` is 0.
    """

    steps: Annotated[int, Field(ge=0, le=100_000)]
    lr: (
        Annotated[Finite, Field(ge=0)]
        | dict[str, Annotated[Finite, Field(ge=0)]]
        | Literal["stored"]
    )
    lr_scale: Annotated[Finite, Field(ge=0)] | None = None
    batch_size: Size
    optimiser: Literal["sgd"] = "sgd"


class PersonalAbout(_AboutRecord):
    """The algorithm that predicts with a personal model that is more than a module.

    ``algorithm`` is a name of nufed's or an import path, ``settings`` are its settings, and
    ``training_data`` says what the file holds of the agent's training data.
    """

    algorithm: str
    settings: dict[str, bool | int | Finite | str]
    training_data: str | None


class About(_AboutRecord):
    """The metadata of a bundle or an adapted model."""

    format: Literal[1, 2, 3, 4] = 2
    nufed: str
    name: str
    model: ModelAbout
    inputs: InputsAbout  # of several the first
    adapt: AdaptAbout
    loss: str | None
    classes: list[str]
    dtype: Literal["float32", "float64"]
    # of whole numbers that are no classes, such as tokens; not written otherwise
    target_dtype: TargetType | None = optional(None)
    trained: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    personal: PersonalAbout | None = None
    # of raw columns, which inputs are made from
    preparation: Annotated[Preparation, BeforeValidator(Preparation.read)] | None = optional(None)

    # of several inputs, in their order; numbers if the module takes them by position
    names: list[str] = optional([])
    further: list[InputsAbout] = optional([])

    @model_validator(mode="after")
    def _named(self) -> Self:
        if len(self.further) != max(0, len(self.names) - 1) or len(set(self.names)) < len(
            self.names
        ):
            raise ValueError(f"{len(self.names)} names for {1 + len(self.further)} inputs")
        return self

    @model_validator(mode="after")
    def _widths(self) -> Self:
        if self.preparation is not None and self.inputs.shape != [self.preparation.width]:
            raise ValueError(
                f"its preparation makes {self.preparation.width} inputs, not {self.inputs.shape}"
            )
        return self

    @field_serializer("preparation")
    def _plain(self, preparation: Preparation | None) -> list[dict[str, Any]] | None:
        return None if preparation is None else preparation.describe()

    def samples(self, inputs: Any, targets: Any) -> Samples:
        """The user's data, validated against the model's format."""
        given = self.read_inputs(inputs)
        right = self.read_targets(targets)
        for name, x in named_inputs(given).items():
            if len(right) != len(x):
                what = "inputs" if isinstance(given, Tensor) else f"rows of {name}"
                raise InputError(
                    f"there are {len(x)} {what} and {len(right)} targets: give one target per input"
                )
        scale, shift = self.inputs.scale, self.inputs.shift
        return Samples(given, right, tuple(self.classes), scale=scale, shift=shift)

    @property
    def oldest_format(self) -> int:
        """The oldest version that can say all of this."""
        model = self.model
        if self.adapt.lr == "stored":
            return 4
        plain = self.preparation is None and not self.names and model.train == "all"
        return 2 if plain and model.architecture is None and model.base is None else 3

    @property
    def formats(self) -> dict[str, InputsAbout]:
        """The format of every input by its name, if there are several."""
        return dict(zip(self.names, [self.inputs, *self.further], strict=False))

    @property
    def by_position(self) -> bool:
        """Whether the module takes several inputs by position."""
        return bool(self.names) and self.names[0].isdecimal()

    def zeros(self, rows: int) -> Inputs:
        """Inputs in the model's format, raw as users give them."""
        return zeros_of(self.formats or {"": self.inputs}, rows)

    def read_inputs(self, inputs: Any) -> Inputs:
        """The user's inputs, validated against the model's format.

        Of a table, columns by name; a tensor holds inputs that are prepared already. Of several
        inputs a mapping or a tuple of arrays.
        """
        if self.names:
            return self._read_several(inputs)
        if self.preparation is not None and not isinstance(inputs, Tensor):
            inputs, notes = self.preparation.apply(self.preparation.table(inputs))
            for note in notes:
                warnings.warn(note, NumericalWarning, stacklevel=4)
        return self.inputs.read(inputs, getattr(torch, self.dtype))

    def tokens(self, texts: Sequence[str], base: str | None = None) -> dict[str, Tensor]:
        """The inputs for some texts, by the tokenizer of a model of transformers.

        Args:
            texts: one for every sample; cut to the tokens of training.
            base: as for :func:`nufed.load_bundle`.
        """
        if self.model.architecture is None or "input_ids" not in self.names:
            raise InputError("this model does not read texts: give its inputs as arrays")
        known = self.model.base.name if self.model.base else None
        place = base or known or str(self.model.build).removeprefix(PREFIX)
        encoded = tokens(texts, place, self.formats["input_ids"].shape[0], trim=False)
        return {name: encoded[name] for name in self.names if name in encoded}

    def _read_several(self, inputs: Any) -> Inputs:
        formats, model = self.formats, getattr(torch, self.dtype)
        by_name = isinstance(inputs, Mapping)
        arrays = inputs if by_name else dict(zip(self.names, inputs, strict=False))
        if (
            by_name == self.by_position
            or len(inputs) != len(formats)
            or formats.keys() != {*arrays}
        ):
            named = "a tuple of" if self.by_position else f"a mapping with {listed(self.names)}, of"
            given = listed(sorted(map(str, inputs))) if by_name else f"{len(inputs)} arrays"
            raise InputError(
                f"this model takes {named} {len(formats)} arrays, and was given {given}"
            )
        read = {}
        for name, one in formats.items():
            try:
                read[name] = one.read(arrays[name], model)
            except InputError as error:
                raise InputError(f"input {shown(name)}: {error}") from None
        return tuple(read.values()) if self.by_position else read

    def warn_outside(self, inputs: Inputs) -> str | None:
        """Warn, once, of inputs on another scale than those of training; returns the sentence."""
        outside = self.inputs.far_outside(inputs) if isinstance(inputs, Tensor) else None
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
    return checked(content)


def checked(content: Mapping[str, Any]) -> About:
    """The metadata with this content; a validation error becomes one sentence."""
    try:
        return About.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{key} is invalid: {first['msg']}") from None


def card_of(about: About) -> str:
    """The card as Markdown, made from the metadata alone; their text is escaped."""
    try:
        return "\n".join(_lines(about)) + "\n"
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"`measured` can't be shown ({type(error).__name__}: {error}): it must have the layout "
            "that nufed writes"
        ) from None


def _lines(about: About) -> Iterator[str]:
    adapt, inputs = about.adapt, about.inputs
    yield f"# {_plain(about.name)}"
    yield ""
    if "agent" in about.trained:
        yield f"The personal model of agent {_plain(about.trained['agent'])}, for its data."
    else:
        yield "A global model: to be fine-tuned on your own data before use."
    if about.personal is not None and about.personal.training_data is not None:
        contents = _plain(about.personal.training_data)
        yield f"**This file holds {contents}**: store it only where they may be."
    yield ""
    yield "## Use"
    several = "per coordinate or step" if adapt.lr == "stored" else "one per parameter"
    rate = f"{adapt.lr:.4g}" if isinstance(adapt.lr, float) else f"{several}, learned"
    if adapt.lr_scale == 0:
        rate += " (no step lowered the loss on validation samples of agents seen in training)"
    elif adapt.lr_scale is not None:
        rate += (
            f" (chosen on validation samples of agents seen in training: {adapt.lr_scale:.3g} "
            "times that of training)"
        )
    yield (
        f"- fine-tuning: {adapt.steps} steps (ν) of plain gradient descent, step size (α) {rate}, "
        f"{adapt.batch_size} samples per batch (D)"
    )
    for name, one in (about.formats or {"": inputs}).items():
        named = f"input {_plain(name)}" if name else "inputs"
        yield f"- {named}: {one.dtype} of shape {tuple(one.shape)}" + _scaling(one)
    if about.preparation is not None:
        names = [column.name for column in about.preparation.columns]
        yield f"- columns: {_plain(_some(names))}; {about.preparation}, which it does itself"
    if inputs.range is not None:
        yield f"- inputs of training: {inputs.range}"
    if about.classes:
        yield f"- classes: {_plain(_some(about.classes))}"
    loss = about.loss or "given in Python"
    yield f"- model: {_plain(_built(about))}, {about.dtype}; loss: {_plain(loss)}"
    if about.model.train != "all":
        yield f"- trained: {_plain(about.model.train)}"
    if (base := about.model.base) is not None:
        where = "in this file" if base.carried else "not in this file: it is needed to use it"
        yield f"- base model: {_plain(base)}; {base.parameters:,} frozen parameters, {where}"
    if about.trained:
        yield from ["", "## Training"]
        for key, value in about.trained.items():
            yield f"- {_plain(key.replace('_', ' '))}: {_plain(_short(value))}"
    if about.measured:
        yield from ["", "## Measured"]
        yield from _measured(about.measured)
    yield from ["", f"Made by nufed {_plain(about.nufed)}."]


def _scaling(inputs: InputsAbout) -> str:
    if inputs.dtype != "uint8":
        return ""
    shift = f" + {inputs.shift:g}" if inputs.shift else ""
    return f", as bytes; the model takes x·{inputs.scale:.6g}{shift}"


def _built(about: About) -> str:
    if about.model.build is None:
        return "a module that has to be passed when the bundle is loaded"
    given = ", ".join(f"{key}={value}" for key, value in about.model.args.items())
    return f"{about.model.build}({given})"


def _measured(measured: Mapping[str, Any]) -> Iterator[str]:
    groups: Mapping[str, Mapping[str, Any]] = measured["groups"]
    one = next(iter(groups.values()), {})
    split = str(measured["split_sha256"])[:12]
    yield (
        f"{_plain(str(measured['measure']).capitalize())} on the {_plain(measured['scored_on'])} "
        f"parts of agents: of the global model, and of personal models after "
        f"{_plain(measured['steps'])} fine-tuning steps. "
        + (f"Split: SHA-256 {_plain(split)}." if split else "The split is at the sites.")
    )
    yield ""
    nulls = [key for key in ("majority", "centroid", "local", "untrained") if key in one]
    titles = ["agents", "number", "global", "personal", "± 95 %", "worst tenth", "harmed", *nulls]
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for group, row in groups.items():
        keys = ("global", "personal", "interval", "worst_tenth", "harmed", *nulls)
        numbers = [f"{row[key]:.3f}" if row.get(key) is not None else "" for key in keys]
        yield (
            "| "
            + " | ".join([f"{_plain(group)} in training", _plain(row["agents"]), *numbers])
            + " |"
        )
    yield ""
    yield (
        "*Harmed* is the share of agents whose personal model is worse than the global one. Null "
        "baselines: "
        "always the agent's most frequent class (majority), the nearest class mean (centroid), "
        "trained on its data alone (local), an untrained model fine-tuned (untrained). A new agent "
        "is like those unseen in training."
    )
    if "newcomer" in measured:
        yield ""
        yield (
            "Personal models of this method are not the global one after plain steps: an agent "
            f"unseen in training {_plain(measured['newcomer'])}. Scores after fine-tuning this "
            "bundle by plain steps were not measured."
        )


def _plain(text: object) -> str:
    """Text escaped for Markdown."""
    return re.sub(r"([\\`*_\[\]<>|&#~])", r"\\\1", visible(text))


def _short(value: Any) -> Any:
    is_hash = isinstance(value, str) and len(value) == 64
    return value[:12] if is_hash else value


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 20 else f"{', '.join(names[:20])}, … ({len(names)})"
