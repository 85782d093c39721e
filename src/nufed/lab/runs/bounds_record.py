"""Results of ``nufed bounds``: the records that the report shows; the schema of ``bounds.json``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field

from nufed.lab.runs.json_files import Number, Record, Whole, finite
from nufed.theory import GREEK

Kind: TypeAlias = Literal["first_order", "hessian_free", "exact"]


def _constant(name: str) -> str:
    if name not in GREEK:
        raise ValueError(f"{name!r} is not a constant of the paper")
    return name


class _Record(Record):
    """Bounds may be infinite; these are written as null."""

    model_config = ConfigDict(allow_inf_nan=True)


class ConstantRecord(_Record):
    """A constant of the paper: the maximum over ``samples`` measurements, or given (0 samples)."""

    value: Number
    samples: Whole = 0
    spread: Number = 0.0


class GradientErrors(_Record):
    """Upper bounds on the bias and error of a meta-gradient: μ_F and σ_F."""

    bias: Number
    error: Number


class StepsRow(_Record):
    """The bounds of all lemmas for a number of fine-tuning steps."""

    steps: Whole
    smoothness: Number
    largest_meta_lr: Number
    dissimilarity: Number
    errors: Annotated[dict[Kind, GradientErrors], Field(min_length=3)]


class MeasuredErrors(_Record):
    """Values measured at the final model."""

    bias: Number
    error: Number
    dissimilarity: Number


class Terms(_Record):
    """Terms of the bound of Theorem 1."""

    initial_gap: Number
    bias: Number
    drift_dissimilarity: Number
    drift_noise: Number
    agent_sampling: Number
    gradient_noise: Number


class Promise(_Record):
    """The bound of Theorem 1, at ``meta_lr`` if admissible, else at the largest admissible value.

    ``trivial`` is (B·c^ν)², an upper bound on ‖∇F‖² at any model.
    """

    smoothness: Number
    meta_lr: Number
    largest_meta_lr: Number
    admissible: bool
    bias: Number
    error: Number
    dissimilarity: Number
    trivial: Number
    terms: Terms
    total: Number


class MethodBounds(_Record):
    """A method's bound (None if the loss is not smooth) and its measured values."""

    method: str
    steps: Whole
    promised: Promise | None = None
    measured: MeasuredErrors | None = None


class NotCovered(_Record):
    """A method that the bounds do not cover, and why."""

    method: str
    reason: str


class Stationarity(_Record):
    """‖∇F(w)‖² of a method's model after a round."""

    method: str
    round: Whole
    value: Number


class BoundsRecord(_Record):
    """``bounds.json``. ``by_steps`` uses the settings of ``by_steps_of``, the first method."""

    constants: dict[Annotated[str, AfterValidator(_constant)], ConstantRecord | None]
    smooth: bool
    seed: Whole | None = None
    uniform: bool
    by_steps_of: str
    by_steps: list[StepsRow]
    methods: list[MethodBounds]
    not_covered: list[NotCovered] = Field(default=[])
    stationarity: list[Stationarity] = Field(default=[])

    def record(self) -> dict[str, Any]:
        """As plain data for JSON."""
        found: dict[str, Any] = finite(self.model_dump())
        return found
