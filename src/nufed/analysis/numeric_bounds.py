"""Bounds from given numbers: ``nufed bounds FILE.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nufed import theory
from nufed.algorithms.protocol import TheorySettings
from nufed.analysis.promise import fd_step, promise, table_by_steps
from nufed.config.messages import sentence
from nufed.errors import InputError
from nufed.runs.bounds_record import BoundsRecord, ConstantRecord, Kind, MethodBounds
from nufed.theory import ProblemConstants

GIVEN = "given"  # the name of the method that the numbers describe


class Numbers(BaseModel):
    """Constants, and the settings of training."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    constants: dict[str, float]
    adapt_lr: float = Field(description="α")
    adapt_steps: Annotated[int, Field(ge=0, le=50)] = Field(description="ν")
    batch_size: Annotated[int, Field(ge=1)] = Field(description="D")
    fd_step: Annotated[float, Field(ge=0)] | None = Field(default=None, description="δ")
    curvature: Kind = "exact"
    meta_lr: float = Field(description="β")
    local_steps: Annotated[int, Field(ge=1)] = Field(description="τ")
    rounds: Annotated[int, Field(ge=1)] = Field(description="K")
    agents: Annotated[int, Field(ge=1)] = Field(description="N")
    cohort: Annotated[int, Field(ge=1)] = Field(description="m")
    initial_gap: Annotated[float, Field(ge=0)] = Field(description="F(w₀) − F*")


def bounds_of_numbers(path: Path) -> BoundsRecord:
    """The bounds for the constants and settings in a TOML file."""
    fields = Numbers.model_fields
    try:
        numbers = Numbers.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} can't be read as TOML: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {sentence(error, fields, fields)}") from None
    names = {greek: name for name, greek in theory.GREEK.items()}
    given = {names.get(key, key): value for key, value in numbers.constants.items()}
    if set(given) != set(theory.GREEK):
        odd = sorted(set(given) ^ set(theory.GREEK))
        raise InputError(
            f"{path}: [constants] must hold {', '.join(theory.GREEK)}; missing or unknown: "
            f"{', '.join(odd)}"
        )
    if len(given) < len(numbers.constants):
        raise InputError(
            f"{path}: [constants] gives a constant by its letter and by its name: keep one"
        )
    if numbers.curvature == "hessian_free" and numbers.fd_step is None:
        raise InputError(f"{path}: curvature = 'hessian_free' needs fd_step, the paper's δ")
    try:
        return _bounds(numbers, ProblemConstants(**given))
    except OverflowError:
        raise InputError(
            f"{path}: these numbers give bounds too large to compute; lower adapt_lr or adapt_steps"
        ) from None


def _bounds(numbers: Numbers, constants: ProblemConstants) -> BoundsRecord:
    settings = TheorySettings(
        numbers.adapt_steps,
        numbers.adapt_lr,
        numbers.meta_lr,
        numbers.local_steps,
        numbers.batch_size,
        numbers.curvature,
        numbers.fd_step or 0.0,
    )
    promised = promise(
        constants, settings, numbers.rounds, numbers.cohort, numbers.agents, numbers.initial_gap
    )
    return BoundsRecord(
        constants={name: ConstantRecord(value=v) for name, v in asdict(constants).items()},
        smooth=True,
        uniform=True,
        by_steps_of=GIVEN,
        by_steps=table_by_steps(
            constants, settings, fd_step(settings), max(numbers.adapt_steps, 1)
        ),
        methods=[MethodBounds(method=GIVEN, steps=numbers.adapt_steps, promised=promised)],
    )
