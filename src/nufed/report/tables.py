"""The tables of a run, as text: the terminal and the page show the same cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nufed.aggregate import Mean, TrimmedMean
from nufed.algorithms import GMeta
from nufed.metagrad import Exact, HessianFree
from nufed.runs import Estimate, Row, Run
from nufed.runs.results import BASELINES

LISTED = 100  # agents that are shown one by one


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; ``quiet`` rows (baselines) stand in the background."""

    headings: list[str]
    rows: list[list[str]]
    quiet: list[bool]


def number_format(run: Run) -> Callable[[float], str]:
    """Accuracies as percentages, other scores as they are."""
    if run.measure.name == "accuracy":
        return lambda value: f"{100 * value:.1f} %"
    return lambda value: f"{value:.3g}" if math.isfinite(value) else "diverged"


def label(run: Run, name: str, runs: Sequence[Run]) -> str:
    """The name of a method, with its run's name where several runs are shown."""
    return name if len(runs) == 1 else f"{run_name(run, runs)}: {name}"


def run_name(run: Run, runs: Sequence[Run]) -> str:
    """The name of a run's directory, or its number and name where several are called the same."""
    same = [other.path.name for other in runs].count(run.path.name) > 1
    return f"{runs.index(run) + 1} {run.path.name}" if same else run.path.name


def all_groups(runs: Sequence[Run]) -> list[str]:
    """The groups of agents that any of the runs has scores of."""
    return max((run.groups for run in runs if run.rows()), key=len, default=[])


def results_table(runs: Sequence[Run], group: str, *, narrow: bool = False) -> Table:
    """Methods and null baselines on the agents of one group, after the last round.

    ``narrow`` leaves out what can be read from other cells or is less asked for, so that it fits
    into a terminal.
    """
    chosen = any(run.step_sizes_chosen for run in runs)
    columns = [
        name
        for name in _COLUMNS
        if not (narrow and name in (_WIDE if chosen else _WIDEST))
        and (name not in _STEP_SIZES or chosen)
        and (name not in _BY_CLASS or all(run.measure.name == "accuracy" for run in runs))
    ]
    rows, quiet = [], []
    for run in runs:
        show = number_format(run)
        for row in run.rows():
            if row.group == group:
                cells = [_COLUMNS[name](row, show) for name in columns]
                rows.append([label(run, row.name, runs), *cells])
                quiet.append(row.kind == "baseline")
    return Table(["", *columns], rows, quiet)


def _signed(show: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: ("+" if value >= 0 else "−") + show(abs(value))


def _or_dash(value: float, show: Callable[[float], str]) -> str:
    return "–" if math.isnan(value) else show(value)


_COLUMNS: dict[str, Callable[[Row, Callable[[float], str]], str]] = {
    "before": lambda row, show: show(row.before.mean),
    "after": lambda row, show: show(row.after.mean),
    "± 95 %": lambda row, show: _half_width(row.after, show),
    "as trained": lambda row, show: show(row.as_trained.mean) if row.lr_scale else "–",
    "α": lambda row, show: _chosen_lr(row),
    "std": lambda row, show: show(row.std),
    "worst 10 %": lambda row, show: show(row.worst_tenth),
    "harmed": lambda row, show: f"{100 * row.harmed:.0f} %",
    "over majority": lambda row, show: _or_dash(row.above_majority.mean, _signed(show)),
    "balanced": lambda row, show: _or_dash(row.balanced.mean, show),
    "minority": lambda row, show: _or_dash(row.minority.mean, show),
}
_BY_CLASS = ("over majority", "balanced", "minority")
_STEP_SIZES = ("as trained", "α")
_WIDEST = ("std", "over majority")
_WIDE = (*_WIDEST, "balanced", "minority")


def _chosen_lr(row: Row) -> str:
    """The chosen step size, or the range over seeds; of learned ones what they are multiplied by.

    Of training alone it is that of training, since it is not fine-tuned.
    """
    values = [lr for lr in row.adapt_lr if lr is not None]
    times = "" if values else "×"
    shown = sorted(
        {f"{times}{value:.2g}": value for value in values or row.lr_scale}.items(),
        key=lambda item: item[1],
    )
    texts = [text for text, _ in shown]
    return texts[0] if len(texts) == 1 else f"{texts[0]}–{texts[-1]}" if texts else "–"


def _half_width(estimate: Estimate, show: Callable[[float], str]) -> str:
    return "–" if estimate.half_width is None else show(estimate.half_width)


def agents_table(run: Run) -> Table:
    """Every agent by itself, first seed: each method before and after fine-tuning."""
    show, seed = number_format(run), run.config.seeds[0]
    lines = [line for line in run.lines() if line.kind == "method" and seed in line.seeds]
    headings = ["", "training samples", "test samples"]
    rows: dict[int, list[str]] = {}
    for number, line in enumerate(lines):
        headings += [f"{line.label}: before", "after"]
        for s in line.seeds[seed].final[:LISTED]:
            about = [s.name if s.seen else f"{s.name}, unseen"]
            about += [f"{s.train_samples:,}", f"{s.test_samples:,}"]
            row = rows.setdefault(s.agent, about + ["–"] * 2 * len(lines))
            row[3 + 2 * number : 5 + 2 * number] = show(s.score[0]), show(s.score[line.steps])
    return Table(headings, [rows[agent] for agent in sorted(rows)], [False] * len(rows))


def costs_table(runs: Sequence[Run]) -> Table:
    """What training each method cost, and what evaluating it did, per seed."""
    headings = ["", "gradients", "HVPs", "MB up", "MB down", "gradients of evaluation", "seconds"]
    rows = []
    for run in runs:
        for name in run.methods:
            cost = run.costs(name)
            rows.append(
                [
                    label(run, name, runs),
                    f"{cost['gradients']:,.0f}",
                    f"{cost['hvps']:,.0f}",
                    f"{cost['bytes_up'] / 1e6:.2f}",
                    f"{cost['bytes_down'] / 1e6:.2f}",
                    f"{cost['evaluation_gradients']:,.0f}",
                    f"{cost['seconds']:.1f}",
                ]
            )
    return Table(headings, rows, [False] * len(rows))


def methods_table(runs: Sequence[Run]) -> Table:
    """The settings of every method, with the paper's letters."""
    headings = [
        "",
        "adapt_steps (ν)",
        "adapt_lr (α)",
        "meta_lr (β)",
        "local_steps (τ)",
        "batch_size (D)",
        "curvature",
        "aggregation",
    ]
    rows = []
    for run in runs:
        for name, algorithm in run.config.algorithms().items():
            cells = ["–"] * 7
            if isinstance(algorithm, GMeta):
                cells = [
                    str(algorithm.adapt_steps),
                    f"{algorithm.adapt_lr:g}" + ", then learned" * bool(algorithm.rates_lr),
                    f"{algorithm.meta_lr:g}",
                    str(algorithm.local_steps),
                    str(algorithm.batch_size),
                    _curvature(algorithm),
                    _aggregation(algorithm),
                ]
            rows.append([label(run, name, runs), *cells])
    return Table(headings, rows, [False] * len(rows))


def _aggregation(algorithm: GMeta) -> str:
    match algorithm.aggregation:
        case Mean(averaging):
            return "mean" if averaging == "uniform" else "mean by samples"
        case TrimmedMean(share):
            return f"mean without {share:.0%} at each end"
        case other:
            return {"ClippedMean": "clipped mean", "Median": "median"}[type(other).__name__]


def _curvature(algorithm: GMeta) -> str:
    """The curvature by its name in the configuration; without steps it plays no part."""
    if not algorithm.adapt_steps:
        return "–"
    if isinstance(algorithm.curvature, HessianFree):
        return f"hessian_free, fd_step (δ) {algorithm.curvature.fd_step}"
    return "exact" if isinstance(algorithm.curvature, Exact) else "first_order"


def settings_table(run: Run) -> Table:
    """The settings that all methods of a run share, with the paper's letters."""
    config = run.config
    cohort = max(1, round(config.participation * (run.agents - config.data.unseen_agents)))
    partition: str = config.data.partition
    if partition == "dirichlet":
        partition += f", dirichlet (α_d) = {config.data.dirichlet:g}, reuse {config.data.reuse}"
    rows = {
        "agents (N)": f"{run.agents}, of which {config.data.unseen_agents} unseen in training",
        "participation (r)": f"{config.participation:g}, a cohort of {cohort} agents a round",
        "rounds (K)": str(config.rounds),
        "data": f"{config.data.source}; {partition}",
        "parts": f"validation {config.data.validation:g}, test {config.data.test:g}, rest training",
        "model": f"{config.model.name} {config.model.args or ''}, {config.dtype}",
        "fine-tuning steps": _steps_shown(run),
        "step size of fine-tuning": "chosen on validation samples, one per method, seed and "
        "number of steps"
        if run.step_sizes_chosen
        else "as trained",
        "scored on": f"the agents' {config.eval_on} parts",
        "agents evaluated": "all" if config.eval_agents is None else _sampled(run),
        "engine": ", ".join(f"{method} {engine}" for method, engine in run.engines.items()),
        "seeds": ", ".join(map(str, config.seeds)),
        "split SHA-256": ", ".join(
            f"{s}: {x['sha256'][:12] or 'at the sites'}" for s, x in run.splits.items()
        ),
        "software": ", ".join(f"{k} {v}" for k, v in run.software.items()),
        **_privacy(run),
    }
    return Table(["", ""], [[k, v] for k, v in rows.items()], [False] * len(rows))


def _privacy(run: Run) -> dict[str, str]:
    """What sites did to their updates, and what that promises to whom."""
    about = run.privacy()
    if about is None:
        return {}
    told = {
        "privacy": f"every update clipped to length {about['clip']:g}, noise of {about['noise']:g} "
        f"times that on every number, delta (δ) {about['delta']:g}; {about['rounds']} rounds with "
        f"{about['cohort']} of {about['agents']} agents",
    }
    for name, what in (("released", "the released model"), ("server", "a site against the server")):
        budget, spent = about["budget"][name], about["epsilon"][name]
        most = "" if budget is None else f", budget {budget:g}"
        told[f"epsilon (ε) of {what}"] = f"{spent:.4g}{most}: for {about['holds_for'][name]}"
    return told


def headline(run: Run) -> str:
    """What was measured and what came out, in two sentences."""
    config, show = run.config, number_format(run)
    seen = [row for row in run.rows() if row.group == "seen"]
    if not seen:
        return (
            f"Trained for {config.rounds} rounds. Sites sent no scores, so that nothing says here "
            "how good the model is: each can test it on its own data."
        )
    best = next(row for row in seen if row.kind == "method")
    nulls = [row for row in seen if row.kind == "baseline"]
    text = (
        f"Personalised {config.eval_on} {run.measure.name} after {config.steps_shown} fine-tuning "
        f"steps{_unless_said(run)} on each agent's own training data"
        f"{', step sizes chosen on validation samples' * run.step_sizes_chosen}, last round "
        f"({config.rounds}), mean over {_sampled(run)} agents seen in training{_over_seeds(run)}. "
        f"Best method: {best.name}, {show(best.after.mean)}"
    )
    beside = ", ".join(f"{row.name} {show(row.after.mean)}" for row in nulls)
    return f"{text}; null baselines: {beside or 'none'}."


def _steps_shown(run: Run) -> str:
    own = {n: s for n in run.methods if (s := run.config.steps_of(n)) != [run.config.steps_shown]}
    others = "".join(f"; {name} {' and '.join(map(str, steps))}" for name, steps in own.items())
    return f"{run.config.steps_shown}{others}"


def _unless_said(run: Run) -> str:
    return " (or as many as its name says)" if ";" in _steps_shown(run) else ""


def _sampled(run: Run) -> str:
    """How many of the agents seen in training are evaluated."""
    seen = run.agents - run.config.data.unseen_agents
    asked = run.config.eval_agents
    return (
        f"the {seen}" if asked is None or asked >= seen else f"a fixed sample of {asked} of {seen}"
    )


def _over_seeds(run: Run) -> str:
    seeds = len(run.config.seeds)
    return f" and {seeds} seeds" if seeds > 1 else ", one seed"


def baseline_notes(run: Run) -> list[tuple[str, str]]:
    """What each null baseline of a run is."""
    return [(name, BASELINES[name]) for name in run.baselines]
