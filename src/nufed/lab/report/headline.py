"""What was found and what was measured, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nufed.lab.report.tables import difference_format, evaluated_agents, number_format, steps_shown
from nufed.lab.runs import Row, Run
from nufed.lab.runs.results import Paired

MAX_NAMED = 3  # methods in a sentence
SMALL = 0.2  # of the standard deviation over agents: differences within are practically equal
NULLS = {
    "local": "local training",
    "majority": "always predicting the agent's most frequent class",
    "untrained": "fine-tuning the untrained model",
}


def headline(run: Run) -> str:
    """What was found, of every group of agents, and what was measured."""
    if not run.rows():
        return measured(run)
    found = [finding(run, group) for group in run.groups if _methods(run, group)]
    return " ".join([*found, measured(run)])


def finding(run: Run, group: str = "seen") -> str:
    """Which method is best, or that none is, by paired differences.

    A method is the best only if it beats each of the others beyond noise, and beats a null baseline
    only if its paired difference excludes 0; the strongest null baseline is named. Methods whose
    difference is small beside the spread of agents, interval included, are practically equal.
    """
    methods = [row for row in _methods(run, group) if math.isfinite(row.personal.mean)]
    where = "" if group == "seen" else f"On agents {group} in training: "
    if not methods:
        return f"{where}{'no' if where else 'No'} method has finite scores."
    pairs = {(p.name, p.against): p for p in run.paired() if p.group == group}
    best = methods[0]
    others = [(row, pairs.get((row.name, best.name))) for row in methods[1:]]
    ties = [
        row
        for row, pair in others
        if pair is None or pair.verdict != "worse" or practically_equal(run, pair)
    ]
    equal = all(pair and practically_equal(run, pair) for row, pair in others if row in ties)
    nulls = [row for row in run.rows() if row.group == group and row.kind == "baseline"]
    null = next((row for row in nulls if math.isfinite(row.personal.mean)), None)
    if null is not None:
        beaten = {r.name: p for r in methods if (p := pairs.get((r.name, null.name)))}
        if best.name in beaten and all(pair.verdict != "better" for pair in beaten.values()):
            return where + _capital(_none_beats(run, best, null, list(beaten.values())), where)
    text = _top(run, methods, ties, "are practically equal" if equal else "can't be told apart")
    text = _capital(text, where) if text.startswith("the ") else text
    if null is not None:
        text += _over(run, null, [best, *ties], beaten)
    elif others and not ties and (pair := others[0][1]):
        text += f", {_by(run, pair, reverse=True)} over {pair.name}"
    return f"{where}{text}."


def practically_equal(run: Run, pair: Paired) -> bool:
    """Whether a paired difference and its interval are small beside the spread of agents' scores:
    within a fifth of their standard deviation."""
    spread = [r.std for r in run.rows() if (r.name, r.group) == (pair.name, pair.group)]
    return pair.half_width is not None and abs(pair.mean) + pair.half_width <= SMALL * spread[0]


def _none_beats(run: Run, best: Row, null: Row, pairs: Sequence[Paired]) -> str:
    show, name = number_format(run), NULLS[null.name]
    first = pairs[0]
    scores = f"{best.name} {_score(run, best)}, {null.name} {show(null.personal.mean)}"
    if first.half_width is None:
        by = f", paired difference {_by(run, first)}" * (first.over_samples is not None)
        return f"too few agents and seeds to tell whether a method beats {name}: {scores}{by}."
    many = len(pairs) > 1
    if all(pair.verdict == "worse" for pair in pairs):
        text = f"{name} beats {'every method' if many else best.name}"
    else:
        text = f"{'no method beats' if many else f'{best.name} does not beat'} {name} beyond noise"
    return f"{text}: {scores}, paired difference {_by(run, first)} ({_over_what(run, first)})."


def _score(run: Run, *rows: Row) -> str:
    """A score, or the range from the first to the last, with the name of the measure."""
    shown = [number_format(run)(row.personal.mean) for row in (rows[0], rows[-1])]
    span, name = " to ".join(dict.fromkeys(shown)), run.measure.name
    return f"{span} {name}" if name == "accuracy" else f"{name} {span}"


def _top(run: Run, methods: Sequence[Row], ties: Sequence[Row], alike: str) -> str:
    """The best method, or those that are ``alike``: it can't be told apart from them."""
    best = methods[0]
    if not ties:
        what = "is the best method at" if len(methods) > 1 else "reaches"
        return f"{best.name} {what} {_score(run, best)}"
    names = [row.name for row in (best, *ties)]
    span = _score(run, best, *ties)
    if len(names) == len(methods) and len(names) > 2:
        return f"the {len(names)} methods {alike} ({span})"
    if len(names) > MAX_NAMED:
        return f"{best.name} and {len(names) - 1} others {alike} ({span})"
    return f"{_listed(names)} {alike} ({span})"


def _over(run: Run, null: Row, top: Sequence[Row], pairs: dict[str, Paired]) -> str:
    """Whether those at the top beat the strongest null baseline, and by how much."""
    winners = [row for row in top if row.name in pairs and pairs[row.name].verdict == "better"]
    name = f"{NULLS[null.name]} ({number_format(run)(null.personal.mean)})"
    if not winners:
        return f", but not beyond noise above {name}"
    pair = pairs[winners[0].name]
    by = f"{_by(run, pair)} ({_over_what(run, pair)})"
    if len(top) == 1:
        return f", {by} over {name}"
    if len(winners) == len(top):
        return f"; all beat {name}, {winners[0].name} by {by}"
    some = _listed([row.name for row in winners[:MAX_NAMED]])
    return f"; {some} beat{'s' * (len(winners) == 1)} {name}, {winners[0].name} by {by}"


def _by(run: Run, pair: Paired, *, reverse: bool = False) -> str:
    """A difference with its interval, such as “+1.5 ± 0.4 points”."""
    unit = " points" if run.measure.name == "accuracy" else ""
    return difference_format(run)(replace(pair, mean=-pair.mean) if reverse else pair) + unit


def _over_what(run: Run, pair: Paired) -> str:
    samples = " / over these agents' samples" if pair.over_samples is not None else ""
    equal = "; practically equal" * practically_equal(run, pair)
    return f"95 %, over {pair.over}{samples}{equal}"


def _capital(text: str, before: str) -> str:
    return text if before else text[0].upper() + text[1:]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _methods(run: Run, group: str) -> list[Row]:
    return [row for row in run.rows() if row.group == group and row.kind == "method"]


def measured(run: Run) -> str:
    """What the scores are: of which models, after how many steps, on which agents; what was tuned,
    and the cost of training."""
    config = run.config
    if not run.rows():
        return (
            f"Trained for {config.rounds} rounds. Sites sent no scores, so the model is not "
            "evaluated here: each site can test it on its own data."
        )
    steps = steps_shown(run)
    plural = "s" * (config.steps_shown != 1)
    named = " (or the number in its name)" if ";" in steps else ""
    seeds = len(config.seeds)
    return (
        f"{config.eval_on.capitalize()} {run.measure.name} of agents' personal models after "
        f"{config.steps_shown} fine-tuning step{plural}{named} on their own training data, "
        f"{run.shown_round}, mean over {evaluated_agents(run)} seen in training"
        f"{f' and {seeds} seeds' if seeds > 1 else ', one seed'}. {_tuned(run)} {_cost(run)}"
    )


def _tuned(run: Run) -> str:
    """What was tuned, and how."""
    tuned, found = run.config.tuned, []
    if tuned is not None:
        budget = f"{tuned.budget:g} × {tuned.unit:,.0f} gradients"
        found.append(f"settings of {_listed(list(tuned.choices))}, each with a budget of {budget}")
    if run.step_sizes_chosen:
        found.append("step sizes of fine-tuning, on validation samples")
    rest = (
        "" if tuned else "; other settings are as configured" if found else ", all is as configured"
    )
    return f"Tuned: {'; '.join(found) or 'nothing'}{rest}."


def _cost(run: Run) -> str:
    """The range of the methods' cost of training; a Hessian-vector product is two gradients."""
    costs = [run.costs(name) for name in run.methods]
    work = sorted(cost["gradients"] + 2 * cost["hvps"] for cost in costs)
    seconds = sorted(cost["seconds"] for cost in costs)
    gradients = " to ".join(dict.fromkeys(f"{own:,.0f}" for own in (work[0], work[-1])))
    times = " to ".join(dict.fromkeys(f"{own:.1f}" for own in (seconds[0], seconds[-1])))
    which = "method and seed" if len(costs) > 1 else "seed"
    return f"Cost per {which}: {gradients} gradients, {times} seconds."
