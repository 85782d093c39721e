"""What a finished run measured: its files read back, and the results table made from them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nufed.errors import InputError, RunError
from nufed.evaluate import AgentScores, Measure, Summary, summarise
from nufed.runs.config import load_config
from nufed.runs.directory import PRIVACY, RunDirectory
from nufed.runs.durable import read_signed
from nufed.runs.files import finite, read_about, read_lines, refuse_links
from nufed.runs.part import DONE, WARNINGS, check_done
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
        """The final scores of the agents of a group, seed by seed."""
        return [
            [s for s in trained.scores if s.seen == (group == "seen")]
            for trained in self.seeds.values()
        ]


@dataclass(frozen=True)
class Row:
    """One method or baseline, on the agents seen in training or held out from it.

    Means over agents; averaged over seeds, with an interval over seeds (with one seed, over
    agents).
    """

    name: str
    kind: str
    group: str
    before: Estimate
    after: Estimate
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
    """One method (or baseline) and seed: its lines per round and its agents' final scores."""

    metrics: list[dict[str, Any]]
    scores: list[AgentScores]
    warnings: list[dict[str, Any]] = field(default_factory=list)


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
    """A run directory, read back."""

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
        before = [summarise(scores, 0, self.measure) for scores in chosen]
        after = [summarise(scores, steps, self.measure) for scores in chosen]
        if len(chosen) == 1:
            before_values, after_values = ([s.score[i] for s in chosen[0]] for i in (0, steps))
        else:
            before_values, after_values = ([s.mean for s in part] for part in (before, after))
        return Row(
            name=line.label,
            kind=line.kind,
            group=group,
            before=Estimate.of(before_values),
            after=Estimate.of(after_values),
            balanced=Estimate.of([s.balanced for s in after]),
            minority=Estimate.of([m for s in after if (m := s.minority) == m] or [math.nan]),
            above_majority=Estimate.of(self._above_majority(line, group)),
            deciles=tuple(np.mean([s.deciles for s in after], axis=0).tolist()),
            **{
                f: _mean(after, f)
                for f in ("weighted_mean", "std", "worst_tenth", "harmed", "loss")
            },
        )

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
        keys = ("gradients", "hvps", "bytes_up", "bytes_down")
        total = {k: sum(m.get(k, 0) for t in part.values() for m in t.metrics) for k in keys}
        seconds = sum(t["seconds"] for t in self.timing if t.get("method") == name)
        return {k: v / len(part) for k, v in {**total, "seconds": seconds}.items()}

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
        return read_signed(path) if path.exists() else None

    def bounds(self) -> dict[str, Any] | None:
        """What ``nufed bounds`` found for this run, if it was asked."""
        path = self.path / "bounds.json"
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{path} can't be read: {error}; run `nufed bounds` again") from error
        return found

    def to_json(self) -> dict[str, Any]:
        """The results as plain data, the same in every run of the same configuration."""
        return {
            "measure": self.measure.name,
            "higher_is_better": self.measure.higher_is_better,
            "rounds": self.config.rounds,
            "scored_on": self.config.eval_on,
            "fine_tuning_steps": self.config.steps_shown,
            "seeds": self.config.seeds,
            "rows": [finite(asdict(row)) for row in self.rows()],
            "warnings": [asdict(warned) for warned in self.warnings()],
        }


def load_run(path: Path) -> Run:
    """Read a run directory back."""
    refuse_links(path)
    try:
        directory = RunDirectory(path)
        about = directory.about()
        config = load_config(path / "config.toml")
        splits = {seed: directory.read_split(seed) for seed in config.seeds}
        measure, engines = about["measure"], about["engines"]
        data_sha256, inputs = about["data_sha256"], about.get("inputs", {})
    except (KeyError, InputError, RunError) as error:
        raise RunError(f"{path} can't be read as a run directory: {error}") from error
    methods = {n: _parts(path / "methods" / n, config.seeds) for n in config.algorithms()}
    return Run(
        path=path,
        config=config,
        # of the metric only its name and direction matter from here on
        measure=Measure(measure["name"], _known if measure["higher_is_better"] else None),
        software=about["software"],
        engines=engines,
        data_sha256=data_sha256,
        inputs=inputs,
        splits=splits,
        methods={n: p for n, p in methods.items() if p},
        baselines={
            name: _parts(path / "baselines" / name, config.seeds)
            for name in BASELINES
            if (path / "baselines" / name).is_dir()
        },
        timing=directory.timing(),
        failures=_failures(path, config),
    )


def _known(outputs: Any, targets: Any) -> float:
    raise AssertionError("scores of a finished run are read, not computed")


def _parts(folder: Path, seeds: Iterable[int]) -> dict[int, Trained]:
    """What there is of a method or baseline, by seed, but for seeds that failed."""
    folders = {seed: folder / f"seed-{seed}" for seed in seeds}
    return {s: _part(f) for s, f in folders.items() if not (f / "failure.json").exists()}


def _failures(path: Path, config: Config) -> list[str]:
    """Every method and seed that could not be trained, in words."""
    found = []
    for name in config.algorithms():
        for seed in config.seeds:
            file = path / "methods" / name / f"seed-{seed}" / "failure.json"
            if file.exists():
                about = read_about(file)
                warned = [
                    f"; warned in round {w['round']}: {w['message']}"
                    for w in about.get("warnings", ())
                ]
                found.append(f"{name}, seed {seed}: {about['reason']}{''.join(warned)}")
    return found


def _part(folder: Path) -> Trained:
    if not (folder / DONE).exists():
        raise RunError(
            f"{folder} is not finished: go on with `nufed run --resume {folder.parents[2]}`"
        )
    about = check_done(folder)
    metrics = folder / "metrics.jsonl"
    try:
        scores = [_agent_scores(line) for line in read_lines(folder / "agents.jsonl")]
    except (TypeError, KeyError) as error:
        raise RunError(f"{folder / 'agents.jsonl'} can't be read: {error}") from error
    lines = read_lines(metrics) if metrics.exists() else ()
    warned = list(read_lines(folder / WARNINGS)) if WARNINGS in about["files"] else []
    return Trained([_numbers(line) for line in lines], scores, warned)


def _agent_scores(line: dict[str, Any]) -> AgentScores:
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in _numbers(line).items()
    }
    return AgentScores(**fields)


def _numbers(value: Any) -> Any:
    """What :func:`nufed.runs.files.finite` made null, as NaN again."""
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    return [_numbers(v) for v in value] if isinstance(value, list) else value


def _mean(summaries: Sequence[Summary], field: str) -> float:
    return float(np.mean([getattr(s, field) for s in summaries]))
