"""The results of ``nufed bounds`` and ``nufed advise`` as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nufed.lab.analysis.advise import Advice, Against
from nufed.lab.report.page import note
from nufed.lab.report.tables import Table
from nufed.lab.runs.json_files import or_nan
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
        name for name, bound in promised.items() if or_nan(bound.total) > or_nan(bound.trivial)
    ]
    if trivial:
        notes.append(
            f"For {', '.join(trivial)} the bound is above the trivial one, ‖∇F‖² ≤ (B·c^ν)²: "
            "for so few rounds the theorem is vacuous."
        )
    over = {name: bound for name, bound in promised.items() if not bound.admissible}
    if over:
        names = ", ".join(f"{name} ({or_nan(bound.meta_lr):.2g})" for name, bound in over.items())
        notes.append(
            f"meta_lr (β) is above the limit of Theorem 1, 1/(10τL_F), for {names}: the theorem "
            "does not apply there, and its terms are shown for the largest admissible β."
        )
    return notes


def _cell(value: float | None, digits: int = 3) -> str:
    return f"{or_nan(value):.{digits}g}"


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


MIN_GAIN = 0.01  # of accuracy over the majority class, below which a model is not worthwhile


def advice_notes(advice: Advice) -> Iterator[str]:
    """The recommendation and its caveats, sentence by sentence."""
    best, curve = advice.recommended, advice.recommended_curve
    point, shared = curve.points[best.steps], curve.points[0]
    steps = f"{best.steps} fine-tuning step{'s' * (best.steps != 1)} (ν)"
    yield (
        f"Recommended: {best.method}, {steps} of size {best.lr:.3g} (α), "
        + (
            f"for agents with {best.samples} samples or more."
            if best.samples is not None
            else "but adapting gave no significant gain for any amount of data tried."
        )
    )
    yield (
        f"Measured on {advice.agents} agents ({advice.scored_on}; no test data): "
        f"{_score(advice, shared.mean)} with the global model, {_score(advice, point.mean)} after "
        f"fine-tuning, {point.harmed:.0%} of them harmed (worse than with the global model). "
        f"{note('recommendation')}"
    )
    automatic = advice.auto[best.method]
    yield (
        "steps=auto, where each agent chooses its own number, reaches "
        f"{_score(advice, automatic.mean)} with {automatic.steps:.1f} steps on average "
        f"(α of the bundle): {_against(advice, automatic.default)}, and "
        f"{_against(advice, automatic.best)}, the best fixed number."
    )
    majority = advice.majority
    if majority is not None and majority >= point.mean - MIN_GAIN:
        yield (
            f"Warning: always predicting an agent's most frequent class reaches {majority:.1%}. "
            "This federation needs no model for that."
        )
    for each in advice.left_out:
        yield f"Left out: {each.reason}."
    if advice.optimistic:
        yield note("trained_on")


def advice_tables(advice: Advice) -> Iterator[tuple[str, Table]]:
    """Steps of the recommended choice, step sizes and methods, and amounts of data."""
    best, curve = advice.recommended, advice.recommended_curve
    rows = [
        [
            str(point.steps) + ("  ←" if point.steps == best.steps else ""),
            _score(advice, point.mean),
            _half_width(advice, point.interval),
            _score(advice, point.low),
            _score(advice, point.high),
            f"{point.harmed:.0%}",
            str(point.samples),
        ]
        for point in curve.points
    ]
    titles = ["steps (ν)", "mean", "± 95 %", "10 %", "90 %", "harmed", "samples read"]
    title = f"{best.method}, α = {best.lr:.3g}, by steps; spread over agents; cost"
    yield title, Table(titles, rows)
    rows = []
    for name in advice.auto:
        curves = [c for c in advice.curves if c.method == name]
        tops = [max(c.points, key=lambda p: p.mean) for c in curves]
        cells = [f"{_score(advice, top.mean)} @{top.steps}" for top in tops]
        cost = advice.training[name]
        rows.append([name, *cells, f"{cost['gradients'] + cost['hvps']:,.0f}"])
    tried = [f"α × {c.times:.3g}" for c in advice.curves if c.method == name]
    yield (
        "best mean @ its steps, by step size; gradients and HVPs of training",
        Table(["method", *tried, "training"], rows),
    )
    rows = [
        [
            str(row.samples),
            str(row.agents),
            _score(advice, row.shared),
            _score(advice, row.personal),
            _difference(advice, row.gain),
            _half_width(advice, row.interval),
        ]
        for row in advice.amounts
    ]
    titles = ["samples", "agents", "global", "personal", "gain", "± 95 %"]
    yield "the recommended choice by number of samples", Table(titles, rows)


def _score(advice: Advice, value: float) -> str:
    return f"{value:.1%}" if advice.accuracy else f"{-value:.4g}"


def _difference(advice: Advice, value: float) -> str:
    return f"{100 * value:+.1f}" if advice.accuracy else f"{-value:+.3g}"


def _against(advice: Advice, other: Against) -> str:
    """The difference to a fixed number of steps."""
    spread = _half_width(advice, other.interval)
    difference = _difference(advice, other.difference) + (f" ± {spread}" if spread else "")
    return f"{difference} against {other.steps} for everyone"


def _half_width(advice: Advice, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" if advice.accuracy else f"{value:.2g}"
