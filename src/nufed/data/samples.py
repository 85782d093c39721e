"""Samples in memory: one array for all agents, from which agents take rows by index.

Labels that are text become names of classes and their numbers. Where the scale of inputs is far
from 1, or from that of training, there is a warning.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nufed.errors import InputError, require, shown
from nufed.objective import Inputs

if TYPE_CHECKING:
    from nufed.data.tables import Preparation

CPU = torch.device("cpu")
LISTED = 12  # classes named in a message


def as_words(targets: Any) -> list[str] | None:
    """Targets that are text, as a list; None for numbers. Missing and empty labels are refused.

    A list is not made an array, whose items would all have the longest size.
    """
    if not isinstance(targets, list | tuple):
        array = np.asarray(targets)
        if array.ndim != 1 or array.dtype.kind not in "USOT":
            return None
        targets = array.tolist()
    words = [target.decode() if isinstance(target, bytes) else target for target in targets]
    if not any(isinstance(word, str) for word in words):
        return None
    for place, word in enumerate(words):
        if not isinstance(word, str) or not word.strip():
            raise InputError(
                f"the target of sample {place} (counted from 0) is {shown(word)}, and others are "
                "text: give every sample the name of its class"
            )
    return [str(word) for word in words]


def class_names(words: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes in their order: of the alphabet, or if all are whole numbers theirs.

    >>> class_names(["b", "a", "b"]), class_names(["10", "9"])
    (('a', 'b'), ('9', '10'))
    """
    names = set(words)
    numbers = all(re.fullmatch("-?[0-9]{1,18}", name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def class_numbers(words: Sequence[str], classes: Sequence[str]) -> Tensor:
    """The numbers of classes by their names; an unknown name is refused."""
    numbers = {name: number for number, name in reversed(list(enumerate(classes)))}
    for place, word in enumerate(words):
        if word not in numbers:
            raise InputError(
                f"unknown label {shown(word)} of sample {place} (counted from 0): the classes are "
                f"{listed(classes)}"
            )
    return torch.tensor([numbers[word] for word in words])


def listed(classes: Sequence[str]) -> str:
    """The names of the classes, or the first of many, for a message."""
    names = ", ".join(classes[:LISTED])
    return names if len(classes) <= LISTED else f"{names}, … ({len(classes)} in all)"


MAX_NAME_BYTES = 1000  # of the name of a class or owner
FEW_CLASSES = 1000  # allowed for any number of samples


@dataclass(frozen=True)
class Column:
    """A raw column: numbers, or categories, stored as places in ``words``; NaN is missing.

    ``absent`` are texts that meant a missing value in it, beside the usual ones.
    """

    name: str
    words: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "categories" if self.words else "numbers"


@dataclass(frozen=True)
class Table:
    """Raw columns: ``values`` has a row per sample and a column per column (float64)."""

    columns: tuple[Column, ...]
    values: Tensor

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, row by row.

    Args:
        inputs: a tensor, or a tuple or mapping of tensors for modules with several inputs.
            Bytes (uint8) are stored as such and become x·``scale`` + ``shift`` in a batch.
        targets: class numbers (int64) or regression targets (floating-point).
        classes: the names of the classes; empty for regression.
        owners: the owner of each sample, for a natural federation.
        scale, shift: how bytes become inputs.
        unseen_owners: owners to hold out from training unless a configuration says otherwise.
        columns: of inputs that are the values of a :class:`Table`, to be prepared before use.
        preparation: how inputs were made from columns.
    """

    inputs: Inputs
    targets: Tensor
    classes: tuple[str, ...] = ()
    owners: np.ndarray[Any, Any] | None = None
    scale: float = 1.0
    shift: float = 0.0
    unseen_owners: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        lengths = {len(x) for x in (*_tensors(self.inputs), self.targets)}
        if self.owners is not None:
            lengths.add(len(self.owners))
        if len(lengths) != 1 or lengths == {0}:
            raise InputError(
                f"the data has arrays of {sorted(lengths)} rows: inputs, targets and owners must "
                "have the same number of rows, at least one"
            )
        if self.columns and self.input_shape != (len(self.columns),):
            raise InputError(
                f"{len(self.columns)} columns are named, and inputs have shape {self.input_shape}: "
                "give a value per column"
            )
        for name, number in (("scale", self.scale), ("shift", self.shift)):
            require(math.isfinite(number), name, number, "must be a finite number")
        owners = set() if self.owners is None else set(map(str, self.owners))
        for name in (*self.classes, *owners):
            _check_name(name)
        if unknown := sorted(set(self.unseen_owners) - owners):
            raise InputError(
                f"unseen_owners names {shown(unknown[0])}, which owns no sample: the owners are "
                f"{listed(sorted(owners)) or 'not given'}"
            )
        if not self.classes:
            return
        low, high = self.targets.min().item(), self.targets.max().item()
        if not 0 <= low <= high < len(self.classes):
            raise InputError(
                f"class numbers run from {low} to {high}: with {len(self.classes)} classes they "
                f"must lie in 0 … {len(self.classes) - 1}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def check_finite(self, dtype: torch.dtype | None = None) -> None:
        """Refuse non-finite numbers, and those that would overflow in ``dtype``."""
        for name, x in named_inputs(self.inputs).items():
            if self.columns:  # NaN is missing
                x = x.nan_to_num(posinf=math.inf, neginf=-math.inf)
            check_finite(x, name, dtype, self.owners)
        check_finite(self.targets, "target", dtype, self.owners)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all contents."""
        digest = hashlib.sha256()
        for x in (*_tensors(self.inputs), self.targets):
            digest.update(f"{x.dtype} {tuple(x.shape)} ".encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
        owners = [] if self.owners is None else self.owners.tolist()
        digest.update(repr((self.classes, owners, self.scale, self.shift)).encode())
        for further in (self.unseen_owners, self.columns):
            if further:
                digest.update(repr(further).encode())
        return digest.hexdigest()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input (the first, if there are several)."""
        return tuple(_tensors(self.inputs)[0].shape[1:])

    @property
    def outputs(self) -> int:
        """The number of outputs that a model needs: classes, or numbers per target."""
        if self.classes:
            return len(self.classes)
        return int(np.prod(self.targets.shape[1:], dtype=int))

    def take(
        self, rows: np.ndarray[Any, Any] | Tensor, device: torch.device = CPU
    ) -> tuple[Inputs, Tensor]:
        """The inputs and targets of these rows, scaled for the model.

        On another device than the CPU all samples are copied there with the first call.
        """
        index = as_index(rows, device)
        inputs, targets = self._on(device)
        return mapped(lambda x: self._rows(x, index), inputs), targets.index_select(0, index)

    def take_targets(self, rows: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        """The targets of these rows."""
        return self._on(device)[1].index_select(0, as_index(rows, device))

    def _on(self, device: torch.device) -> tuple[Inputs, Tensor]:
        """All inputs and targets on a device."""
        if device.type == "cpu":
            return self.inputs, self.targets
        if device not in self._copies:
            self._copies[device] = (
                mapped(lambda x: x.to(device), self.inputs),
                self.targets.to(device),
            )
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Inputs, Tensor]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which make copies on their own devices."""
        return {name: value for name, value in vars(self).items() if name != "_copies"}

    def fill(self, table: Tensor, rows: np.ndarray[Any, Any]) -> None:
        """Write the inputs of these rows, flattened, into the rows of a table."""
        assert isinstance(self.inputs, Tensor)
        index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
        flat = self.inputs.flatten(1)
        if flat.dtype == table.dtype:
            torch.index_select(flat, 0, index, out=table)
        else:
            table.copy_(self._rows(flat, index))

    def _rows(self, x: Tensor, index: Tensor) -> Tensor:
        return scaled(x.index_select(0, index), self.scale, self.shift)


def _check_name(name: object) -> None:
    """Refuse names of classes and owners that can't be stored."""
    try:
        fits = isinstance(name, str) and len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        fits = False
    if not fits:
        raise InputError(
            f"the class or owner {shown(name)} can't be used: give text of at most "
            f"{MAX_NAME_BYTES} bytes in UTF-8"
        )


def mapped(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The inputs with each of their tensors changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: change(x) for name, x in inputs.items()}
    return tuple(map(change, inputs))


def as_index(rows: np.ndarray[Any, Any] | Tensor, device: torch.device) -> Tensor:
    """Numbers of rows as a tensor on a device."""
    if isinstance(rows, Tensor):
        return rows
    index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    return index if device.type == "cpu" else index.to(device)


def scaled(x: Tensor, scale: float, shift: float) -> Tensor:
    """Bytes scaled for the model; other dtypes unchanged."""
    if x.dtype != torch.uint8:
        return x
    return x.mul(scale).add_(shift) if shift else x * scale


def as_samples(data: Any, classes: Sequence[str] = ()) -> Samples:
    """The user's own data as :class:`Samples`; non-finite numbers are refused.

    ``data`` is one of: ``Samples``; ``(inputs, targets)`` or ``(inputs, targets, owners)`` of
    tensors or arrays, inputs also a :class:`Table`; a map-style ``torch.utils.data.Dataset`` of
    ``(input, target)`` pairs.
    Targets that are text are names of classes, numbered in their order (:func:`class_names`) or as
    in ``classes``, if these are known. Whole numbers in one dimension are class numbers; there may
    be as many classes as samples, as known ones, or :data:`FEW_CLASSES`. Others are regression
    targets.

    >>> import numpy as np
    >>> samples = as_samples((np.zeros((4, 3), dtype=np.float32), [0, 1, 2, 1]))
    >>> len(samples), samples.classes, samples.input_shape
    (4, ('0', '1', '2'), (3,))
    >>> as_samples((np.zeros((3, 1)), ["no", "yes", "no"])).classes
    ('no', 'yes')
    """
    samples = data if isinstance(data, Samples) else _read(data, classes)
    samples.check_finite()
    return samples


def check_finite(
    rows: Tensor, what: str, dtype: torch.dtype | None = None, owners: Any = None
) -> None:
    """Refuse numbers that are non-finite in ``dtype``, naming the first, its sample and owner."""
    if not rows.is_floating_point() or not rows.numel():
        return
    types = (rows.dtype, dtype or rows.dtype)
    largest = min(torch.finfo(each).max for each in types)
    low, high = rows.aminmax()  # takes no memory; NaN propagates, and fails the comparison
    if -largest <= low <= high <= largest:
        return
    flat = rows.reshape(len(rows), -1)
    good = (flat >= -largest) & (flat <= largest)
    row = int((~good.all(dim=1)).nonzero()[0])
    place = int((~good[row]).nonzero()[0])
    value = float(flat[row, place])
    word = "NaN" if math.isnan(value) else f"{value:.3g}".replace("inf", "infinity")
    index = [int(i) for i in np.unravel_index(place, rows.shape[1:] or (1,))]
    raise InputError(
        f"the {what} of sample {row} (counted from 0"
        + ("" if owners is None else f", of agent {shown(str(owners[row]))}")
        + f") holds {word}"
        + (f" at index {index}" if rows.ndim > 1 else "")
        + (f", beyond {largest:.2g}" if math.isfinite(value) else "")
        + ": remove that sample, or impute missing values"
    )


def _read(data: Any, known: Sequence[str]) -> Samples:
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        raise InputError(
            f"a Hugging Face {type(data).__name__} can't be used as data (its columns are "
            f"{data.column_names}): give arrays of its columns, for example "
            '(d["pixels"], d["label"]) with d = dataset.with_format("numpy")[:]'
        )
    if isinstance(data, Dataset):
        data = _stacked(data)
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise InputError(
            f"data of type {type(data).__name__} can't be used: give (inputs, targets), "
            "(inputs, targets, owners), a Dataset of (input, target) pairs, or nufed.Samples"
        )
    inputs, targets, owners = (*data, None)[:3]
    words, classes = as_words(targets), tuple(known)
    if words is not None:
        classes = classes or class_names(words)
        target_tensor = class_numbers(words, classes)
    else:
        target_tensor, classes = as_tensor(targets), ()
        if not target_tensor.is_floating_point() and target_tensor.ndim == 1:
            target_tensor = target_tensor.long()
            classes = _class_names(target_tensor, len(known))
    is_table = isinstance(inputs, Table)
    return Samples(
        inputs=inputs.values if is_table else _inputs(inputs),
        targets=target_tensor,
        classes=classes,
        owners=None if owners is None else np.asarray(owners),
        columns=inputs.columns if is_table else (),
    )


def _class_names(targets: Tensor, known_classes: int) -> tuple[str, ...]:
    """0, 1, … up to the largest class number, which must not be far beyond the samples."""
    if not len(targets):
        return ()
    most, place = max(len(targets), known_classes, FEW_CLASSES), int(targets.argmax())
    largest = int(targets[place])
    if largest >= most:
        raise InputError(
            f"the target of sample {place} (counted from 0) is class {largest}: {len(targets)} "
            f"samples may be of classes 0 … {most - 1}; number the classes without gaps, or give "
            "floating-point targets for regression"
        )
    return tuple(str(c) for c in range(largest + 1))


def _stacked(dataset: Dataset[Any]) -> tuple[Tensor, Any]:
    """All samples of a map-style dataset of (input, target) pairs."""
    try:
        pairs = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
        inputs, targets = zip(*pairs, strict=True)
        words = any(isinstance(target, str) for target in targets)
        rows = torch.stack([torch.as_tensor(x) for x in inputs])
        return rows, list(targets) if words else np.asarray(targets)
    except Exception as error:  # a user's dataset may raise anything
        raise InputError(
            f"{type(dataset).__name__} can't be used as data: it must have a length and give "
            f"(input, target) pairs of one shape ({type(error).__name__}: {error})"
        ) from error


def _inputs(inputs: Any) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: as_tensor(x) for name, x in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(as_tensor(x) for x in inputs)
    return as_tensor(inputs)


def as_tensor(array: Any) -> Tensor:
    """Numbers as a tensor; anything else is refused."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InputError(
            f"an array of dtype {array.dtype} can't be used as data: give booleans, or numbers of "
            "at most 64 bits"
        )
    with warnings.catch_warnings():
        # read-only arrays are fine: nothing is written
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def named_inputs(inputs: Inputs) -> dict[str, Tensor]:
    """Every array of the inputs, by how messages call it."""
    if isinstance(inputs, Tensor):
        return {"input": inputs}
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return {f"input {shown(key)}": x for key, x in pairs}


def _tensors(inputs: Inputs) -> list[Tensor]:
    return list(named_inputs(inputs).values())


LARGE, SMALL = 30.0, 1e-3  # of a scale that is far from 1
MOST_NUMBERS = 2**22  # that mean and standard deviation are computed from
FAR, NARROW = 5.0, 0.1  # compared with training: of the largest deviation, of the spread
FEW_NUMBERS = 10  # whose spread may be small by chance


@dataclass(frozen=True)
class InputRange:
    """Smallest and largest number, mean and standard deviation of all inputs together.

    >>> print(InputRange.of(torch.tensor([[0.0, 2.0], [4.0, 2.0]])))
    from 0 to 4 (mean 2, standard deviation 1.41)
    """

    low: float
    high: float
    mean: float
    std: float

    @classmethod
    def of(cls, inputs: Tensor) -> InputRange:
        """The range of finite numbers; mean and deviation of large data use evenly spaced rows."""
        low, high = (float(x) for x in inputs.aminmax())
        unit = max(-low, high) or 1.0  # so that no square overflows
        some = inputs[:: math.ceil(inputs.numel() / MOST_NUMBERS)].double() / unit
        std, mean = (unit * float(x) for x in torch.std_mean(some, correction=0))
        return cls(low, high, float(f"{mean:.6g}"), float(f"{std:.6g}"))

    def scaled(self, scale: float, shift: float) -> InputRange:
        """The range of x·scale + shift."""
        low, high = sorted((self.low * scale + shift, self.high * scale + shift))
        return InputRange(low, high, self.mean * scale + shift, self.std * abs(scale))

    def __str__(self) -> str:
        return (
            f"from {self.low:.3g} to {self.high:.3g} (mean {self.mean:.3g}, standard deviation "
            f"{self.std:.3g})"
        )

    @property
    def far_from_one(self) -> bool:
        """Whether usual initial weights and step sizes do not suit such inputs."""
        return max(-self.low, self.high) > LARGE or self.std < SMALL

    def far_from(self, trained: InputRange, numbers: int) -> bool:
        """Whether these are on another scale than the inputs of training.

        Either one deviates from the mean of training five times as much as any of training, or all
        spread less than a tenth as much. ``numbers`` is how many there are.
        """
        widest = max(trained.high - trained.mean, trained.mean - trained.low)
        deviation = max(abs(self.high - trained.mean), abs(self.low - trained.mean))
        narrow = numbers >= FEW_NUMBERS and self.std < NARROW * trained.std
        return deviation > FAR * widest or narrow


def input_ranges(samples: Samples) -> Mapping[str, InputRange]:
    """The range of every input as given, by its name; none for tokens and other integers."""
    return {
        name: InputRange.of(x)
        for name, x in named_inputs(samples.inputs).items()
        if x.numel() and (x.is_floating_point() or x.dtype == torch.uint8)
    }


def scale_warnings(samples: Samples, ranges: Mapping[str, InputRange]) -> list[str]:
    """A sentence for every input whose scale is far from 1, with the likely remedy."""
    sentences = []
    for name, x in named_inputs(samples.inputs).items():
        if name not in ranges:
            continue
        raw, is_byte = ranges[name], x.dtype == torch.uint8
        seen = raw.scaled(samples.scale, samples.shift) if is_byte else raw
        if seen.far_from_one:
            sentences.append(_sentence(name, seen, is_byte))
    return sentences


def _sentence(name: str, seen: InputRange, is_byte: bool) -> str:
    subject = "the inputs" if name == "input" else f"the numbers of {name}"
    if seen.std == 0:
        return f"{subject} are all {seen.low:.3g}: check how they were read"
    bytes_likely = seen.low >= 0 and LARGE < seen.high <= 255
    if is_byte and bytes_likely:
        remedy = "if they are bytes, give nufed.Samples with scale=1/255, which divides them"
    elif bytes_likely:
        remedy = "if they are bytes, divide them by 255 (in a file: data.args.scale=0.00392)"
    else:
        remedy = "standardise every feature (subtract its mean, divide by its standard deviation)"
    return (
        f"{subject} range {seen}, far from the scale of 1 that initial weights and step sizes "
        f"are made for: {remedy}"
    )
