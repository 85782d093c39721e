"""``[tune]``: what ``nufed tune`` searches; ``[tuned]``: what a search chose, for reports."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

SamplerName: TypeAlias = Literal["tpe", "random", "grid"]
ScoredAgents: TypeAlias = Literal["seen", "unseen"]
BudgetUnit: TypeAlias = Literal["gradient", "trial"]


class TuneTable(BaseModel):
    """``[tune]``. A range is ``[low, high]``, a list of choices, or ``"auto"``: as declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    budget: float = Field(
        default=50.0,
        gt=0,
        le=1e9,
        description="per method: gradients in full trainings by the cheapest method, or trials",
    )
    # not written if default, so that searches from before resume
    per: BudgetUnit = Field(
        default="gradient",
        exclude_if=lambda value: value == "gradient",
        description="what the budget counts; per trial, expensive methods get as many as others",
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(default=0, description="of the search")
    agents: ScoredAgents = Field(
        default="seen",
        description="whose validation samples count: those in training, or held-out newcomers",
    )
    sampler: SamplerName | Literal["auto"] = Field(
        default="auto", description="auto: tpe if optuna is installed, else random"
    )
    halvings: Annotated[int, Field(ge=0, le=6)] = Field(
        default=2, description="how often only the best third of a batch is trained twice as long"
    )
    finalists: Annotated[int, Field(ge=1, le=100)] = Field(
        default=2, description="best trials of each method that are repeated"
    )
    repeats: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2, description="other seeds that they are repeated with"
    )
    ranges: dict[str, Any] = Field(
        default={}, description="settings to search, of every method that has them"
    )
    methods: dict[str, dict[str, Any]] = Field(
        default={}, description="settings to search, by method"
    )


class TunedTable(BaseModel):
    """``[tuned]``, written by ``nufed tune``: the search that chose the methods' settings.

    ``unit`` is the work of one full training by the cheapest method: gradients, and two for each
    Hessian-vector product. ``per``: whether ``budget`` counts these units, or trials.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    budget: float
    per: BudgetUnit = Field(default="gradient", exclude_if=lambda value: value == "gradient")
    unit: float
    seed: int
    sampler: SamplerName
    agents: ScoredAgents
    trials: dict[str, int]
    choices: dict[str, dict[str, Any]]

    @property
    def budget_text(self) -> str:
        """What every method might spend, in words."""
        if self.per == "trial":
            return f"{self.budget:g} trials"
        return f"{self.budget:g} × {self.unit:,.0f} gradients"
