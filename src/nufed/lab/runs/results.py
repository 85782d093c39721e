"""The results table: methods and null baselines on a group of agents, and paired differences.

Methods of one run have the same agents, splits and batches. What makes an agent easy or hard is the
same for all of them and cancels in the difference of their scores on that agent: its interval is
often much narrower than those of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from nufed.evaluate import AgentScores, Fit, Guesses, Measure, StepSizes, Summary, summarise
from nufed.lab.runs.json_files import or_nan
from nufed.lab.runs.records import MetricsLine, WarningLine

# 97.5 % quantiles of Student's t for 1 … 30 degrees of freedom
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z975 = 1.96
Deviations: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
MIN_VALUES = 3  # seeds or agents that an interval needs: that of two is far too wide, or 0


@dataclass(frozen=True)
class Estimate:
    """A mean with the half-width of its 95 % confidence interval (None for a single value)."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean and interval of independent values, with Student's t.

        >>> Estimate.of([1.0, 2.0, 3.0]).mean
        2.0
        >>> round(Estimate.of([1.0, 2.0, 3.0]).half_width, 3)
        2.484
        """
        n = len(values)
        if n < 2:
            return cls(float(np.mean(values)), None)
        t = _T975[n - 2] if n - 2 < len(_T975) else 1.96 + 2.4 / (n - 1)
        return cls(float(np.mean(values)), float(t * np.std(values, ddof=1) / math.sqrt(n)))


@dataclass(frozen=True)
class Trained:
    """One method (or baseline) and seed: its metrics by round and its agents' final scores.

    ``scores`` are with the step size of fine-tuning as trained, ``chosen`` with those of
    ``step_sizes``, which were chosen on validation samples. ``shown`` is the round of the model
    that they are of, with ``keep = "best"``.
    """

    metrics: list[MetricsLine]
    scores: list[AgentScores]
    chosen: list[AgentScores] | None = None
    step_sizes: StepSizes | None = None
    warnings: list[WarningLine] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    guesses: list[Guesses] = field(default_factory=list)
    shown: int | None = None

    @property
    def round(self) -> int:
        """The round of the model that ``scores`` are of: the last, or the best one."""
        return self.metrics[-1].round if self.shown is None else self.shown

    @property
    def final(self) -> list[AgentScores]:
        """The scores that results show: with chosen step sizes if available."""
        return self.chosen or self.scores


@dataclass(frozen=True)
class Line:
    """A method or baseline after a number of fine-tuning steps, as results show it.

    ``after`` says how many, where the label needs it: "after 3 steps".
    """

    name: str
    kind: str
    steps: int
    seeds: dict[int, Trained]
    after: str = ""

    @property
    def label(self) -> str:
        """Its name in results."""
        return f"{self.name} {self.after}".rstrip()

    def scores(self, group: str) -> list[list[AgentScores]]:
        """The final scores of a group's agents by seed, with chosen step sizes if available."""
        return self._scores(group, [t.final for t in self.seeds.values()])

    def scores_as_trained(self, group: str) -> list[list[AgentScores]]:
        """The scores of a group's agents by seed, with the step size as trained."""
        return self._scores(group, [t.scores for t in self.seeds.values()])

    def scales(self) -> list[float]:
        """The chosen scale of the step size, by seed; empty if none was chosen."""
        sizes = [t.step_sizes for t in self.seeds.values() if t.step_sizes is not None]
        return [
            choice.scale for each in sizes for choice in each.chosen if choice.steps == self.steps
        ]

    @staticmethod
    def _scores(group: str, by_seed: Iterable[list[AgentScores]]) -> list[list[AgentScores]]:
        return [[s for s in scores if s.seen == (group == "seen")] for scores in by_seed]


@dataclass(frozen=True)
class Row:
    """One method or baseline, on the agents seen in training or held out from it.

    Means over agents, averaged over seeds, with an interval over seeds (with fewer than three, over
    agents, or None). ``shared`` is the score of the global model (NaN if there is none),
    ``personal`` that of the personal model after the shown fine-tuning steps. It and the fields
    after ``lr_scale`` use the chosen step size if there is one, ``as_trained`` that of training.
    ``adapt_lr`` is the chosen step size by seed (null if it is not a single number), ``lr_scale``
    its ratio to that of training. ``over_samples`` is the half-width of the interval of
    ``personal`` over the samples of these very agents, where they are few.
    """

    name: str
    kind: str
    group: str
    shared: Estimate
    personal: Estimate
    as_trained: Estimate
    adapt_lr: tuple[float | None, ...]
    lr_scale: tuple[float, ...]
    weighted_mean: float
    std: float
    worst_tenth: float
    deciles: tuple[float, ...]
    harmed: float
    loss: float
    balanced: Estimate
    minority: Estimate
    above_majority: Estimate
    over_samples: float | None = None

    def record(self) -> dict[str, Any]:
        """The row in results.json, where ``shared`` is ``global``, a reserved word in Python."""
        values = asdict(self)
        return {"global" if key == "shared" else key: value for key, value in values.items()}


def results_table(
    lines: Sequence[Line],
    groups: Sequence[str],
    measure: Measure,
    adapt_lr: Callable[[Line], float | None],
) -> list[Row]:
    """A row for every line and group that has scores.

    Args:
        lines: methods and null baselines.
        groups: of agents.
        measure: of the scores; the best method of a group comes first.
        adapt_lr: the step size that a line's scales multiply; None if it is not a single number.
    """
    baselines = {line.name: line for line in lines if line.kind == "baseline"}
    majority = baselines.get("majority")
    sign = -1 if measure.higher_is_better else 1
    rows = []
    for group in groups:
        for kind in ("method", "baseline"):
            made = [
                _row(line, group, measure, adapt_lr(line), majority)
                for line in lines
                if line.kind == kind and any(line.scores(group))
            ]
            rows += sorted(
                made, key=lambda r: (math.isnan(r.personal.mean), sign * r.personal.mean)
            )
    return rows


def _row(line: Line, group: str, measure: Measure, lr: float | None, majority: Line | None) -> Row:
    # a seed that still trains has no scores
    chosen, trained = (
        [scores for scores in by_seed if scores]
        for by_seed in (line.scores(group), line.scores_as_trained(group))
    )
    steps = line.steps
    after = [summarise(scores, steps, measure) for scores in chosen]
    return Row(
        name=line.label,
        kind=line.kind,
        group=group,
        shared=_estimate(chosen, lambda scores: or_nan(scores.global_score)),
        personal=_estimate(chosen, lambda scores: scores.score[steps]),
        as_trained=_estimate(trained, lambda scores: scores.score[steps]),
        adapt_lr=tuple(None if lr is None else scale * lr for scale in line.scales()),
        lr_scale=tuple(line.scales()),
        balanced=_over_seeds([s.balanced for s in after]),
        minority=_over_seeds([m for s in after if (m := s.minority) == m] or [math.nan]),
        above_majority=_over_seeds(_above_majority(line, group, majority)),
        over_samples=over_samples([deviations(scores, steps) for scores in chosen]),
        deciles=tuple(np.mean([s.deciles for s in after], axis=0).tolist()),
        **{f: _mean(after, f) for f in ("weighted_mean", "std", "worst_tenth", "harmed", "loss")},
    )


def _above_majority(line: Line, group: str, majority: Line | None) -> list[float]:
    """The mean score minus that of always predicting the most frequent class, by seed."""
    if majority is None:
        return [math.nan]
    nulls = dict(zip(majority.seeds, majority.scores(group), strict=True))
    return [
        float(np.mean([s.score[line.steps] for s in scores]))
        - float(np.mean([s.score[0] for s in nulls[seed]]))
        for seed, scores in zip(line.seeds, line.scores(group), strict=True)
        if scores
    ]


def _estimate(
    by_seed: Sequence[Sequence[AgentScores]], score: Callable[[AgentScores], float]
) -> Estimate:
    """The mean score over agents with its interval over seeds, or over agents."""
    seeds = [{s.agent: score(s) for s in scores} for scores in by_seed]
    estimate = _over_seeds([float(np.mean(list(by_agent.values()))) for by_agent in seeds])
    return estimate if len(seeds) >= MIN_VALUES else Estimate(estimate.mean, over_agents(seeds))


def _over_seeds(values: Sequence[float]) -> Estimate:
    """Their mean; its interval only of at least three seeds, since that of two is useless."""
    estimate = Estimate.of(values)
    return estimate if len(values) >= MIN_VALUES else Estimate(estimate.mean, None)


def over_agents(seeds: Sequence[Mapping[int, float]]) -> float | None:
    """The half-width of the interval of a mean over agents; None of fewer than three.

    An agent's value is its mean over seeds, whether it has the same samples in all of them (as in
    a natural federation) or others in each.
    """
    values: dict[int, list[float]] = {}
    for by_agent in seeds:
        for agent, value in by_agent.items():
            values.setdefault(agent, []).append(value)
    means = [float(np.mean(of_agent)) for of_agent in values.values()]
    return Estimate.of(means).half_width if len(means) >= MIN_VALUES else None


def deviations(scores: Sequence[AgentScores], steps: int) -> dict[int, Deviations]:
    """The scores on resamples minus those on all samples, by agent, if recorded of all of them."""
    known = all(s.resampled for s in scores)
    return {s.agent: np.array(s.resampled[steps]) for s in scores} if known else {}


def over_samples(seeds: Sequence[Mapping[int, Deviations]]) -> float | None:
    """The half-width of the interval of a mean over these agents, with other samples of theirs.

    It is 1.96 standard deviations over bootstrap resamples, drawn from each agent independently;
    that of the mean over seeds is their mean, since seeds have the same samples. None if they were
    not recorded.
    """
    with np.errstate(all="ignore"):  # of diverged models
        means = [np.mean(list(by_agent.values()), axis=0) for by_agent in seeds if by_agent]
        width = float(np.mean([Z975 * np.std(mean) for mean in means])) if means else math.nan
    return width if math.isfinite(width) and len(means) == len(seeds) else None


def _mean(summaries: Sequence[Summary], field: str) -> float:
    return float(np.mean([getattr(s, field) for s in summaries]))


Scores: TypeAlias = Mapping[int, Mapping[int, float]]  # by seed and agent


@dataclass(frozen=True)
class Paired:
    """The mean of (score of ``name`` − score of ``against``) over the same agents and seeds.

    ``half_width`` is that of its 95 % confidence interval, and ``over`` what that is over: with
    three seeds or more over their means, unless that over agents is wider (a few seeds can agree
    by chance), else over agents (an agent's value is its mean over seeds). Both are None with
    fewer than three seeds and agents. ``verdict`` is "better" or "worse" if the interval excludes
    0, else "undecided". Each interval is for one comparison, not corrected for their number.
    ``over_samples`` is the half-width of the interval over the samples of these very agents, by a
    paired bootstrap, where they are few (:func:`nufed.lab.runs.results.over_samples`).
    """

    group: str
    name: str
    against: str
    mean: float
    half_width: float | None
    over: Literal["seeds", "agents"] | None
    verdict: Literal["better", "worse", "undecided"]
    over_samples: float | None = None

    @classmethod
    def of(
        cls, group: str, names: tuple[str, str], scores: tuple[Scores, Scores], sign: int
    ) -> Paired | None:
        """The first minus the second; None if they have no agent in common.

        Args:
            group: of agents.
            names: of both.
            scores: of both, by seed and agent; only agents with both scores are compared.
            sign: 1 if higher scores are better, else −1.
        """
        one, other = scores
        common = [seed for seed in one if seed in other]
        pairs = [
            {
                agent: one[seed][agent] - other[seed][agent]
                for agent in one[seed].keys() & other[seed]
            }
            for seed in common
        ]
        seeds = [pair for pair in pairs if pair]
        if not seeds:
            return None
        estimate = Estimate.of([float(np.mean(list(pair.values()))) for pair in seeds])
        half = over_agents(seeds)
        over: Literal["seeds", "agents"] = "agents"
        if len(seeds) >= MIN_VALUES and (half is None or not (estimate.half_width or 0.0) < half):
            half, over = estimate.half_width, "seeds"
        low, high = sorted(sign * (estimate.mean + side * (half or 0.0)) for side in (-1, 1))
        decided = half is not None
        return cls(
            group,
            *names,
            estimate.mean,
            half,
            over if decided else None,
            "better" if decided and low > 0 else "worse" if decided and high < 0 else "undecided",
        )


def paired_differences(
    lines: Sequence[Line], rows: Sequence[Row], measure: Measure
) -> list[Paired]:
    """Each method minus each null baseline, and minus the best method, by group.

    Args:
        lines: methods and null baselines, with the scores of their agents.
        rows: their results; the first method of a group is its best.
        measure: of the scores.
    """
    by_label = {line.label: line for line in lines}
    sign = 1 if measure.higher_is_better else -1
    differences = []
    for group in dict.fromkeys(row.group for row in rows):
        of_group = [row for row in rows if row.group == group]
        lines_of = {row.name: by_label[row.name] for row in of_group}
        methods = [row.name for row in of_group if row.kind == "method"]
        nulls = [row.name for row in of_group if row.kind == "baseline"]
        for name in methods:
            for against in [*nulls, *methods[:1]]:
                both = (lines_of[name], lines_of[against])
                if name != against and (pair := paired(group, (name, against), both, sign)):
                    differences.append(pair)
    return differences


def paired(
    group: str, names: tuple[str, str], lines: tuple[Line, Line], sign: int
) -> Paired | None:
    """The first line minus the second, on the agents of a group; arguments as of Paired.of."""
    one, other = (_scores(line, group) for line in lines)
    difference = Paired.of(group, names, (one, other), sign)
    if difference is None:
        return None
    first, second = (
        {
            seed: deviations(scores, line.steps)
            for seed, scores in zip(line.seeds, line.scores(group), strict=True)
        }
        for line in lines
    )
    with np.errstate(all="ignore"):
        pairs = [
            {
                agent: by_agent[agent] - second[seed][agent]
                for agent in by_agent.keys() & second[seed]
                if len(by_agent[agent]) == len(second[seed][agent])
            }
            for seed, by_agent in first.items()
            if seed in second
        ]
    return replace(difference, over_samples=over_samples(pairs))


def _scores(line: Line, group: str) -> Scores:
    """The personal models' scores by seed and agent, as results show them; diverged ones NaN."""
    return {
        seed: {
            s.agent: value if math.isfinite(value := s.score[line.steps]) else math.nan
            for s in scores
        }
        for seed, scores in zip(line.seeds, line.scores(group), strict=True)
    }
