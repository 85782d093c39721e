"""What ``nufed tune`` found: its headline and tables, for the terminal, too, and its page."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup

from nufed.errors import visible
from nufed.lab.analysis.tuning_findings import (
    Edge,
    Lost,
    better_with_other_seeds,
    edges,
    leads,
    repeated,
    sensitivities,
    too_few_trials,
)
from nufed.lab.report.page import Block, Charts, Folded, Page, Section, Text, Warned, note
from nufed.lab.report.tables import Table, listed, setting_text, settings_text
from nufed.lab.runs.tuning_record import SearchRecord, TuningRecord

PAGE = "tune.html"


def build_tune_page(record: TuningRecord, out: Path, *, figures: bool = True) -> Path:
    """Write ``tune.html`` and, with ``figures``, its charts as SVG and PNG files into ``out``."""
    return _tune_page(record).save(out, "nufed tune --resume", PAGE, figures=figures)


def score_format(record: TuningRecord) -> Callable[[float | None], str]:
    """Formats accuracies as percentages, other scores as numbers."""
    percent = record.search.measure == "accuracy"

    def text(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "failed"
        return f"{100 * value:.1f} %" if percent else f"{value:.3g}"

    return text


def tune_headline(record: TuningRecord) -> str:
    """One sentence: which method is best on validation samples after tuning."""
    search, score = record.search, score_format(record)
    rows = [row for row in repeated(record) if row.chosen]
    if not rows:
        return "No trial could be trained."
    names = [row.trial.method for row in rows]
    first = rows[0]
    best = f"{score(first.mean)} with other seeds" if first.mean is not None else score(first.score)
    words = f"{names[0]} is best after tuning: validation {search.measure} {best}"
    others = f", ahead of {', '.join(names[1:])}" if names[1:] else ""
    return (
        f"{words} on {search.agents} agents{others}; every method had the same budget, "
        f"{search.budget_text}."
    )


def ranking_notes(record: TuningRecord) -> list[str]:
    """How certain the order of the methods is."""
    rows = [row for row in repeated(record) if row.chosen]
    seeds = record.search.repeat_seeds
    if len(rows) < 2:
        return []
    if not seeds:
        return ["The ranking is of one seed, and not certain: tune.repeats is 0."]
    failed = [row.trial.method for row in rows if row.mean is None]
    if failed:
        return [f"The choice of {', '.join(failed)} failed with another seed: it is not reliable."]
    order, compared = ", ".join(row.trial.method for row in rows), leads(rows, record)
    first = f"The order {order} is not certain: it differs between seeds."
    if all(lead.wins == lead.seeds for lead in compared):
        others = "the other seed" if len(seeds) == 1 else f"all {len(seeds)} other seeds"
        first = f"The order {order} is the same with {others}"
        first += "; few seeds can't rule out chance." if len(seeds) < 5 else "."
    return [
        first,
        *(
            f"{lead.method} is better than {lead.behind} by {lead.difference:.3g} on average, and "
            f"with {lead.wins} of {lead.seeds} other seeds (same splits for both)."
            for lead in compared
        ),
    ]


def doubts(record: TuningRecord) -> list[str]:
    """Finalists that did better than the choice with other seeds, and methods without a choice or
    with too few trials."""
    notes = [
        f"{row.trial.method}: trial {row.trial.number} did better with other seeds than the chosen "
        f"one (trial {choice.trial.number}): they are about equally good."
        for row, choice in better_with_other_seeds(record)
    ]
    for method in record.search.methods:
        if method not in record.chosen:
            failures = [trial.failure for trial in record.of(method) if trial.failure]
            cause = failures[0] if failures else "no trial was trained"
            notes.append(f"{method}: every trial failed, the first because {cause}")
    per_trial = "" if record.search.per == "trial" else ", or count it --per trial"
    for each in too_few_trials(record):
        what = "1 setting" if each.settings == 1 else f"{each.settings} settings together"
        notes.append(
            f"{each.method}: {each.trials} trials, {each.full} of them trained to the end, are too "
            f"few for a conclusion about {what}: increase --budget{per_trial}."
        )
    return notes


def edge_text(edge: Edge) -> str:
    """That a choice lies at the edge of its range."""
    return (
        f"{edge.method}: {edge.setting} = {edge.value:g} lies at the {edge.side} edge of its "
        f"range, {edge.range}: a better value may lie beyond"
    )


def choices_table(record: TuningRecord) -> Table:
    """The chosen settings of each method, best method first."""
    score = score_format(record)
    headings = ["", "settings", "score", "other seeds", "trials", "spent", "of budget"]
    rows = []
    for row in (each for each in repeated(record) if each.chosen):
        method = row.trial.method
        spent = record.spent(method)
        rows.append(
            [
                method,
                settings_text(row.trial.settings),
                score(row.score),
                score(row.mean) if row.scores else "–",
                str(len(record.of(method))),
                f"{spent:,}",
                f"{record.used(method):.0%}",
            ]
        )
    for method in record.search.methods:
        if method not in record.chosen:
            spent = record.spent(method)
            share = f"{record.used(method):.0%}"
            cells = ["every trial failed", "–", "–", str(len(record.of(method)))]
            rows.append([method, *cells, f"{spent:,}", share])
    return Table(headings, rows)


def sensitivity_table(record: TuningRecord) -> Table:
    """The score lost by a factor of 3 in each setting."""
    headings = ["", "setting", "chosen", "÷ 3 loses", "× 3 loses"]
    score = score_format(record)

    def cell(lost: Lost | None) -> str:
        if lost is None:
            return "not tried"
        if lost.score is None:
            return "failed"
        after = f" after {lost.rounds} rounds" if lost.rounds != record.search.rungs[-1] else ""
        return f"{score(lost.score)}{after}"

    rows = [
        [
            each.method,
            each.setting,
            setting_text(each.value),
            cell(each.smaller),
            cell(each.larger),
        ]
        for each in sensitivities(record)
    ]
    return Table(headings, rows)


def certainty_table(record: TuningRecord) -> Table:
    """The finalists: their score in the search and with other seeds."""
    score, seeds = score_format(record), record.search.repeat_seeds
    headings = ["", "trial", "settings", "in the search", "mean of others"]
    finals = repeated(record)
    rows = [
        [
            row.trial.method,
            str(row.trial.number),
            settings_text(row.trial.settings),
            score(row.score),
            score(row.mean) if row.scores else "–",
            *([score(each) for each in row.scores] or ["–"] * len(seeds)),
        ]
        for row in finals
    ]
    quiet = [number for number, row in enumerate(finals) if not row.chosen]
    return Table([*headings, *(f"seed {seed}" for seed in seeds)], rows, quiet)


def work_table(record: TuningRecord) -> Table:
    """The work of the search, its evaluations and the repeats, in gradients."""
    headings = ["", "one full training", "search", "evaluation", "repeats", "failed trials"]
    rows = []
    for method, searched in record.search.methods.items():
        trials = record.of(method)
        again = [trial for trial in record.repeats if trial.method == method]
        evaluated = sum(rung.evaluation_work for trial in trials for rung in trial.rungs)
        rows.append(
            [
                method,
                f"{searched.work:,.0f}",
                f"{record.spent(method):,}",
                f"{evaluated:,}",
                f"{sum(trial.last.work for trial in again):,}",
                str(sum(trial.failure is not None for trial in trials)),
            ]
        )
    return Table(headings, rows)


def trials_table(record: TuningRecord) -> Table:
    """Every trial: its settings and its score after each rung, or why it failed."""
    score, rungs = score_format(record), record.search.rungs
    headings = ["", "method", "settings", *(f"after {rounds}" for rounds in rungs), "cause"]
    chosen = set(record.chosen.values())
    rows = []
    for trial in record.trials:
        by_rung = {rung.rounds: rung for rung in trial.rungs}
        cells = [score(by_rung[k].score) if k in by_rung else "" for k in rungs]
        mark = "chosen" if trial.number in chosen else trial.failure or ""
        settings = settings_text(trial.settings)
        rows.append([str(trial.number), trial.method, settings, *cells, mark])
    quiet = [n for n, trial in enumerate(record.trials) if trial.number not in chosen]
    return Table(headings, rows, quiet)


def search_table(record: TuningRecord) -> Table:
    """What was searched, and how."""
    search = record.search
    rows = {
        "command": search.command,
        "budget of each method": search.budget_text
        if search.per == "trial"
        else f"{search.budget_text} of training; a Hessian-vector product counts two; the unit is "
        "a full training by the cheapest method",
        "sampler": f"{search.sampler}, seed {search.seed}; the settings as configured are tried "
        "first",
        "halving": f"batches of trials are compared after {listed(search.rungs)} rounds"
        f"{_own_rounds(search)}; the best third is trained further"
        + (", scored before the last with the α of training" if search.format > 1 else ""),
        "scored on": f"validation samples of {search.agents} agents; test samples are never read",
    }
    for method, searched in search.methods.items():
        words = [
            f"{r.setting} {r}{' (log)' * r.log}, {r.origin}"
            + ("" if r == first else f" {first}, and grown while the best was at its end")
            for r, first in zip(record.ranges(method), searched.ranges, strict=True)
        ]
        rows[f"ranges of {method}"] = "; ".join([*words, *searched.notes]) or "nothing is searched"
    rows["software"] = ", ".join(f"{name} {version}" for name, version in search.software.items())
    return Table(["", ""], [[k, v] for k, v in rows.items()], prose=True)


def _own_rounds(search: SearchRecord) -> str:
    """What is counted for methods with rounds of their own."""
    tables = search.config.get("methods", {}).items()
    own = {name: table["rounds"] for name, table in tables if table.get("rounds")}
    if not own:
        return ""
    words = ", ".join(f"{name} (of {rounds})" for name, rounds in own.items())
    return f", and after the same shares of their own rounds {words}"


def _tune_page(record: TuningRecord) -> Page:
    from nufed.lab.report.charts import tune_charts  # altair is slow to import

    charts, trials = list(tune_charts(record)), trials_table(record)
    widen = Markup("{}. Widen it with<br><code>{}</code>")
    at_edge = [
        widen.format(visible(edge_text(edge)), visible(edge.command)) for edge in edges(record)
    ]
    doubtful = doubts(record)
    no_edge = "" if at_edge or doubtful else "No choice lies at the edge of its range."
    ranking: list[Block] = [Text(line) for line in ranking_notes(record)]
    return Page(
        f"{record.search.config['name']}, tuned",
        [Text(tune_headline(record))],
        [
            Section("", [Charts(charts[:1])]),
            Section(
                "Choices",
                [
                    choices_table(record),
                    note("choices"),
                    Warned("Choices at the edge of their range:", at_edge),
                    no_edge,
                    Warned("", doubtful),
                ],
            ),
            Section(
                "How certain is the ranking?",
                [*ranking, certainty_table(record), note("certainty")],
            ),
            Section(
                "How much do settings matter?",
                [sensitivity_table(record), note("sensitivity"), Charts(charts[1:])],
            ),
            Section("Work", [work_table(record), note("work")]),
            Section(
                "Search",
                [search_table(record), Folded(f"All {len(trials.rows)} trials", [trials])],
            ),
        ],
    )
