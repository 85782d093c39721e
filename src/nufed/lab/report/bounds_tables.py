"""The tables and notes of ``nufed bounds``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nufed.lab.report.page import note
from nufed.lab.report.tables import Table
from nufed.lab.runs.records import (
    BoundsRecord,
    CurvatureName,
    MeasuredErrors,
    MethodBounds,
    Promise,
)
from nufed.theory import GREEK

TERMS = {
    "initial_gap": "initial gap",
    "bias": "bias μ_F",
    "drift_dissimilarity": "drift, dissimilarity γ_F",
    "drift_noise": "drift, noise σ_F",
    "agent_sampling": "sampling of agents",
    "gradient_noise": "gradient noise",
}


def bounds_tables(bounds: BoundsRecord) -> list[tuple[str, Table]]:
    """Constants, bounds per ν, predicted against measured, and the theorem's terms."""
    tables = [("Constants", _constants(bounds))]
    if bounds.by_steps:
        title = f"Bounds by number of steps, with the α, D and τ of {bounds.by_steps_of}"
        tables.append((title, _by_steps(bounds)))
    measured = [(row, row.measured) for row in bounds.methods if row.measured]
    if measured:
        tables.append(("Predicted and measured, final model", _predicted(measured)))
    promised = [(row.method, row.promised) for row in bounds.methods if row.promised]
    if promised:
        tables.append(("Theorem 1, bound on the mean of E‖∇F(w_k)‖²", _theorem(promised)))
    return tables


def bounds_notes(bounds: BoundsRecord) -> list[str]:
    """Caveats for readers of the tables."""
    notes = [f"Not covered: {each.method}: {each.reason}." for each in bounds.not_covered]
    if bounds.stationarity:
        notes.append(note("lower_estimates"))
    if not bounds.smooth:
        notes.append(note("not_smooth"))
    if not bounds.uniform:
        notes.append("Theorem 1 assumes the uniform mean; this run aggregates updates otherwise.")
    promised = {row.method: row.promised for row in bounds.methods if row.promised}
    trivial = [
        name for name, bound in promised.items() if _number(bound.total) > _number(bound.trivial)
    ]
    if trivial:
        notes.append(
            f"For {', '.join(trivial)} the bound is above the trivial one, ‖∇F‖² ≤ (B·c^ν)²: "
            "for so few rounds the theorem is vacuous."
        )
    over = {name: bound for name, bound in promised.items() if not bound.admissible}
    if over:
        names = ", ".join(f"{name} ({_number(bound.meta_lr):.2g})" for name, bound in over.items())
        notes.append(
            f"meta_lr (β) is above the limit of Theorem 1, 1/(10τL_F), for {names}: the theorem "
            "does not apply there, and its terms are shown for the largest admissible β."
        )
    return notes


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _cell(value: float | None, digits: int = 3) -> str:
    return f"{_number(value):.{digits}g}"


def _constants(bounds: BoundsRecord) -> Table:
    rows = []
    for name, constant in bounds.constants.items():
        cells = ["none", "–", "–"]
        if constant is not None:
            counted = str(constant.samples or "given")
            cells = [_cell(constant.value), _cell(constant.spread, 2), counted]
        rows.append([f"{name} ({GREEK[name]})", *cells])
    return Table(["", "value", "spread", "measurements"], rows)


def _by_steps(bounds: BoundsRecord) -> Table:
    kinds: dict[CurvatureName, str] = {"first_order": "FO", "hessian_free": "HF", "exact": "exact"}
    headings = ["ν", "L_F", "largest β", "γ_F"]
    headings += [f"{letter} {short}" for letter in ("μ", "σ") for short in kinds.values()]
    rows = []
    for row in bounds.by_steps:
        numbers = [row.smoothness, row.largest_meta_lr, row.dissimilarity]
        numbers += [row.errors[kind].bias for kind in kinds]
        numbers += [row.errors[kind].error for kind in kinds]
        rows.append([str(row.steps), *map(_cell, numbers)])
    return Table(headings, rows)


def _predicted(methods: Sequence[tuple[MethodBounds, MeasuredErrors]]) -> Table:
    headings = ["", "ν", "μ_F ≤", "bias", "σ_F ≤", "error", "γ_F ≤", "dissimilarity"]
    rows = []
    for row, measured in methods:
        cells = [row.method, str(row.steps)]
        for key in ("bias", "error", "dissimilarity"):
            cells.append(_cell(getattr(row.promised, key)) if row.promised else "–")
            cells.append(_cell(getattr(measured, key)))
        rows.append(cells)
    return Table(headings, rows)


def _theorem(methods: Sequence[tuple[str, Promise]]) -> Table:
    promised = [bound for _, bound in methods]
    rows = [
        ["β of the run", *(_cell(bound.meta_lr, 2) for bound in promised)],
        ["largest admissible β", *(_cell(bound.largest_meta_lr, 2) for bound in promised)],
        *(
            [words, *(_cell(bound.terms[term]) for bound in promised)]
            for term, words in TERMS.items()
        ),
        ["total", *(_cell(bound.total) for bound in promised)],
    ]
    return Table(["", *(name for name, _ in methods)], rows)
