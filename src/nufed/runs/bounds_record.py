"""The schema of ``bounds.json``, which ``nufed bounds`` leaves in a run directory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from nufed.runs.records import Number, Record, Whole
from nufed.theory import GREEK


def _constant(name: str) -> str:
    if name not in GREEK:
        raise ValueError(f"{name!r} is no constant of the paper")
    return name


class Estimated(Record):
    value: Number
    samples: Whole
    spread: Number


class GradientErrors(Record):
    bias: Number
    error: Number


class StepsRow(Record):
    """What every lemma gives for a number of steps."""

    steps: Whole
    smoothness: Number
    largest_meta_lr: Number
    dissimilarity: Number
    errors: Annotated[
        dict[Literal["first_order", "hessian_free", "exact"], GradientErrors],
        Field(min_length=3),
    ]


class MeasuredErrors(Record):
    bias: Number
    error: Number
    dissimilarity: Number


class Terms(Record):
    """Those of Theorem 1."""

    initial_gap: Number
    bias: Number
    drift_dissimilarity: Number
    drift_noise: Number
    agent_sampling: Number
    gradient_noise: Number


class MethodMeasured(Record):
    """What was measured of a method, where the bounds do not apply."""

    method: str
    steps: Whole
    measured: MeasuredErrors


class MethodBounds(MethodMeasured):
    """What was measured of a method, and what is promised to it."""

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


class Stationarity(Record):
    method: str
    round: Whole
    value: Number


class BoundsRecord(Record):
    """``bounds.json``."""

    constants: dict[Annotated[str, AfterValidator(_constant)], Estimated | None]
    smooth: bool
    seed: Whole
    uniform: bool
    by_steps: list[StepsRow]
    methods: list[MethodBounds | MethodMeasured]
    stationarity: list[Stationarity]
