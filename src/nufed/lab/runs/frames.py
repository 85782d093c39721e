"""The scores of a run as pandas data frames: one row per final score, and the curves by round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nufed.errors import InputError
from nufed.evaluate import AgentScores
from nufed.lab.runs.records import Curves, MetricsLine
from nufed.lab.runs.results import Trained

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from nufed.lab.runs.finished_run import Run

COUNTED = ("cohort", "dropped", "rejected", "unscored")  # lists of a round, shown by their length


class ScoreRow(NamedTuple):
    """One score of one agent's final model, a row of :meth:`nufed.Run.frame`.

    ``value`` is the score by ``measure``. ``model`` is "global" or "personal", the latter after
    ``steps`` fine-tuning steps. ``step_size`` of fine-tuning is "as_trained" or "chosen" (on
    validation samples; missing for the global model), and ``lr_scale`` its ratio to that of
    training. ``balanced`` and ``minority`` accuracy are missing where they are not defined.
    """

    method: str
    kind: str
    seed: int
    agent: int
    name: str
    seen: bool
    newcomer: bool
    train_samples: int
    test_samples: int
    round: int
    measure: str
    model: str
    steps: int
    step_size: str | None
    lr_scale: float
    value: float
    loss: float
    balanced: float
    minority: float


def frame(run: Run) -> pd.DataFrame:
    """Every score of the final models, a :class:`ScoreRow` each."""
    rows = [
        row
        for kind, parts in (("method", run.methods), ("baseline", run.baselines))
        for name, seeds in parts.items()
        for seed, trained in seeds.items()
        for row in _score_rows(run, (name, kind, seed), trained)
    ]
    return pandas().DataFrame(rows, columns=ScoreRow._fields)


def _score_rows(run: Run, key: tuple[str, str, int], trained: Trained) -> Iterator[ScoreRow]:
    """One method or baseline with one seed: of every agent the global model, and the personal ones
    with step sizes as trained and as chosen."""

    round = trained.round if trained.metrics else run.config.rounds  # a baseline has none

    def row(s: AgentScores, *model: str | float | None) -> ScoreRow:
        agent = (s.agent, s.name, s.seen, s.newcomer, s.train_samples, s.test_samples)
        return ScoreRow._make((*key, *agent, round, run.measure.name, *model))

    sizes = trained.step_sizes
    scales = (
        {choice.steps: choice.scale for choice in sizes.chosen} if sizes and trained.chosen else {}
    )
    for s in trained.scores:
        if s.global_score is not None:
            shared = s.global_score, s.global_loss, math.nan, math.nan
            yield row(s, "global", 0, None, math.nan, *shared)
    for size, scores in (("as_trained", trained.scores), ("chosen", trained.chosen or ())):
        for s in scores:
            for steps, value in enumerate(s.score):
                scale = scales.get(steps, 1.0) if size == "chosen" else 1.0
                by_class = [each[steps] if each else math.nan for each in (s.balanced, s.minority)]
                yield row(s, "personal", steps, size, scale, value, s.loss[steps], *by_class)


def history(run: Run) -> pd.DataFrame:
    """The curves by round: see :meth:`nufed.Run.history`."""
    rows = [
        {"method": name, "seed": seed, **row}
        for name, seeds in run.methods.items()
        for seed, trained in seeds.items()
        for line in trained.metrics
        for row in history_rows(line, run.groups, run.config.steps_of(name)[0])
    ]
    return pandas().DataFrame(rows)


def history_rows(line: MetricsLine, groups: Sequence[str], shown: int) -> Iterator[dict[str, Any]]:
    """A round's scores as trained, by group (missing where it was not evaluated), and with chosen
    step sizes if there are any; each with the round's costs and signals."""
    for group in groups:
        for size, evaluation in (
            ("as_trained", line.evaluation),
            ("chosen", line.evaluation_chosen),
        ):
            curves = {str(key): value for key, value in evaluation.items()}.get(group)
            if curves is not None or size == "as_trained":
                key = {"round": line.round, "group": group, "step_size": size}
                yield {**key, **_means(curves, shown), **signals(line)}


def _means(curves: Curves | None, shown: int) -> dict[str, float | None]:
    """Mean scores of the global model, and of personal ones after the shown and after all steps."""
    if curves is None:
        return dict.fromkeys(("global", "personal", "loss"), math.nan)
    by_steps = {f"personal_{steps}": score for steps, score in enumerate(curves.score)}
    personal, loss = curves.score[shown], curves.loss[shown]
    return {"global": curves.global_score, "personal": personal, "loss": loss, **by_steps}


def signals(line: MetricsLine) -> dict[str, float]:
    """Every number of a round but its scores: costs, signals of training, and how many agents."""
    numbers: dict[str, float] = {}
    for name, value in line:
        if isinstance(value, Mapping) and all(isinstance(v, int | float) for v in value.values()):
            numbers |= {f"{name}_{key}": v for key, v in value.items()}
        elif name in COUNTED:
            numbers[name] = len(value)
        elif isinstance(value, int | float) and name != "round":
            numbers[name] = value
    return numbers


def pandas() -> Any:
    """The package, which is an extra."""
    try:
        import pandas
    except ImportError:
        raise InputError(
            'data frames need pandas and pyarrow: pip install "nufed[frames]"'
        ) from None
    return pandas
