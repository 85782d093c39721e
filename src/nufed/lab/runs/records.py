"""The schema of the JSON files of a run: everything read from them is validated by one of these.

Also the lines of metrics that every engine records, one per round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from string import hexdigits
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_serializer,
    model_validator,
)

from nufed.algorithms.protocol import Algorithm, State
from nufed.data import Preparation
from nufed.data.samples import InputRange
from nufed.evaluate import AgentScores, Evaluation, Fit, Guesses, Measure, StepSizes, summarise
from nufed.lab.config.describe import optional
from nufed.lab.runs.json_files import (
    Count,
    DataclassJson,
    Integer,
    Number,
    Numbers,
    Record,
    Whole,
    require_fit,
)
from nufed.objective import Inputs as ModelInputs
from nufed.server import Downlink, Progress, to_send
from nufed.simulation.engine import EngineName
from nufed.theory import GREEK, TheoremTerms

LISTED = 1000  # agents of a split whose counts are recorded

Scale = Annotated[float, Field(gt=0, le=1e9)]
ScaleOrNone = Annotated[float, Field(ge=0, le=1e9)]  # 0: no step
CurvatureName: TypeAlias = Literal["first_order", "hessian_free", "exact"]
Group = Literal["seen", "unseen"]


class MeasureRecord(Record):
    """The measure that agents are scored by."""

    name: str
    higher_is_better: bool


def _check_range(value: InputRange) -> InputRange:
    require_fit(value.std >= 0, "std: must be 0 or more")
    return value


class InputFormat(Record):
    """The format of one of several inputs."""

    shape: list[Whole]
    dtype: str


class Inputs(Record):
    """The format of one input and one target, and the range of all inputs, if it is known.

    ``targets`` is the dtype of whole-number targets that are no classes, such as tokens. Of several
    inputs ``shape`` and ``dtype`` are those of the first, ``several`` has all of them by name
    (numbers if they have none).
    """

    shape: list[Whole]
    dtype: str
    scale: float
    shift: float
    classes: list[str]
    outputs: Count
    targets: str | None = None
    range: Annotated[InputRange, AfterValidator(_check_range)] | None = None
    several: dict[str, InputFormat] = optional({})

    @property
    def formats(self) -> dict[str, InputFormat]:
        """The format of every input, by name; of a single one without."""
        return self.several or {"": InputFormat(shape=self.shape, dtype=self.dtype)}


def zeros_of(formats: Mapping[str, Any], rows: int = 1) -> ModelInputs:
    """Zeros in the formats of inputs by name: a tensor, a tuple, or a mapping.

    The name of a single input is empty; numbers are those of inputs without names.
    """
    zeros = {
        n: torch.zeros(rows, *f.shape, dtype=getattr(torch, f.dtype)) for n, f in formats.items()
    }
    if "" in zeros:
        return zeros[""]
    return tuple(zeros.values()) if next(iter(zeros)).isdecimal() else zeros


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
    ``preparation``: how the columns of a table became inputs, learned from training rows.
    """

    sha256: str
    classes: list[str]
    unseen: list[Whole]
    number: Count
    agents: list[AgentCounts]
    owners: bool | None = None
    preparation: Annotated[Preparation, BeforeValidator(Preparation.read)] | None = optional(None)

    @field_serializer("preparation")
    def _plain(self, preparation: Preparation | None) -> list[dict[str, Any]] | None:
        return None if preparation is None else preparation.describe()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_fit(
            len(self.agents) == min(self.number, LISTED),
            f"agents: {len(self.agents)} of {self.number} are listed",
        )
        require_fit(
            all(agent < self.number for agent in self.unseen),
            f"unseen: there are only {self.number} agents",
        )
        require_fit(
            not self.classes or all(len(a.counts) == len(self.classes) for a in self.agents),
            f"agents: counts must have {len(self.classes)} classes",
        )
        return self


class WarningLine(Record):
    """A line of ``warnings.jsonl``: a numerical problem found in a round."""

    round: Whole
    message: str


class ResampledLine(Record):
    """A line of ``resampled.jsonl``: see ``resampled`` of :class:`nufed.evaluate.AgentScores`."""

    agent: Whole
    scores: tuple[tuple[Number, ...], ...]


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
    """The JSON of ``checkpoint-000020.safetensors``, whose tensors are the server's state.

    ``states`` is the inventory of the agents' states, which are in files of their own;
    ``metrics_bytes`` is the length of the metrics file then, ``metrics_sha256`` its SHA-256;
    ``belongs_to`` are the digests of configuration, data and split; ``notes`` is what else the
    engine needs to resume, as plain JSON.
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
        require_fit(set(self.dropped) <= set(self.cohort), "dropped: must be agents of the cohort")
        require_fit(
            set(self.taken or ()) <= set(self.cohort), "taken: must be agents of the cohort"
        )
        return self

    @property
    def participants(self) -> list[int]:
        """The agents whose updates were aggregated."""
        return self.cohort if self.taken is None else self.taken


class TimingLine(Record):
    """A line of ``timing.jsonl``.

    ``channels_last``, ``bfloat16`` and ``channels_last_bfloat16`` are how many times as fast a
    gradient is in that memory format and precision, if tried.
    """

    method: str
    seed: Whole
    seconds: Annotated[float, Field(ge=0)]
    channels_last: Annotated[float, Field(gt=0)] | None = None
    bfloat16: Annotated[float, Field(gt=0)] | None = None
    channels_last_bfloat16: Annotated[float, Field(gt=0)] | None = None


def _same_length(curves: Curves | AgentScores) -> None:
    """Every list must have the length of ``score``; by-class ones may be empty."""
    steps = len(curves.score)
    require_fit(steps > 0, "score: must not be empty")
    require_fit(len(curves.loss) == steps, f"loss: must be {steps} numbers, as in score")
    for key in ("balanced", "minority"):
        ok = len(getattr(curves, key)) in (0, steps)
        require_fit(ok, f"{key}: must be {steps} numbers, as in score")


def _check_scores(scores: AgentScores) -> None:
    _same_length(scores)
    most = scores.test_samples if scores.minority else 0
    require_fit(scores.minority_samples <= most, f"minority_samples: must be at most {most}")


def _check_fit(fit: Fit) -> None:
    pairs = [(fit.train_inputs, fit.train_targets), (fit.test_inputs, fit.test_targets)]
    pairs += [(fit.grid, curve) for curve in fit.predicted]
    ok = all(len(x) == len(y) for x, y in pairs)
    require_fit(ok, "inputs and outputs differ in number")


def _check_guesses(guesses: Guesses) -> None:
    pixels = 2 * guesses.sides[0] * guesses.sides[1]
    images = (*guesses.images, *guesses.examples)
    hexadecimal = all(len(image) == pixels and set(image) <= set(hexdigits) for image in images)
    require_fit(hexadecimal, "images must be two hexadecimal digits per pixel")
    pairs = [(guesses.images, guesses.labels), (guesses.examples, guesses.classes)]
    pairs += [(guesses.images, guessed) for guessed in guesses.guessed]
    require_fit(all(len(a) == len(b) for a, b in pairs), "images and classes differ in number")


# the lines of agents.jsonl, fits.jsonl and guesses.jsonl, and step-sizes.json
SCORES = DataclassJson(
    AgentScores, omitted=("resampled", "group_loss"), check=_check_scores, test_samples=Count
)
FITS = DataclassJson(Fit, check=_check_fit)
GUESSES = DataclassJson(Guesses, check=_check_guesses)
STEP_SIZES = DataclassJson(StepSizes, tried=tuple[Scale, ...])


def _check_constant(name: str) -> str:
    if name not in GREEK:
        raise ValueError(f"{name!r} is not a constant of the paper")
    return name


def _check_terms(terms: dict[str, float]) -> dict[str, float]:
    names = [field.name for field in fields(TheoremTerms)]
    require_fit(sorted(terms) == sorted(names), f"its terms must be {', '.join(names)}")
    return terms


class UnboundedRecord(Record):
    """Bounds may be infinite; these are written as null."""

    model_config = ConfigDict(allow_inf_nan=True)


class ConstantRecord(UnboundedRecord):
    """A constant of the paper: the maximum over ``samples`` measurements, or given (0 samples).

    ``spread`` is the standard deviation of the measurements.
    """

    value: Number
    samples: Whole = 0
    spread: Number = 0.0

    @classmethod
    def largest(cls, values: Sequence[float]) -> ConstantRecord:
        """A lower estimate of a supremum, from measurements."""
        return cls(value=max(values), samples=len(values), spread=float(np.std(values)))


class GradientErrors(UnboundedRecord):
    """The bias and error of a meta-gradient: their upper bounds μ_F and σ_F, or as measured."""

    bias: Number
    error: Number


class StepsRow(UnboundedRecord):
    """The bounds of all lemmas for a number of fine-tuning steps."""

    steps: Whole
    smoothness: Number
    largest_meta_lr: Number
    dissimilarity: Number
    errors: Annotated[dict[CurvatureName, GradientErrors], Field(min_length=3)]


class MeasuredErrors(UnboundedRecord):
    """Values measured at the final model."""

    bias: Number
    error: Number
    dissimilarity: Number


class Promise(UnboundedRecord):
    """The bound of Theorem 1, at ``meta_lr`` if admissible, else at the largest admissible value.

    ``trivial`` is (B·c^ν)², an upper bound on ‖∇F‖² at any model.
    """

    smoothness: Number
    meta_lr: Number
    largest_meta_lr: Number
    admissible: bool
    bias: Number
    error: Number
    dissimilarity: Number
    trivial: Number
    terms: Annotated[dict[str, Number], AfterValidator(_check_terms)]
    total: Number


class MethodBounds(UnboundedRecord):
    """A method's bound (None if the loss is not smooth) and its measured values."""

    method: str
    steps: Whole
    promised: Promise | None = None
    measured: MeasuredErrors | None = None


class NotCovered(UnboundedRecord):
    """A method that the bounds do not cover, and why."""

    method: str
    reason: str


class Stationarity(UnboundedRecord):
    """‖∇F(w)‖² of a method's model after a round."""

    method: str
    round: Whole
    value: Number


class BoundsRecord(UnboundedRecord):
    """``bounds.json``. ``by_steps`` uses the settings of ``by_steps_of``, the first method."""

    constants: dict[Annotated[str, AfterValidator(_check_constant)], ConstantRecord | None]
    smooth: bool
    seed: Whole | None = None
    uniform: bool
    by_steps_of: str
    by_steps: list[StepsRow]
    methods: list[MethodBounds]
    not_covered: list[NotCovered] = Field(default=[])
    stationarity: list[Stationarity] = Field(default=[])


def round_line(algorithm: Algorithm, progress: Progress) -> dict[str, Any]:
    """A round's cohort, rejected updates and cost, as a line of metrics.jsonl."""
    agents, sent = len(progress.cohort), algorithm.sent_in(progress.round)
    received = Downlink.of(to_send(algorithm, progress.server)).to(None)  # shapes are the same
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
        "bytes_down": agents * _bytes(received, received),
        "bytes_up": (agents - len(progress.dropped)) * update_bytes,
        **more,
    }


def _bytes(server: State, names: Iterable[str]) -> int:
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
        line["scales"] = [choice.scale for choice in evaluation.step_sizes.chosen]
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
