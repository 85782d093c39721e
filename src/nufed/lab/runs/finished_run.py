"""A finished run, read back: its settings, results, costs, warnings and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from nufed.algorithms.gmeta import local_sgd
from nufed.algorithms.protocol import Algorithm
from nufed.data import Preparation
from nufed.errors import RunError, visible
from nufed.evaluate import Measure
from nufed.lab.config.problem import Recorded, resolved_partition
from nufed.lab.config.schema import Config
from nufed.lab.files import read_sealed
from nufed.lab.runs import frames
from nufed.lab.runs.directory import BOUNDS, PRIVACY
from nufed.lab.runs.federation_records import PrivacyRecord, TrafficLine, read_traffic
from nufed.lab.runs.json_files import checked, finite
from nufed.lab.runs.records import BoundsRecord, Inputs, SplitRecord, TimingLine
from nufed.lab.runs.results import Line, Paired, Row, Trained, paired_differences, results_table
from nufed.lab.runs.warnings import below_start, instability

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

GROUPS = ("seen", "unseen")
WORTH_SETTING = 1.1  # times as fast, from which another memory format or precision is recommended
MIXED = {
    "bfloat16": 'precision = "bfloat16"',
    "channels_last_bfloat16": 'precision = "bfloat16" with memory_format = "channels_last"',
}
FEW_UNSEEN = 4  # agents held out that are listed by name
BASELINES = {
    "majority": "always the agent's most frequent class",
    "centroid": "the class whose mean input among the agent's training samples is nearest",
    "local": "trained on the agent's data alone, τ·K updates with the first method's settings, "
    "and not fine-tuned",
    "untrained": "the initial model after the first method's fine-tuning",
}


@dataclass(frozen=True)
class RunWarning:
    """A warning about the results: its message, number of occurrences and first round.

    ``about`` is "data" (inputs on an unusual scale; of no single method and seed), "numbers"
    (numerically unreliable results), "training" (it did not do what it is for) or "updates" (some
    were left out). ``first_round`` is None where no round is named, of data, and of
    left-out updates in a private run.
    """

    method: str | None
    seed: int | None
    about: str
    message: str
    count: int
    first_round: int | None

    def __str__(self) -> str:
        when = "" if self.first_round is None else f", round {self.first_round}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        if self.method is None:
            return self.message
        return f"{self.method}, seed {self.seed}{when}: {self.message}{times}"


@dataclass(frozen=True, repr=False)
class Run:
    """The contents of a run directory, as :func:`nufed.load_run` returns them."""

    path: Path
    config: Config
    measure: Measure
    software: dict[str, str]
    splits: dict[int, SplitRecord]
    methods: dict[str, dict[int, Trained]]
    baselines: dict[str, dict[int, Trained]]
    timing: list[TimingLine]
    failures: list[str]
    engines: dict[str, str]
    data_sha256: str
    inputs: Inputs | None  # None: not one array
    data_warnings: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()  # methods and seeds that are left out, as text

    def __repr__(self) -> str:
        names, rounds = ", ".join([*self.methods, *self.baselines]), self.rounds_text
        return visible(f"<Run {self.path}: {names}; {rounds} rounds, seeds {self.config.seeds}>")

    @property
    def groups(self) -> list[str]:
        """The groups of agents: seen, and unseen if any were held out."""
        return list(GROUPS) if self.unseen else ["seen"]

    @property
    def own_rounds(self) -> dict[str, int]:
        """The rounds of methods that are trained for other rounds than the run."""
        tables = self.config.methods.items()
        return {name: table.rounds for name, table in tables if table.rounds is not None}

    @property
    def rounds_text(self) -> str:
        """The rounds of the run, and those of methods with other ones."""
        own = [f"{name} {rounds}" for name, rounds in self.own_rounds.items()]
        return str(self.config.rounds) + (f" ({', '.join(own)})" if own else "")

    @property
    def agents(self) -> int:
        return next(iter(self.splits.values())).number

    def preparation(self, seed: int) -> Preparation | None:
        """How the raw columns of a table became inputs; None: the data has none."""
        return self.splits[seed].preparation or self.config.data.prepare.given

    @property
    def unseen(self) -> int:
        """The number of agents held out from training."""
        return len(next(iter(self.splits.values())).unseen)

    @property
    def unseen_names(self) -> list[str]:
        """The names of the agents held out, if they are few and the same for every seed."""
        listed = [
            [split.agents[agent].name for agent in split.unseen if agent < len(split.agents)]
            for split in self.splits.values()
        ]
        same = all(names == listed[0] for names in listed)
        return listed[0] if same and len(listed[0]) == self.unseen <= FEW_UNSEEN else []

    @property
    def partition(self) -> str:
        """The partition that was used: "auto" as resolved from the data, where that is known."""
        data = self.config.data
        if data.split_file is not None:
            return f"of {data.split_file}"
        owners = next(iter(self.splits.values())).owners
        return data.partition if owners is None else resolved_partition(data, owners)

    @property
    def recorded(self) -> Recorded:
        """What the directory records of the problem, to rebuild it."""
        splits = {seed: split.sha256 for seed, split in self.splits.items()}
        return Recorded(self.path, self.config, self.data_sha256, splits)

    @property
    def federated(self) -> bool:
        """Whether it was trained at sites, which keep their data and states."""
        return "flower" in self.engines.values()

    def who(self, seed: int, agent: int) -> str:
        """An agent as text: a site by its name."""
        name = self.site_name(seed, agent)
        return f"agent {agent}" if name is None else f"site {name}"

    def site_name(self, seed: int, agent: int) -> str | None:
        """The name of a site, with its number where others have that name too."""
        names = [listed.name for listed in self.splits[seed].agents] if seed in self.splits else []
        if not self.federated or not 0 <= agent < len(names):
            return None
        return names[agent] + (f" (number {agent})" if names.count(names[agent]) > 1 else "")

    def traffic(self) -> list[TrafficLine]:
        """The requests to the sites of a federation, with their times and sizes; none of a private
        run, whose cohorts are secret."""
        return [] if self.config.privacy.clip is not None else read_traffic(self.path)

    def lines(self) -> list[Line]:
        """Lines of the results: each method by number of fine-tuning steps, then null baselines."""
        return list(self._lines)

    @cached_property  # a report asks for lines and rows many times
    def _lines(self) -> list[Line]:
        lines = []
        usual = self.config.steps_shown
        for name, part in self.methods.items():
            shown = self.config.steps_of(name)
            for steps in shown:
                after = "" if shown == [usual] else f"after {steps} step{'s' * (steps != 1)}"
                lines.append(Line(name, "method", steps, part, after))
        for name, part in self.baselines.items():  # a locally trained model is not fine-tuned
            steps = 0 if name == "local" else usual
            lines.append(Line(name, "baseline", steps, part))
        return lines

    def rows(self) -> list[Row]:
        """The results table, best method of each group first, then the null baselines.

        A line without scores from any agent has no row.
        """
        return list(self._rows)

    @cached_property
    def _rows(self) -> list[Row]:
        algorithms = self.config.algorithms()
        return results_table(
            self._lines,
            self.groups,
            self.measure,
            lambda line: _adapt_lr(line, algorithms, self.config.local_lr),
        )

    def paired(self) -> list[Paired]:
        """Each method minus the null baselines and the best method, on the same agents."""
        return list(self._paired)

    @cached_property
    def _paired(self) -> list[Paired]:
        return paired_differences(self._lines, self._rows, self.measure)

    def frame(self) -> pd.DataFrame:
        """Every score of the final models as a pandas data frame, one row per method (or null
        baseline), seed, agent, model, number of fine-tuning steps and step size.

        The columns are those of :class:`nufed.lab.runs.frames.ScoreRow`.
        """
        return frames.frame(self)

    def history(self) -> pd.DataFrame:
        """The curves by round as a pandas data frame, one row per method, seed, round, group of
        agents and step size of fine-tuning ("as_trained", for every round, or "chosen").

        ``global`` and ``personal`` are mean scores, the latter after the steps that results show;
        ``personal_0``, ``personal_1``, … after so many. They are missing in rounds that were not
        evaluated. The costs and other numbers of the round are the same in all rows of a round.
        """
        return frames.history(self)

    def costs(self, name: str) -> dict[str, float]:
        """The cost of training a method, per seed: gradients, HVPs, traffic and seconds; and that
        of its evaluations."""
        part = self.methods[name]
        work = ("gradients", "hvps", "evaluation_gradients", "evaluation_hvps")
        keys = (*work, "bytes_up", "bytes_down")
        total = {k: sum(getattr(m, k) for t in part.values() for m in t.metrics) for k in keys}
        seconds = sum(t.seconds for t in self.timing if t.method == name)
        return {k: v / len(part) for k, v in {**total, "seconds": seconds}.items()}

    @property
    def step_sizes_chosen(self) -> bool:
        """Whether step sizes of fine-tuning were chosen at evaluation."""
        return any(t.chosen for part in self.methods.values() for t in part.values())

    def step_size_notes(self) -> list[str]:
        """Caveats about the step sizes of fine-tuning."""
        if not self.step_sizes_chosen:
            why = (
                "eval_lr is as_trained"
                if self.config.eval_lr == "as_trained"
                else "agents have no validation samples to choose another one on (data.validation)"
            )
            return [
                f"Every method is fine-tuned with the step size (α) of its settings: {why}. "
                "FedAvg's training does not depend on α, so its α here is arbitrary: differences "
                "between methods may be due to α."
            ]
        return [
            f"{line.label}, seed {seed}: {note}"
            for line in self.lines()
            for seed, trained in line.seeds.items()
            if trained.step_sizes
            for note in trained.step_sizes.notes(line.steps)
        ]

    @property
    def shown_round(self) -> str:
        """The round of the models that results show, as text."""
        trained = [  # of a run that still trains, some have no rounds yet
            (self.config.rounds_of(name), each)
            for name, part in self.methods.items()
            for each in part.values()
            if each.metrics
        ]
        stopped = any(each.metrics[-1].round < rounds for rounds, each in trained)
        shown = sorted({each.round for _, each in trained}) or [self.config.rounds]
        rounds = f"{shown[0]}" if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"
        which = "best round on validation samples" if self.config.keep == "best" else "last round"
        return f"{which} ({rounds}{', training stopped early' * stopped})"

    def model_notes(self) -> list[str]:
        """With early stopping or ``keep = "best"``: each method's rounds, and the round shown."""
        if self.config.stop_when is None and self.config.keep == "last":
            return []
        return [
            f"{name}, seed {seed}: trained for {trained.metrics[-1].round} of "
            f"{self.config.rounds_of(name)} rounds; results show the model of round "
            f"{trained.round}, the "
            + ("best on validation samples" if self.config.keep == "best" else "last")
            for name, part in self.methods.items()
            for seed, trained in part.items()
            if trained.metrics
        ]

    def speed_notes(self) -> list[str]:
        """Which memory format and precision would be worth setting, by trials after training."""

        def gain(setting: str) -> float:
            tried: list[float | None] = [getattr(line, setting) for line in self.timing]
            return median([each for each in tried if each is not None] or [1.0])

        def fast(setting: str, times: float) -> str:
            return (
                f"{setting} would make a gradient {times:.2f} × as fast here (measured on one "
                "batch after training), with "
            )

        notes, exact = [], gain("channels_last")
        mixed = max(MIXED, key=gain)
        if exact >= WORTH_SETTING:
            notes.append(
                fast('memory_format = "channels_last"', exact) + "the same results to rounding."
            )
        if gain(mixed) >= WORTH_SETTING * max(1.0, exact):
            notes.append(
                fast(MIXED[mixed], gain(mixed)) + "products rounded to 8 bits: compare the scores."
            )
        return notes

    def rejected(self) -> list[str]:
        """Every update that was left out, as text; in a private run without agent and round."""
        private = self.config.privacy.clip is not None
        left_out = [
            f"{name}, seed {seed}"
            + ("" if private else f", {self.who(seed, r.agent)}, round {line.round}")
            + f": {r.reason}"
            for name, part in self.methods.items()
            for seed, trained in part.items()
            for line in trained.metrics
            for r in line.rejected
        ]
        return sorted(left_out) if private else left_out

    def warnings(self) -> list[RunWarning]:
        """Unusual data, numerical problems, each message once, trainings that became unstable or
        ended below their start, and the number of updates that were left out."""
        private = self.config.privacy.clip is not None
        warned = [RunWarning(None, None, "data", text, 1, None) for text in self.data_warnings]
        warned += [
            RunWarning(line.name, seed, "training", message, 1, None)
            for line in self.lines()
            if line.kind == "method"
            for seed, trained in line.seeds.items()
            if (message := below_start(line, trained, self.measure))
        ]
        algorithms = self.config.algorithms()
        for name, part in self.methods.items():
            caveat = algorithms[name].notes.caveat(algorithms[name], self.config.rounds_of(name))
            for seed, trained in part.items():
                if caveat:
                    warned.append(RunWarning(name, seed, "training", caveat, 1, None))
                if jump := instability(trained):
                    first, count, message = jump
                    warned.append(RunWarning(name, seed, "training", message, count, first))
                counts = Counter(w.message for w in trained.warnings)
                for message, count in counts.items():
                    first = min(w.round for w in trained.warnings if w.message == message)
                    warned.append(RunWarning(name, seed, "numbers", message, count, first))
                lost = [(m.round, r) for m in trained.metrics for r in m.rejected]
                if lost:
                    first, update = lost[0]
                    message = f"updates left out, the first because {update.reason}"
                    when = None if private else first
                    warned.append(RunWarning(name, seed, "updates", message, len(lost), when))
        return warned

    def unscored(self) -> list[str]:
        """The agents without valid scores of the final model, and why, as text."""
        return [
            f"{name}, seed {seed}, {self.who(seed, each.agent)}: {each.reason}"
            for name, part in self.methods.items()
            for seed, trained in part.items()
            for each in (trained.metrics[-1].unscored if trained.metrics else ())
            if each.agent not in {s.agent for s in trained.scores}  # a retry may have succeeded
        ]

    def unanswered(self) -> list[str]:
        """The number of unanswered requests by method, as text."""
        texts = []
        for name, part in self.methods.items():
            lines = [line for trained in part.values() for line in trained.metrics]
            lost = sum(len(line.dropped) for line in lines)
            asked = sum(len(line.cohort) for line in lines)
            if lost:
                texts.append(f"{name}: {lost:,} of {asked:,} requests ({lost / asked:.0%})")
        return texts

    def privacy(self) -> PrivacyRecord | None:
        """The privacy spent, of a federation with noisy updates; else None."""
        path = self.path / PRIVACY
        if not path.exists():
            return None
        return checked(PrivacyRecord, read_sealed(path).about, path)

    def bounds(self) -> BoundsRecord | None:
        """The results of ``nufed bounds`` for this run; None if it was not run."""
        path = self.path / BOUNDS
        if not path.exists():
            return None
        try:
            return checked(BoundsRecord, read_sealed(path).about, path)
        except RunError as error:
            raise RunError(f"{error}; remove it, or run `nufed bounds` again") from error

    def to_json(self) -> dict[str, Any]:
        """The results as plain data; reproducible from the configuration."""
        return {
            "measure": self.measure.name,
            "higher_is_better": self.measure.higher_is_better,
            "rounds": self.config.rounds,
            **({"rounds_of": own} if (own := self.own_rounds) else {}),
            "scored_on": self.config.eval_on,
            "fine_tuning_steps": self.config.steps_shown,
            "eval_lr": "chosen" if self.step_sizes_chosen else "as_trained",
            "notes": [*self.step_size_notes(), *self.model_notes()],
            "seeds": self.config.seeds,
            **({"tuned": self.config.tuned.model_dump()} if self.config.tuned else {}),
            "rows": [finite(row.record()) for row in self.rows()],
            "paired": [finite(asdict(each)) for each in self.paired()],
            "warnings": [asdict(warned) for warned in self.warnings()],
        }


def _adapt_lr(
    line: Line, algorithms: Mapping[str, Algorithm], local_lr: float | None
) -> float | None:
    """The step size that a line's scales multiply; None if it is not a single number."""
    if line.kind == "method":
        return algorithms[line.name].adaptation.fixed_lr
    first = next(iter(algorithms.values()))
    if line.name == "local":
        return local_lr or local_sgd(first).meta_lr
    return first.adaptation.lr
