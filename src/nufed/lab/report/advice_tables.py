"""The results of ``nufed advise`` as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator

from nufed.lab.analysis.advise import Advice, Against
from nufed.lab.report.page import note
from nufed.lab.report.tables import Table

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
            _interval(advice, point.interval),
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
            _interval(advice, row.interval),
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
    spread = _interval(advice, other.interval)
    difference = _difference(advice, other.difference) + (f" ± {spread}" if spread else "")
    return f"{difference} against {other.steps} for everyone"


def _interval(advice: Advice, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" if advice.accuracy else f"{value:.2g}"
