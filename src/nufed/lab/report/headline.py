"""What was found and what was measured, in sentences."""

from __future__ import annotations

from dataclasses import replace

from nufed.lab.analysis.comparison import Finding, find_best, gain_of_steps, practically_equal
from nufed.lab.report.tables import (
    difference_format,
    evaluated_agents,
    listed,
    number_format,
    steps_shown,
)
from nufed.lab.runs import Row, Run
from nufed.lab.runs.results import Estimate, Paired

MAX_NAMED = 3  # methods in a sentence
NULLS = {
    "local": "local training",
    "majority": "always predicting the agent's most frequent class",
    "centroid": "the nearest class mean",
    "untrained": "fine-tuning the untrained model",
}


def headline(run: Run) -> str:
    """What was found, of every group of agents, and what was measured."""
    if not run.rows():
        return measured(run)
    trained = {row.group for row in run.rows() if row.kind == "method"}
    scored = [finding(run, g) for g in run.groups if g in trained]
    return " ".join([*scored, *gains_and_costs(run), measured(run)])


def gains_and_costs(run: Run) -> list[str]:
    """Two sentences where methods differ in ν: what a larger one gains per round, and its cost."""
    gain = gain_of_steps(run)
    if gain is None:
        return []
    many, one = gain.many, gain.one
    return [
        f"Per round, with the step sizes of training, the mean {run.measure.name} of {many} minus "
        f"that of {one} is {_change(run, gain.per_round)} after {gain.rounds} rounds, on agents "
        f"{gain.group} in training.",
        f"It costs {gain.work:.3g} times the gradients: at equal gradients ({gain.equal_round} "
        f"rounds of {many}), {_change(run, gain.per_gradient)}.",
    ]


def _change(run: Run, change: Estimate) -> str:
    """A difference with its interval over seeds."""
    percent = run.measure.name == "accuracy"
    factor, unit = (100, " points") if percent else (1, "")
    digits = ".1f" if percent else ".3g"
    sign = "+" if change.mean > 0 else "−"
    text = f"{sign}{abs(factor * change.mean):{digits}}"
    if change.half_width is not None:
        text += f" ± {factor * change.half_width:{digits}}"
    return text + unit


def finding(run: Run, group: str = "seen") -> str:
    """Which method is best, or that none is, and whether it beats the strongest null baseline."""
    where = "" if group == "seen" else f"On agents {group} in training: "
    result = find_best(run, group)
    if result is None:
        return f"{where}{'no' if where else 'No'} method has finite scores."
    if result.null is not None and result.none_beats_null:
        return where + _none_beats(run, result, result.null, where)
    text = _top(run, result, where)
    if result.null is not None:
        text += _over(run, result, result.null)
    elif result.behind is not None and not result.ties:
        text += f", {_by(run, result.behind, reverse=True)} over {result.behind.name}"
    return f"{where}{text}."


def _none_beats(run: Run, result: Finding, null: Row, where: str) -> str:
    show, name, best = number_format(run), NULLS[null.name], result.best
    pairs = list(result.over_null.values())
    first = pairs[0]
    scores = f"{best.name} {_score(run, best)}, {null.name} {show(null.personal.mean)}"
    if first.half_width is None:
        by = f", paired difference {_by(run, first)}" * (first.over_samples is not None)
        few = _capital("too few agents and seeds to tell", where)
        return f"{few} whether a method beats {name}: {scores}{by}."
    many = len(pairs) > 1
    if all(pair.verdict == "worse" for pair in pairs):
        text = f"{_capital(name, where)} beats {'every method' if many else best.name}"
    else:
        none = _capital("no method beats", where) if many else f"{best.name} does not beat"
        text = f"{none} {name} beyond noise"
    return f"{text}: {scores}, paired difference {_by(run, first)} ({_over_what(run, first)})."


def _score(run: Run, *rows: Row) -> str:
    """A score, or the range from the first to the last, with the name of the measure."""
    shown = [number_format(run)(row.personal.mean) for row in (rows[0], rows[-1])]
    span, name = " to ".join(dict.fromkeys(shown)), run.measure.words
    return f"{span} {name}" if name == "accuracy" else f"{name} {span}"


def _top(run: Run, result: Finding, where: str) -> str:
    """The best method, or those that can't be told apart from it."""
    best, ties = result.best, result.ties
    if not ties:
        what = "is the best method at" if len(result.methods) > 1 else "reaches"
        return f"{best.name} {what} {_score(run, best)}"
    alike = "are practically equal" if result.equal else "can't be told apart"
    names = [row.name for row in (best, *ties)]
    span = _score(run, best, *ties)
    if len(names) == len(result.methods) and len(names) > 2:
        return f"{_capital('the', where)} {len(names)} methods {alike} ({span})"
    if len(names) > MAX_NAMED:
        return f"{best.name} and {len(names) - 1} others {alike} ({span})"
    return f"{listed(names)} {alike} ({span})"


def _over(run: Run, result: Finding, null: Row) -> str:
    """Whether those at the top beat the strongest null baseline, and by how much."""
    top, pairs = [result.best, *result.ties], result.over_null
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
    some = listed([row.name for row in winners[:MAX_NAMED]])
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
    """Capitalised, unless something is before it; names of methods stay as they are."""
    return text if before else text[0].upper() + text[1:]


def measured(run: Run) -> str:
    """What the scores are: of which models, after how many steps, on which agents; what was tuned,
    and the cost of training."""
    config = run.config
    if not run.rows():
        return (
            f"Trained for {run.rounds_text} rounds. Sites sent no scores, so the model is not "
            "evaluated here: each site can test it on its own data."
        )
    steps = steps_shown(run)
    plural = "s" * (config.steps_shown != 1)
    named = " (or the number in its name)" if ";" in steps else ""
    seeds = len(config.seeds)
    return (
        f"{config.eval_on.capitalize()} {run.measure.words} of agents' personal models after "
        f"{config.steps_shown} fine-tuning step{plural}{named} on their own training data, "
        f"{run.shown_round}, mean over {evaluated_agents(run)} seen in training"
        f"{f' and {seeds} seeds' if seeds > 1 else ', one seed'}. {_tuned(run)} {_cost(run)}"
    )


def _tuned(run: Run) -> str:
    """What was tuned, and how."""
    tuned, parts = run.config.tuned, []
    if tuned is not None:
        methods = listed(list(tuned.choices))
        parts.append(f"settings of {methods}, each with a budget of {tuned.budget_text}")
    if run.step_sizes_chosen:
        parts.append("step sizes of fine-tuning, on validation samples")
    rest = (
        "" if tuned else "; other settings are as configured" if parts else ", all is as configured"
    )
    return f"Tuned: {'; '.join(parts) or 'nothing'}{rest}."


def _cost(run: Run) -> str:
    """The range of the methods' cost of training; a Hessian-vector product is two gradients."""
    costs = [run.costs(name) for name in run.methods]
    work = sorted(cost["gradients"] + 2 * cost["hvps"] for cost in costs)
    seconds = sorted(cost["seconds"] for cost in costs)
    gradients = " to ".join(dict.fromkeys(f"{x:,.0f}" for x in (work[0], work[-1])))
    times = " to ".join(dict.fromkeys(f"{x:.1f}" for x in (seconds[0], seconds[-1])))
    which = "method and seed" if len(costs) > 1 else "seed"
    return f"Cost per {which}: {gradients} gradients, {times} seconds."
