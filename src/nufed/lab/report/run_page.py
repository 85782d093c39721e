"""The report of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from nufed.errors import InputError, visible
from nufed.lab.report.analysis_tables import bounds_notes, bounds_tables
from nufed.lab.report.charts import all_charts, bounds_charts
from nufed.lab.report.figures import Chart
from nufed.lab.report.headline import finding, gains_and_costs, measured
from nufed.lab.report.page import Block, Charts, Folded, Page, Section, Text, Warned, note
from nufed.lab.report.tables import (
    Table,
    agents_table,
    all_groups,
    baseline_notes,
    between_runs,
    costs_table,
    methods_table,
    newcomer_notes,
    over_samples,
    problem_text,
    results_table,
    rounds_table,
    run_name,
    settings_table,
    sites_table,
    without_global,
)
from nufed.lab.runs import Run

# the charts of each part of the page, by how their names begin; others come last
PARTS = {
    "first": ("fits", "guesses", "by-key-seen"),
    "scores": ("results-seen",),
    "unseen": ("by-key-unseen", "results-unseen", "rounds-unseen", "gradients-unseen"),
    "training": ("rounds-seen", "gradients-seen", "training-", "steps"),
    "agents": ("agents",),
    "data": ("split",),
}
MAX_REJECTED = 20  # rejected updates that are listed
MAX_OPEN = 20  # agents of a table that is shown at once


def build_report(runs: Sequence[Run], out: Path, *, figures: bool | None = True) -> Path:
    """Write ``report.html`` and ``figures/`` for one run, or several side by side, into ``out``.

    Without ``figures`` no SVG and PNG files are drawn, with None no charts at all. If drawing
    fails, the page is written without the missing charts and says so, and a
    :class:`~nufed.errors.ReportWarning` is issued.
    """
    page = run_page(runs, charts=figures is not None)
    return page.save(out, "nufed report", figures=bool(figures))


def run_page(runs: Sequence[Run], *, charts: bool = True) -> Page:
    """The report of these runs."""
    if len({run.measure.name for run in runs}) > 1:
        scores = ", ".join(f"{run.path.name}: {run.measure.name}" for run in runs)
        raise InputError(f"these runs have different measures ({scores}): compare runs of one")
    if len({run.config.eval_on for run in runs}) > 1:
        raise InputError("these runs have different eval_on: compare runs with the same")
    scored = [run for run in runs if run.rows()]
    drawn = _by_part(list(all_charts(scored)) if scored and charts else [])
    concerns = _concerns(runs)
    groups = all_groups(runs)
    return Page(
        " and ".join(run_name(run, runs) for run in runs),
        [*_headline(runs), _how_many(concerns)],
        [
            *([_results(runs, drawn["first"])] if groups else []),
            *(_between(runs, group) for group in groups),
            Section("Warnings", concerns, id="warnings"),
            *(_unseen(runs, group, drawn["unseen"]) for group in groups[1:]),
            *(_details(runs, scored, drawn) if groups else []),
            Section("Data", [Charts(drawn["data"])]),
            _theory(runs, charts),
            Section("Costs", [costs_table(runs), note("costs")]),
            *_sites(runs),
            Section("Settings", list(_settings(runs))),
        ],
    )


def _by_part(charts: Sequence[Chart]) -> dict[str, list[Chart]]:
    """Charts by part of the page."""
    parts: dict[str, list[Chart]] = {part: [] for part in (*PARTS, "more")}
    for chart in charts:
        starts = (part for part, names in PARTS.items() if chart[0].startswith(names))
        parts[next(starts, "more")].append(chart)
    if not parts["first"]:
        parts["first"], parts["scores"] = parts["scores"], []
    return parts


def _headline(runs: Sequence[Run]) -> Iterator[Block]:
    """What was found, and what was measured; of several runs on agents seen in training only."""
    for run in runs:
        findings = _findings(run)
        for line in findings if len(runs) == 1 else findings[:1]:
            yield Text(_named(run, runs, line), "finding")
        yield Text(measured(run), "note" if findings else "finding")


def _findings(run: Run) -> list[Markup]:
    """What was found of each group of agents, without line breaks between numbers and units."""
    texts = [*(finding(run, group) for group in all_groups([run])), *gains_and_costs(run)]
    escaped = [str(escape(visible(text))) for text in texts]
    return [Markup(x.replace(" %", "&nbsp;%").replace(" ± ", "&nbsp;±&nbsp;")) for x in escaped]


def _named(run: Run, runs: Sequence[Run], text: str) -> Markup:
    """A sentence about a run, after its name if there are several."""
    name = Markup("<b>{}:</b> ").format(visible(run_name(run, runs))) if len(runs) > 1 else ""
    return Markup("{}{}").format(name, text if isinstance(text, Markup) else visible(text))


def _how_many(concerns: Sequence[Warned]) -> Text | str:
    number = sum(len(each.lines) for each in concerns)
    link = Markup('<a href="#warnings">{} warning{}</a>: see below.')
    return Text(link.format(number, "s" * (number > 1)), "warn") if number else ""


def _concerns(runs: Sequence[Run]) -> list[Warned]:
    """What went wrong, by kind."""
    warnings = [w for run in runs for w in run.warnings()]
    numerical = [str(w) for w in warnings if w.about in ("data", "numbers")]
    training = [str(w) for w in warnings if w.about == "training"]
    unscored = "Agents without scores after the last round, and left out above:"
    return [
        Warned("Could not be trained, and left out above:", [x for r in runs for x in r.failures]),
        Warned("Not finished, and left out above:", [x for r in runs for x in r.unfinished]),
        Warned("Numerical warnings:", numerical),
        Warned("Training that went wrong:", training),
        Warned("Requests without a response:", [x for r in runs for x in r.unanswered()]),
        Warned(
            "Updates left out:",
            [x for r in runs for x in r.rejected()],
            most=MAX_REJECTED,
            rest="in metrics.jsonl",
        ),
        Warned(unscored, [x for r in runs for x in r.unscored()]),
    ]


def _results(runs: Sequence[Run], charts: Sequence[Chart]) -> Section:
    """The first group's scores."""
    table = results_table(runs, all_groups(runs)[0], short=True)
    notes = [x for run in runs for x in (_named(run, runs, problem_text(run)), run.config.note)]
    return Section("", [Charts(charts), table, *notes, _short_columns(runs, table)])


def _short_columns(runs: Sequence[Run], table: Table) -> str:
    """What the columns of scores and paired differences mean."""
    points = ", in percentage points" if runs[0].measure.name == "accuracy" else ""
    notes = [note("differences", points=points)] if len(table.headings) > 4 else []
    notes += [note("samples")] if over_samples(runs) else []
    return Markup(" ").join([*notes, note("explained")])


def _between(runs: Sequence[Run], group: str) -> Section:
    table, reasons = between_runs(runs, group)
    title = f"Paired differences between runs, agents {group} in training"
    tables = [table] if table.rows else []
    return Section(title, [*tables, *(f"{reason}." for reason in reasons)])


def _unseen(runs: Sequence[Run], group: str, charts: Sequence[Chart]) -> Section:
    """Scores of agents that took no part in training."""
    blocks: list[Block] = []
    if len(runs) > 1:
        findings = [(run, _findings(run)) for run in runs]
        blocks += [Text(_named(run, runs, lines[1])) for run, lines in findings if len(lines) > 1]
    blocks.append(results_table(runs, group, short=True))
    newcomers = "; ".join(f"{what} ({names})" for names, what in newcomer_notes(runs))
    blocks.append(note("newcomers", what=newcomers) if newcomers else "")
    return Section(f"Agents {group} in training", [*blocks, Charts(charts)])


def _details(
    runs: Sequence[Run], scored: Sequence[Run], charts: dict[str, list[Chart]]
) -> Iterator[Section]:
    """Further charts, and the scores of individual agents and of all columns."""
    yield Section("Scores", [Charts(charts["scores"])])
    if charts["training"]:
        yield Section("Training and fine-tuning", [Charts(charts["training"])])
    else:
        yield Section("", [note("no_charts")])
    tables = [(run_name(run, runs), agents_table(run)) for run in scored]
    folded = [
        Folded(
            f"{name}, first seed, {len(table.rows)} agents",
            [table, note("agents") if over_samples(runs) else ""],
            open=len(table.rows) <= MAX_OPEN,
        )
        for name, table in tables
    ]
    yield Section("Individual agents", [Charts(charts["agents"]), *folded])
    groups = all_groups(runs)
    yield Section(
        "All results",
        [
            *(
                Folded(
                    f"Agents {group} in training, all columns",
                    [results_table(runs, group)],
                    open=group == groups[0],
                )
                for group in groups
            ),
            Text(_columns(runs), "note", id="explained"),
            *_result_notes(scored),
            Charts(charts["more"]),
        ],
    )


def _columns(runs: Sequence[Run]) -> str:
    """What all columns of results mean."""
    chosen = note("chosen") if any(run.step_sizes_chosen for run in runs) else ""
    nulls = "; ".join(f"{name}: {what}" for name, what in baseline_notes(runs[0]))
    notes = [note("columns", part=runs[0].config.eval_on, chosen=chosen)]
    notes += [note("classes")] if runs[0].measure.name == "accuracy" else []
    notes += [note("uncorrected"), *([note("nulls", nulls=nulls)] if nulls else [])]
    return Markup(" ").join(notes)


def _result_notes(scored: Sequence[Run]) -> list[str]:
    methods = ", ".join(without_global(scored))
    notes = [
        text
        for run in scored
        for text in (*run.step_size_notes(), *run.model_notes(), *run.speed_notes())
    ]
    return [note("without_global", methods=methods) if methods else "", *dict.fromkeys(notes)]


def _theory(runs: Sequence[Run], charts: bool) -> Section:
    """The theorem's bounds, where they were estimated for the only run."""
    bounds = runs[0].bounds() if len(runs) == 1 else None
    if bounds is None:
        return Section("Theory", [])
    tables = [Section(title, [table]) for title, table in bounds_tables(bounds)]
    drawn = Charts(list(bounds_charts(bounds)) if charts else [])
    return Section("Theory", [*tables, *bounds_notes(bounds), drawn])


def _sites(runs: Sequence[Run]) -> Iterator[Section]:
    """Time and bytes of a federation's sites."""
    tables = [(run, sites_table(run), rounds_table(run)) for run in runs]
    recorded = [(run, sites, rounds) for run, sites, rounds in tables if sites and rounds]
    by_round = "By round: seconds until the answer, kilobytes to the site (↓) and back (↑)"
    for run, sites, rounds in recorded:
        name = f": {run_name(run, runs)}" if len(recorded) > 1 else ""
        yield Section(f"Sites{name}", [sites, Folded(by_round, [rounds]), note("requests")])


def _settings(runs: Sequence[Run]) -> Iterator[Folded]:
    alone = len(runs) == 1
    for run in runs:
        title = f"{run_name(run, runs)}: problem and evaluation"
        yield Folded(title, [settings_table(run)], open=alone)
    yield Folded("Settings of every method", [methods_table(runs)], open=alone)
