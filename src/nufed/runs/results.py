"""What a finished run measured, and the results table made from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nufed.errors import RunError
from nufed.evaluate import AgentScores, Measure, StepSizes, Summary, summarise
from nufed.runs.bounds_record import BoundsRecord
from nufed.runs.directory import BOUNDS, PRIVACY
from nufed.runs.durable import read_signed
from nufed.runs.files import finite
from nufed.runs.records import PrivacyRecord, checked
from nufed.runs.schema import Config

GROUPS = ("seen", "unseen")
BASELINES = {
    "majority": "always the agent's most frequent class",
    "local": "trained on the agent's data alone, τ·K updates with the first method's settings, "
    "and not fine-tuned",
    "untrained": "the initial model after the first method's fine-tuning",
}

# 97.5 % quantiles of Student's t for 1 … 30 degrees of freedom
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean with the half-width of its 95 % confidence interval; None if it has none."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From independent values, by Student's t.

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
class Line:
    """A method or baseline as results show it: after a number of fine-tuning steps."""

    label: str
    name: str
    kind: str
    steps: int
    seeds: dict[int, Trained]

    def scores(self, group: str) -> list[list[AgentScores]]:
        """The final scores of a group's agents by seed, with chosen step sizes where there are."""
        return self._scores(group, [t.final for t in self.seeds.values()])

    def scores_as_trained(self, group: str) -> list[list[AgentScores]]:
        """The same with the step size as trained."""
        return self._scores(group, [t.scores for t in self.seeds.values()])

    def scales(self) -> list[float]:
        """The chosen scale of the step size, seed by seed; empty where none was chosen."""
        sizes = [t.step_sizes for t in self.seeds.values()]
        return [own.scale(self.steps) for own in sizes if own is not None]

    @staticmethod
    def _scores(group: str, found: Iterable[list[AgentScores]]) -> list[list[AgentScores]]:
        return [[s for s in scores if s.seen == (group == "seen")] for scores in found]


@dataclass(frozen=True)
class Row:
    """One method or baseline, on the agents seen in training or held out from it.

    Means over agents; averaged over seeds, with an interval over seeds (with one seed, over
    agents). ``after`` and what follows from it are with the chosen step size of fine-tuning where
    one was chosen, ``as_trained`` with the one of training; ``adapt_lr`` is the chosen step size,
    seed by seed (null where it is not one number), ``lr_scale`` the same over that of training.
    """

    name: str
    kind: str
    group: str
    before: Estimate
    after: Estimate
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


@dataclass(frozen=True)
class Trained:
    """One method (or baseline) and seed: its lines per round and its agents' final scores.

    ``scores`` are with the step size of fine-tuning as trained, ``chosen`` with the one of
    ``step_sizes`` that was chosen on validation samples.
    """

    metrics: list[dict[str, Any]]
    scores: list[AgentScores]
    chosen: list[AgentScores] | None = None
    step_sizes: StepSizes | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def final(self) -> list[AgentScores]:
        """The scores that results show: with chosen step sizes where there are any."""
        return self.chosen or self.scores


@dataclass(frozen=True)
class Warned:
    """What a reader of the results must know: a message, how often, and in which round first.

    ``about`` is "numbers" (a result was computed, but is poor) or "updates" (some were left out).
    Of a private run it is not said when.
    """

    method: str
    seed: int
    about: str
    message: str
    count: int
    first_round: int | None

    def __str__(self) -> str:
        when = "" if self.first_round is None else f", round {self.first_round}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.method}, seed {self.seed}{when}: {self.message}{times}"


@dataclass(frozen=True)
class Run:
    """A run directory, read back by :func:`nufed.load_run`."""

    path: Path
    config: Config
    measure: Measure
    software: dict[str, Any]
    splits: dict[int, dict[str, Any]]
    methods: dict[str, dict[int, Trained]]
    baselines: dict[str, dict[int, Trained]]
    timing: list[dict[str, Any]]
    failures: list[str]
    engines: dict[str, str]
    data_sha256: str
    inputs: dict[str, Any]

    @property
    def groups(self) -> list[str]:
        """The groups of agents there are: seen, and unseen if any were held out."""
        return list(GROUPS) if self.config.data.unseen_agents else ["seen"]

    @property
    def agents(self) -> int:
        return int(next(iter(self.splits.values()))["number"])

    def lines(self) -> list[Line]:
        """What results show: each method after its numbers of steps, then the null baselines."""
        found = []
        usual = self.config.steps_shown
        for name, part in self.methods.items():
            shown = self.config.steps_of(name)
            for steps in shown:
                words = f" after {steps} step{'s' * (steps != 1)}"
                label = name if shown == [usual] else name + words
                found.append(Line(label, name, "method", steps, part))
        for name, part in self.baselines.items():  # what is trained alone is the agent's own model
            steps = 0 if name == "local" else usual
            found.append(Line(name, name, "baseline", steps, part))
        return found

    def rows(self) -> list[Row]:
        """The results table, best method of each group first, then the null baselines.

        What no agent sent scores of has no row.
        """
        rows = []
        sign = -1 if self.measure.higher_is_better else 1
        for group in self.groups:
            for kind in ("method", "baseline"):
                made = [
                    self._row(line, group)
                    for line in self.lines()
                    if line.kind == kind and any(line.scores(group))
                ]
                rows += sorted(made, key=lambda r: (math.isnan(r.after.mean), sign * r.after.mean))
        return rows

    def _row(self, line: Line, group: str) -> Row:
        chosen, steps = line.scores(group), line.steps
        after = [summarise(scores, steps, self.measure) for scores in chosen]
        lr = self._adapt_lr(line)
        return Row(
            name=line.label,
            kind=line.kind,
            group=group,
            before=_estimate(chosen, 0),
            after=_estimate(chosen, steps),
            as_trained=_estimate(line.scores_as_trained(group), steps),
            adapt_lr=tuple(None if lr is None else scale * lr for scale in line.scales()),
            lr_scale=tuple(line.scales()),
            balanced=Estimate.of([s.balanced for s in after]),
            minority=Estimate.of([m for s in after if (m := s.minority) == m] or [math.nan]),
            above_majority=Estimate.of(self._above_majority(line, group)),
            deciles=tuple(np.mean([s.deciles for s in after], axis=0).tolist()),
            **{
                f: _mean(after, f)
                for f in ("weighted_mean", "std", "worst_tenth", "harmed", "loss")
            },
        )

    def _adapt_lr(self, line: Line) -> float | None:
        """The step size that the scales of a line multiply, where it is one number."""
        algorithms = self.config.algorithms()
        own = algorithms.get(line.name) or next(iter(algorithms.values()))
        lr = getattr(own, "meta_lr" if line.name == "local" else "adapt_lr", None)
        learned = getattr(own, "rates_lr", 0) and line.kind == "method"
        return lr if isinstance(lr, float) and not learned else None

    def _above_majority(self, line: Line, group: str) -> list[float]:
        """By how much the mean score lies above always answering the most frequent class."""
        if "majority" not in self.baselines:
            return [math.nan]
        majority = Line("", "majority", "baseline", 0, self.baselines["majority"])
        nulls = dict(zip(majority.seeds, majority.scores(group), strict=True))
        return [
            float(np.mean([s.score[line.steps] for s in scores]))
            - float(np.mean([s.score[0] for s in nulls[seed]]))
            for seed, scores in zip(line.seeds, line.scores(group), strict=True)
        ]

    def costs(self, name: str) -> dict[str, float]:
        """What training a method cost, per seed: work, traffic and seconds."""
        part = self.methods[name]
        keys = ("gradients", "hvps", "bytes_up", "bytes_down", "evaluation_gradients")
        total = {k: sum(m.get(k, 0) for t in part.values() for m in t.metrics) for k in keys}
        seconds = sum(t["seconds"] for t in self.timing if t.get("method") == name)
        return {k: v / len(part) for k, v in {**total, "seconds": seconds}.items()}

    @property
    def step_sizes_chosen(self) -> bool:
        """Whether step sizes of fine-tuning were chosen at evaluation."""
        return any(t.chosen for part in self.methods.values() for t in part.values())

    def step_size_notes(self) -> list[str]:
        """What a reader must know about the step sizes of fine-tuning, in words."""
        if not self.step_sizes_chosen:
            why = (
                "eval_lr is as_trained"
                if self.config.eval_lr == "as_trained"
                else "agents have no validation samples to choose another one on (data.validation)"
            )
            return [
                f"Every method is fine-tuned with the step size (α) of its settings: {why}. "
                "FedAvg's training does not depend on α, so that its α here is an arbitrary one: "
                "differences between methods may be differences of α."
            ]
        return [
            f"{line.label}, seed {seed}: the best step size is the last one tried (scale "
            f"{own.scale:.3g}); a better one may lie beyond."
            for line in self.lines()
            for seed, trained in line.seeds.items()
            if trained.step_sizes
            for own in trained.step_sizes.chosen
            if own.steps == line.steps and own.at_edge
        ]

    def rejected(self) -> list[str]:
        """Every update that was left out, in words; of a private run not who was asked when."""
        private = self.config.privacy.clip is not None
        found = [
            f"{name}, seed {seed}"
            + ("" if private else f", agent {r['agent']}, round {line['round']}")
            + f": {r['reason']}"
            for name, part in self.methods.items()
            for seed, trained in part.items()
            for line in trained.metrics
            for r in line.get("rejected", ())
        ]
        return sorted(found) if private else found

    def warnings(self) -> list[Warned]:
        """What is wrong with the numbers, each message once, and how many updates were left out."""
        private = self.config.privacy.clip is not None
        found = []
        for name, part in self.methods.items():
            for seed, trained in part.items():
                told = Counter(w["message"] for w in trained.warnings)
                for message, count in told.items():
                    first = min(w["round"] for w in trained.warnings if w["message"] == message)
                    found.append(Warned(name, seed, "numbers", message, count, first))
                lost = [(m["round"], r) for m in trained.metrics for r in m.get("rejected", ())]
                if lost:
                    first, update = lost[0]
                    message = f"updates left out, the first because {update['reason']}"
                    when = None if private else first
                    found.append(Warned(name, seed, "updates", message, len(lost), when))
        return found

    def unscored(self) -> list[str]:
        """The agents that sent no usable scores of the final model, in words."""
        return [
            f"{name}, seed {seed}, agent {each['agent']}: {each['reason']}"
            for name, part in self.methods.items()
            for seed, trained in part.items()
            for each in (trained.metrics[-1].get("unscored", ()) if trained.metrics else ())
            if each["agent"] not in {s.agent for s in trained.scores}  # asked again, it sent some
        ]

    def unanswered(self) -> list[str]:
        """How many requests agents did not answer, method by method, in words."""
        found = []
        for name, part in self.methods.items():
            lines = [line for trained in part.values() for line in trained.metrics]
            lost = sum(len(line.get("dropped", ())) for line in lines)
            asked = sum(len(line["cohort"]) for line in lines)
            if lost:
                found.append(f"{name}: {lost:,} of {asked:,} requests ({lost / asked:.0%})")
        return found

    def privacy(self) -> dict[str, Any] | None:
        """What was spent, of a federation with noisy updates."""
        path = self.path / PRIVACY
        if not path.exists():
            return None
        return checked(PrivacyRecord, read_signed(path), path).model_dump()

    def bounds(self) -> dict[str, Any] | None:
        """What ``nufed bounds`` found for this run, if it was asked."""
        path = self.path / BOUNDS
        if not path.exists():
            return None
        try:
            return checked(BoundsRecord, read_signed(path), path).model_dump()
        except RunError as error:
            raise RunError(f"{error}; remove it, or run `nufed bounds` again") from error

    def to_json(self) -> dict[str, Any]:
        """The results as plain data, the same in every run of the same configuration."""
        return {
            "measure": self.measure.name,
            "higher_is_better": self.measure.higher_is_better,
            "rounds": self.config.rounds,
            "scored_on": self.config.eval_on,
            "fine_tuning_steps": self.config.steps_shown,
            "eval_lr": "chosen" if self.step_sizes_chosen else "as_trained",
            "notes": self.step_size_notes(),
            "seeds": self.config.seeds,
            "rows": [finite(asdict(row)) for row in self.rows()],
            "warnings": [asdict(warned) for warned in self.warnings()],
        }


def _estimate(by_seed: Sequence[Sequence[AgentScores]], steps: int) -> Estimate:
    """The mean score over agents with its interval over seeds; with one seed, over agents."""
    if len(by_seed) == 1:
        return Estimate.of([s.score[steps] for s in by_seed[0]])
    return Estimate.of([float(np.mean([s.score[steps] for s in own])) for own in by_seed])


def _mean(summaries: Sequence[Summary], field: str) -> float:
    return float(np.mean([getattr(s, field) for s in summaries]))
