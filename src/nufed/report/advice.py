"""What ``nufed advise`` found, as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nufed.report.tables import Table

AS_GOOD = 0.01  # of accuracy: closer to the majority class than this is no gain to speak of


def advice_notes(advice: Mapping[str, Any]) -> Iterator[str]:
    """The recommendation and what speaks against it, sentence by sentence."""
    best, curve = advice["recommended"], recommended_curve(advice)
    point, before = curve["points"][best["steps"]], curve["points"][0]
    steps = f"{best['steps']} fine-tuning step{'s' * (best['steps'] != 1)} (ν)"
    yield (
        f"Recommended: {best['method']}, {steps} of size {best['lr']:.3g} (α), "
        + (
            f"for agents with {best['samples']} samples or more."
            if best["samples"] is not None
            else "but with no amount of data that was tried did adapting gain beyond noise."
        )
    )
    yield (
        f"Measured on {advice['agents']} agents ({advice['scored']}; no test data): "
        f"{_score(advice, before['mean'])} before, {_score(advice, point['mean'])} after, "
        f"{point['harmed']:.0%} of them harmed. It is the cheapest choice within a standard error "
        "of the best, and was chosen on these very agents: expect a little less."
    )
    automatic = advice["auto"][best["method"]]
    yield (
        "steps=auto, where each agent chooses by itself, reaches "
        f"{_score(advice, automatic['mean'])} with {automatic['steps']:.1f} steps on average "
        f"(α of the bundle): {_beside(advice, automatic['default'])}, and "
        f"{_beside(advice, automatic['best'])}, the best number for all."
    )
    majority = advice["majority"]
    if majority is not None and majority >= point["mean"] - AS_GOOD:
        yield (
            f"Warning: always answering an agent's most frequent class gets {majority:.1%} right. "
            "This federation does not need a model for that."
        )
    if "agents seen" in advice["scored"] and "training parts" in advice["scored"]:
        yield (
            "Warning: training has seen these samples, so that all scores are too good; hold out "
            "agents (data.unseen_agents) or samples (data.validation) for better advice."
        )


def advice_tables(advice: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Steps of the recommended choice, step sizes and methods, and amounts of data."""
    best, curve = advice["recommended"], recommended_curve(advice)
    rows = [
        [
            str(point["steps"]) + ("  ←" if point["steps"] == best["steps"] else ""),
            _score(advice, point["mean"]),
            _interval(advice, point["interval"]),
            _score(advice, point["low"]),
            _score(advice, point["high"]),
            f"{point['harmed']:.0%}",
            str(point["samples"]),
        ]
        for point in curve["points"]
    ]
    titles = ["steps (ν)", "mean", "± 95 %", "10 %", "90 %", "harmed", "samples read"]
    title = f"{best['method']}, α = {best['lr']:.3g}, by steps; spread over agents; cost"
    yield title, _table(titles, rows)
    rows = []
    for name in advice["auto"]:
        curves = [c for c in advice["curves"] if c["method"] == name]
        tops = [max(c["points"], key=lambda p: float(p["mean"])) for c in curves]
        cells = [f"{_score(advice, top['mean'])} @{top['steps']}" for top in tops]
        cost = advice["training"][name]
        rows.append([name, *cells, f"{cost['gradients'] + cost['hvps']:,.0f}"])
    tried = [f"α × {c['times']:.3g}" for c in advice["curves"] if c["method"] == name]
    yield (
        "best mean @ its steps, by step size; gradients and products that training took",
        _table(["method", *tried, "training"], rows),
    )
    rows = [
        [
            str(row["samples"]),
            str(row["agents"]),
            _score(advice, row["before"]),
            _score(advice, row["after"]),
            _difference(advice, row["gain"]),
            _interval(advice, row["interval"]),
        ]
        for row in advice["amounts"]
    ]
    titles = ["samples", "agents", "before", "after", "gain", "± 95 %"]
    yield "the recommended choice with so many samples", _table(titles, rows)


def recommended_curve(advice: Mapping[str, Any]) -> Mapping[str, Any]:
    best = advice["recommended"]
    return next(
        curve
        for curve in advice["curves"]
        if (curve["method"], curve["times"]) == (best["method"], best["times"])
    )


def _table(headings: list[str], rows: list[list[str]]) -> Table:
    return Table(headings, rows, [False] * len(rows))


def _score(advice: Mapping[str, Any], value: float) -> str:
    return f"{value:.1%}" if advice["measure"] == "accuracy" else f"{-value:.4g}"


def _difference(advice: Mapping[str, Any], value: float) -> str:
    return f"{100 * value:+.1f}" if advice["measure"] == "accuracy" else f"{-value:+.3g}"


def _beside(advice: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How much better than a fixed number of steps."""
    spread = _interval(advice, other["interval"])
    difference = _difference(advice, other["difference"]) + (f" ± {spread}" if spread else "")
    return f"{difference} against {other['steps']} for everyone"


def _interval(advice: Mapping[str, Any], value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" if advice["measure"] == "accuracy" else f"{value:.2g}"
