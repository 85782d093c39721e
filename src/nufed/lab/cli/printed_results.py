"""Prints results and tables of numbers, of which no digit is ever cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table as Printed

from nufed.lab.bundle.from_run import can_be_bundled
from nufed.lab.cli.terminal import console, natural_width, print_line, print_table, say, table, wide
from nufed.lab.report.headline import finding, gains_and_costs, measured
from nufed.lab.report.tables import (
    Table,
    all_groups,
    between_runs,
    problem_text,
    results_table,
    run_name,
)
from nufed.lab.runs import Run


def print_results(runs: Sequence[Run]) -> None:
    """Print findings, the results tables, and warnings."""
    for run in runs:
        name = f"{run_name(run, runs)}: " if len(runs) > 1 else ""
        for group in all_groups([run]) if run.rows() else ():
            print_line(name, (finding(run, group), "bold" if group == "seen" else ""))
        for sentence in gains_and_costs(run) if run.rows() else ():
            print_line(name, sentence)
        print_line(name, f"{measured(run)} {problem_text(run)}")
    for group in all_groups(runs):
        console().print()
        print_numbers(f"agents {group} in training", results_table(runs, group))
        between, reasons = between_runs(runs, group)
        if between.rows:
            console().print()
            print_numbers(f"paired differences, agents {group} in training", between)
        for reason in reasons:
            print_line(reason)
    for line in (line for run in runs for line in run.failures):
        print_line(("could not be trained", "red"), f", left out above: {line}")
    for line in (line for run in runs for line in run.unfinished):
        print_line(("not finished", "yellow"), f", left out above: {line}")
    for warning in (w for run in runs for w in run.warnings() if w.about == "data"):
        print_line(("check the data", "yellow"), f", {warning}")
    for warning in (w for run in runs for w in run.warnings() if w.about == "training"):
        print_line(("training went wrong", "red"), f", {warning}")
    for line in (line for run in runs for line in run.unanswered()):
        print_line(("agents did not answer", "yellow"), f", {line}")
    rejected = [line for run in runs for line in run.rejected()]
    if rejected:
        many = f"{len(rejected)} updates were left out"
        print_line((many, "yellow"), f", first: {rejected[0]}")


def print_files(run: Run) -> None:
    """Print the paths of a finished run's bundles and report."""
    if can_be_bundled(run):
        say(f"models to adapt: {run.path / 'bundles'} (see `nufed adapt --help`)")
        for name in run.methods:
            if not (run.path / "bundles" / f"{name}.nufed").exists():
                say(f"no bundle of {name}: `nufed bundle {run.path} --method {name}` says why")
    say(f"report: {run.path / 'report.html'}")


def print_notes(tables: Iterable[tuple[str, Table]], notes: Iterable[str]) -> None:
    """Tables with their titles, then sentences."""
    for title, each in tables:
        print_numbers(title, each)
        console().print()
    for note in notes:
        print_line(note)


def print_numbers(title: str, shown: Table) -> None:
    """A table of numbers; on a narrow terminal without its optional columns, or in blocks."""
    width = natural_width(_made(title, shown)) if wide() else console().width
    for block in blocks(title, shown, width):
        print_table(_made(title, block))


def blocks(title: str, shown: Table, width: int) -> Iterator[Table]:
    """The table in ``width`` columns: first its optional columns are left out, then it is broken
    into blocks of columns, each with the names of the rows."""
    columns = list(range(1, len(shown.headings)))
    for heading in shown.optional:
        if natural_width(_made(title, _part(shown, columns))) <= width:
            break
        columns = [place for place in columns if shown.headings[place] != heading]
    while columns:
        taken = 1
        while (
            taken < len(columns)
            and natural_width(_made(title, _part(shown, columns[: taken + 1]))) <= width
        ):
            taken += 1
        yield _part(shown, columns[:taken])
        columns = columns[taken:]


def _part(shown: Table, columns: Sequence[int]) -> Table:
    def chosen(row: Sequence[str]) -> list[str]:
        return [row[0], *(row[place] for place in columns)]

    return Table(chosen(shown.headings), [chosen(row) for row in shown.rows], shown.quiet)


def _made(title: str, shown: Table) -> Printed:
    return table(shown.rows, shown.headings, title=title, right=True, quiet=shown.quiet, gap=1)
