"""The page of a run that is still training: its curves so far, and the results of what is done."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan

from nufed.report.charts import rounds_chart
from nufed.report.figures import draw, spec_of
from nufed.report.page import page_of, template
from nufed.report.tables import Table, number_format, results_table
from nufed.runs.frames import signals
from nufed.runs.training_state import PartState, TrainingState


def watched_page(state: TrainingState) -> bytes:
    """The report of a run if it is finished, else what exists so far, as a page in UTF-8."""
    if state.finished:
        return page_of([state.run])[0]
    run, so_far = state.run, state.with_rounds_so_far()
    groups = _groups(state)
    specs = {f"rounds-{g}": spec_of(rounds_chart([so_far], g)) for g in groups}
    results = run.groups if run.methods and run.rows() else []
    page = template("training.html.j2").render(
        title=run.path.name,
        summary=_summary(state),
        tables=[
            ("Progress", progress_table(state)),
            *((f"Done, agents {g} in training", results_table([run], g)) for g in results),
        ],
        charts=[
            (
                f"rounds-{g}",
                f"{run.config.eval_on.capitalize()} {run.measure.name} of personal models by "
                f"round, agents {g} in training, with the step size of fine-tuning as trained. "
                "Lines: mean over agents and the seeds that have reached the round; bands: range "
                "over seeds; dotted: the method's global model; dashed: null baselines.",
            )
            for g in groups
        ],
        failures=run.failures,
        specs=specs,
        drawn=draw({}, javascript=True),
    )
    return page.encode("utf-8", "backslashreplace")


def progress_table(state: TrainingState) -> Table:
    """Every method and seed: its state, round, latest scores and signals."""
    rounds, show = state.run.config.rounds, number_format(state.run)
    last = [_last_signals(part) for part in state.parts]
    scalars = dict.fromkeys(name for found in last for name in found)
    rows = []
    for part, found in zip(state.parts, last, strict=True):
        at = f"{part.metrics[-1].round} of {rounds}" if part.metrics else "–"
        scores = [show(score) if score == score else "–" for score in _last_scores(state, part)]
        more = [f"{found[name]:.4g}" if name in found else "–" for name in scalars]
        rows.append([part.method, str(part.seed), part.state, at, *scores, *more])
    titles = ["", "seed", "state", "round", "global", "personal"]
    names = [name.replace("_", " ") for name in scalars]
    return Table([*titles, *names], rows, [part.state == "waiting" for part in state.parts])


def _last_signals(part: PartState) -> dict[str, float]:
    """The latest value of each signal of training, such as the update norm."""
    return {
        name: value
        for line in part.metrics
        for name, value in signals(line).items()
        if isinstance(value, float) and value == value
    }


def _last_scores(state: TrainingState, part: PartState) -> Iterator[float]:
    """The scores of the global and personal model on seen agents when last evaluated."""
    found = [m.evaluation["seen"] for m in part.metrics if "seen" in m.evaluation]
    shared = found[-1].global_score if found else nan
    yield nan if shared is None else shared
    personal = found[-1].score[state.run.config.steps_of(part.method)[0]] if found else nan
    yield nan if personal is None else personal


def _groups(state: TrainingState) -> list[str]:
    """The groups of agents that any part has evaluated."""
    evaluated = {str(g) for part in state.parts for m in part.metrics for g in m.evaluation}
    return [group for group in state.run.groups if group in evaluated]


def _summary(state: TrainingState) -> str:
    count = dict.fromkeys(("done", "failed", "training", "waiting"), 0)
    for part in state.parts:
        count[part.state] += 1
    parts = ", ".join(f"{number} {name}" for name, number in count.items() if number)
    missing = state.missing_baselines()
    nulls = f" Null baselines not done yet: {', '.join(missing)}." if missing else ""
    return (
        f"Not finished: of {len(state.parts)} methods and seeds {parts}.{nulls} Scores are those "
        "so far; this page is redrawn as the run proceeds, and becomes its report at the end."
    )
