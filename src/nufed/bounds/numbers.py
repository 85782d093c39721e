"""Bounds from plain numbers: the file of ``nufed bounds FILE.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nufed import theory
from nufed.bounds.promise import Kind, promise, table_by_steps
from nufed.errors import InputError
from nufed.runs.messages import sentence
from nufed.theory import BatchSizes, ProblemConstants, Training


class Numbers(BaseModel):
    """Constants, and how training is run."""

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


def bounds_of_numbers(path: Path) -> dict[str, Any]:
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
        raise InputError(f"{path}: [constants] gives one of them twice, by its letter and its name")
    if numbers.curvature == "hessian_free" and numbers.fd_step is None:
        raise InputError(f"{path}: curvature = 'hessian_free' needs fd_step, the paper's δ")
    try:
        return _bounds(numbers, ProblemConstants(**given))
    except OverflowError:
        raise InputError(
            f"{path}: these numbers give bounds too large to compute; lower adapt_lr or adapt_steps"
        ) from None


def _bounds(numbers: Numbers, constants: ProblemConstants) -> dict[str, Any]:
    fd_step = numbers.fd_step or 0.0
    return {
        "constants": {
            n: {"value": v, "samples": 0, "spread": 0.0} for n, v in asdict(constants).items()
        },
        "smooth": True,
        "uniform": True,
        "by_steps": table_by_steps(
            constants,
            numbers.adapt_lr,
            numbers.batch_size,
            numbers.local_steps,
            fd_step,
            max(numbers.adapt_steps, 1),
        ),
        "methods": [
            promise(
                "given",
                constants,
                numbers.curvature,
                numbers.adapt_lr,
                BatchSizes.equal(numbers.batch_size, numbers.adapt_steps),
                fd_step,
                Training(
                    numbers.meta_lr,
                    numbers.local_steps,
                    numbers.rounds,
                    numbers.cohort,
                    numbers.agents,
                ),
                numbers.initial_gap,
            )
        ],
        "stationarity": [],
    }
