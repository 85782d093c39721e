"""The range of inputs: a warning where their scale is far from 1, or far from that of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nufed.data.samples import Samples, named_inputs

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
        """Of finite numbers; mean and deviation of large data are those of evenly spaced rows."""
        low, high = (float(x) for x in inputs.aminmax())
        unit = max(-low, high) or 1.0  # so that no square overflows
        some = inputs[:: math.ceil(inputs.numel() / MOST_NUMBERS)].double() / unit
        std, mean = (unit * float(x) for x in torch.std_mean(some, correction=0))
        return cls(low, high, float(f"{mean:.6g}"), float(f"{std:.6g}"))

    def scaled(self, scale: float, shift: float) -> InputRange:
        """Of x·scale + shift."""
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
    found = []
    for name, x in named_inputs(samples.inputs).items():
        if name not in ranges:
            continue
        raw, is_byte = ranges[name], x.dtype == torch.uint8
        seen = raw.scaled(samples.scale, samples.shift) if is_byte else raw
        if seen.far_from_one:
            found.append(_sentence(name, seen, is_byte))
    return found


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
