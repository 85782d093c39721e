"""The schema of every JSON file of a run directory.

Everything read from a run directory is validated by one of these; invalid content is refused in one
sentence that names the file (:func:`checked`).

The metrics that every engine records, one line per round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nufed.algorithms.protocol import Algorithm, State
from nufed.errors import RunError, shown
from nufed.evaluate import AgentScores, Evaluation, Measure, summarise
from nufed.server import Progress
from nufed.simulation.engine import EngineName

LISTED = 1000  # agents of a split whose counts are recorded

Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# non-finite numbers are written as null
Number = Annotated[float | None, AfterValidator(lambda value: math.nan if value is None else value)]
Numbers = list[Number]
Scale = Annotated[float, Field(gt=0, le=1e9)]
ScaleOrNone = Annotated[float, Field(ge=0, le=1e9)]  # 0: no step
Group = Literal["seen", "unseen"]
T = TypeVar("T", bound="Record")


class Record(BaseModel):
    """A JSON object with exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MeasureRecord(Record):
    """The measure that agents are scored by."""

    name: str
    higher_is_better: bool


class RangeRecord(Record):
    """See :class:`nufed.data.samples.InputRange`."""

    low: float
    high: float
    mean: float
    std: Annotated[float, Field(ge=0)]


class Inputs(Record):
    """The format of one input and one target, and the range of all inputs, if it is known.

    ``targets`` is the dtype of whole-number targets that are no classes, such as tokens.
    """

    shape: list[Whole]
    dtype: str
    scale: float
    shift: float
    classes: list[str]
    outputs: Count
    targets: str | None = None
    range: RangeRecord | None = None


class RunAbout(Record):
    """``run.json``. ``resumed`` are the software versions that the run was resumed with,
    ``data_warnings`` sentences about inputs whose scale is far from 1."""

    format: Whole
    measure: MeasureRecord
    engines: dict[str, EngineName | Literal["flower"]]
    config: dict[str, Any]
    data_sha256: str
    inputs: Inputs | Annotated[dict[str, Any], Field(max_length=0)] = {}
    software: dict[str, str | Whole]
    resumed: list[dict[str, str]] = []
    data_warnings: list[str] = []


class AgentCounts(Record):
    """An agent's number of samples by part, and by class."""

    name: str
    train: Whole
    validation: Whole
    test: Whole
    counts: list[Whole]


class SplitRecord(Record):
    """``splits/seed-0.json``; ``agents`` are the first 1000 of ``number``.

    ``owners``: whether the data names the owner of every sample; None in older runs.
    """

    sha256: str
    classes: list[str]
    unseen: list[Whole]
    number: Count
    agents: list[AgentCounts]
    owners: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _require(
            len(self.agents) == min(self.number, LISTED),
            f"agents: {len(self.agents)} of {self.number} are listed",
        )
        _require(
            all(agent < self.number for agent in self.unseen),
            f"unseen: there are only {self.number} agents",
        )
        _require(
            not self.classes or all(len(a.counts) == len(self.classes) for a in self.agents),
            f"agents: counts must have {len(self.classes)} classes",
        )
        return self


class WarningLine(Record):
    """A line of ``warnings.jsonl``: a numerical problem found in a round."""

    round: Whole
    message: str


class FitLine(Record):
    """A line of ``fits.jsonl``: an agent's model on a grid of inputs, by fine-tuning steps."""

    agent: Whole
    name: str
    seen: bool
    grid: Numbers
    predicted: list[Numbers]
    train_inputs: Numbers
    train_targets: Numbers
    test_inputs: Numbers
    test_targets: Numbers

    @model_validator(mode="after")
    def _fits(self) -> Self:
        pairs = [(self.train_inputs, self.train_targets), (self.test_inputs, self.test_targets)]
        pairs += [(self.grid, curve) for curve in self.predicted]
        _require(all(len(x) == len(y) for x, y in pairs), "inputs and outputs differ in number")
        return self


class ResampledLine(Record):
    """A line of ``resampled.jsonl``: see ``resampled`` of :class:`nufed.evaluate.AgentScores`."""

    agent: Whole
    scores: list[Numbers]


class Failure(Record):
    """``failure.json``."""

    reason: str
    warnings: list[WarningLine] = []


class Done(Record):
    """``done.json``: the SHA-256 of a part's files and of its configuration, data and split.

    ``rounds`` are those of the configuration, ``trained`` those after which it stopped early, and
    ``shown`` the round of the model that results show, if it need not be the last.
    """

    rounds: Whole
    trained: Whole | None = None
    shown: Whole | None = None
    belongs_to: dict[str, str]
    files: dict[str, str]


class Manifest(Record):
    """The JSON of ``checkpoint-000020.safetensors``: see :class:`.part_files.Checkpoint`.

    ``states`` is an inventory of agents' states.
    """

    round: Whole
    states: tuple[Whole, Whole]
    metrics_bytes: Whole
    metrics_sha256: str
    belongs_to: dict[str, str]
    notes: dict[str, Any] = {}


class AgentReason(Record):
    """An agent, and why its update or scores were left out."""

    agent: Integer
    reason: str


class Curves(Record):
    """Means after 0, 1, … fine-tuning steps."""

    score: Numbers
    loss: Numbers
    global_score: Number = None
    balanced: Numbers = []
    minority: Numbers = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _same_length(self)
        return self


class MetricsLine(Record):
    """A line of ``metrics.jsonl``: one round.

    ``update_norm`` is the Euclidean norm of the server's change of the model, ``median_norms`` the
    median norm of the agents' changes by vector (with ``max_update_norm``), ``training_loss`` the
    mean loss on the training samples of the round's cohort, at evaluated rounds of a simulation
    (:func:`nufed.evaluate.scores`). ``validation_score`` is what early stopping and
    ``keep = "best"`` use (:mod:`nufed.lab.runs.part_files`). ``taken`` are the agents whose
    updates were aggregated, if others were left out.
    """

    round: Whole
    cohort: list[Whole]
    rejected: list[AgentReason]
    gradients: Whole
    hvps: Whole
    bytes_down: Whole
    bytes_up: Whole
    dropped: list[Whole] = []
    taken: list[Whole] | None = None
    attempts: Count = 1
    update_norm: Number = None
    median_norms: dict[str, Annotated[float, Field(ge=0)]] = {}
    training_loss: Number = None
    validation_score: Number = None
    evaluation: dict[Group, Curves] = {}
    evaluation_gradients: Whole = 0
    evaluation_hvps: Whole = 0
    evaluation_chosen: dict[Group, Curves] = {}
    scales: list[ScaleOrNone] = []
    unscored: list[AgentReason] = []
    epsilon: dict[Literal["released", "server"], Number] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _require(set(self.dropped) <= set(self.cohort), "dropped: must be agents of the cohort")
        _require(set(self.taken or ()) <= set(self.cohort), "taken: must be agents of the cohort")
        return self

    @property
    def participants(self) -> list[int]:
        """The agents whose updates were aggregated."""
        return self.cohort if self.taken is None else self.taken


class ScoresLine(Record):
    """A line of ``agents.jsonl``: see :class:`nufed.evaluate.AgentScores`."""

    agent: Whole
    name: str
    seen: bool
    train_samples: Whole
    test_samples: Count
    loss: Numbers
    score: Numbers
    global_loss: float | None = None
    global_score: float | None = None
    balanced: Numbers = []
    minority: Numbers = []
    minority_samples: Whole = 0
    personal_gradients: Whole = 0
    personal_hvps: Whole = 0
    newcomer: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _same_length(self)
        most = self.test_samples if self.minority else 0
        _require(self.minority_samples <= most, f"minority_samples: must be at most {most}")
        return self


class ChosenScale(Record):
    """See :class:`nufed.evaluate.ScaleChoice`."""

    steps: Whole
    scale: ScaleOrNone
    score: Number
    loss: Number
    at_edge: bool
    gain: Number = None
    noise: Number = None


class StepSizesRecord(Record):
    """``step-sizes.json``: see :class:`nufed.evaluate.StepSizes`."""

    tried: list[Scale]
    chosen: list[ChosenScale]
    gradients: Whole
    hvps: Whole
    agents: Whole = 0
    samples: Whole = 0


class TimingLine(Record):
    """A line of ``timing.jsonl``."""

    method: str
    seed: Whole
    seconds: Annotated[float, Field(ge=0)]


def checked(model: type[T], content: Any, path: Path, line: int | None = None) -> T:
    """The content of a file as a record, or an error that names the file and the invalid key.

    ``content`` is JSON as bytes, or already decoded. The latter is encoded again, because Python,
    unlike pydantic, accepts lone surrogates, which can't be encoded in the report.
    """
    try:
        text = content if isinstance(content, bytes) else json.dumps(content)
        return model.model_validate_json(text)
    except RecursionError:
        raise RunError(f"{path} is invalid: it is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = shown(".".join(map(str, first["loc"])))[1:-1]
        where = f"{path}" if line is None else f"{path}, line {line}"
        raised = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        reason = str(raised).splitlines()[0]
        raise RunError(f"{where} is invalid: {key}{': ' if key else ''}{reason}") from None


def _same_length(curves: Curves | ScoresLine) -> None:
    """Every list must have the length of ``score``; by-class ones may be empty."""
    steps = len(curves.score)
    _require(steps > 0, "score: must not be empty")
    _require(len(curves.loss) == steps, f"loss: must be {steps} numbers, as in score")
    for key in ("balanced", "minority"):
        own = getattr(curves, key)
        _require(len(own) in (0, steps), f"{key}: must be {steps} numbers, as in score")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def round_line(algorithm: Algorithm, progress: Progress) -> dict[str, Any]:
    """A round's cohort, rejected updates and cost, as a line of metrics.jsonl."""
    agents, sent = len(progress.cohort), algorithm.sent_in(progress.round)
    update_bytes = progress.update_bytes
    if update_bytes is None:
        update_bytes = _bytes(progress.server, sent)
    more: dict[str, Any] = {"dropped": progress.dropped} if progress.dropped else {}
    if progress.dropped or progress.rejected:
        more["taken"] = progress.taken
    if progress.attempts > 1:
        more["attempts"] = progress.attempts
    if progress.update_norm is not None:
        more["update_norm"] = progress.update_norm
    if progress.medians:
        more["median_norms"] = dict(progress.medians)
    return {
        "round": progress.round,
        "cohort": progress.cohort,
        "rejected": [{"agent": r.agent, "reason": r.reason} for r in progress.rejected],
        "gradients": progress.cost.gradients,
        "hvps": progress.cost.hvps,
        "bytes_down": agents * _bytes(progress.server, algorithm.receives),
        "bytes_up": (agents - len(progress.dropped)) * update_bytes,
        **more,
    }


def _bytes(server: State, names: Sequence[str]) -> int:
    return sum(server[name].nbytes for name in names)


def evaluation_line(evaluation: Evaluation, steps: int, measure: Measure) -> dict[str, Any]:
    """An evaluation's entries in a round's line: scores as trained and with chosen step sizes."""
    line: dict[str, Any] = {
        "evaluation": by_group(evaluation.as_trained, steps, measure),
        "evaluation_gradients": evaluation.gradients,
        "evaluation_hvps": evaluation.hvps,
    }
    if evaluation.chosen is not None and evaluation.step_sizes is not None:
        line["evaluation_chosen"] = by_group(evaluation.chosen, steps, measure)
        line["scales"] = [own.scale for own in evaluation.step_sizes.chosen]
    return line


def by_group(
    scores: Sequence[AgentScores], steps: int, measure: Measure
) -> dict[str, dict[str, Any]]:
    """Means after 0, 1, … fine-tuning steps, over agents seen in training and over the others.

    ``global_score`` is the mean of the global model, if there is one.
    """
    groups: dict[str, dict[str, Any]] = {}
    for group in ("seen", "unseen"):
        chosen = [s for s in scores if s.seen == (group == "seen")]
        if chosen:
            means = [summarise(chosen, step, measure) for step in range(steps + 1)]
            groups[group] = {"score": [m.mean for m in means], "loss": [m.loss for m in means]}
            if chosen[0].global_score is not None:
                groups[group]["global_score"] = means[0].global_mean
            if chosen[0].balanced:
                groups[group]["balanced"] = [m.balanced for m in means]
                groups[group]["minority"] = [m.minority for m in means]
    return groups
