"""Fine-tuning on a user's data, its effect by cross-validation, and the adapted model in a file.

In cross-validation each fold is scored by a model that was fine-tuned on the others, so that every
sample is scored once by a model that never saw it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from nufed.data import Federation, Samples, Split
from nufed.data.samples import scaled
from nufed.errors import InputError
from nufed.lab.bundle.about import About, InputsAbout, read_about
from nufed.lab.bundle.building import MissingPartError, build_model, build_personal, stored_state
from nufed.lab.files import unseal, write_sealed
from nufed.meta.fine_tuning import trajectory
from nufed.objective import Inputs
from nufed.objective.modules import logits_of
from nufed.seeding import stream

if TYPE_CHECKING:
    from nufed.lab.bundle.bundle import Bundle

FOLDS = 5
ENOUGH = 10  # samples from which a verdict is given
MAX_GROUPS = 500  # of samples, whose losses are compared
Array = np.ndarray[Any, Any]
Verdict: TypeAlias = Literal["helped", "harmed", "majority", "undecided"]


@dataclass(frozen=True)
class Score:
    """The mean loss on held-out samples, and for classes the accuracy."""

    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Report:
    """The effect of adapting, measured on held-out samples.

    Args:
        samples: number of samples.
        steps: the fine-tuning steps taken.
        chosen: whether cross-validation chose that number.
        curve: the scores after 0, 1, … steps.
        gain: the mean decrease of the loss over samples.
        noise: its standard error.
        majority: the accuracy of always predicting the most frequent class.
        outside: a sentence, if the inputs are on another scale than those of training.
        refused: whether the model is returned unadapted, because adapting harms.
    """

    samples: int
    steps: int
    chosen: bool
    curve: tuple[Score, ...]
    gain: float
    noise: float
    majority: float | None
    outside: str | None = None
    refused: bool = False

    @property
    def before(self) -> Score:
        return self.curve[0]

    @property
    def after(self) -> Score:
        return self.curve[self.steps]

    @property
    def verdict(self) -> Verdict:
        """Whether adapting helped.

        "undecided" with fewer than ten samples, or inputs on another scale than those of training;
        "harmed", if the loss rose by more than two standard errors; "majority", if the adapted
        model is not more accurate than always predicting the most frequent class; "helped", if the
        loss fell by more than two standard errors; else "undecided".
        """
        if self.samples < ENOUGH or self.outside is not None:
            return "undecided"
        if self.gain < -2 * self.noise:
            return "harmed"
        accuracy = self.after.accuracy
        if accuracy is not None and self.majority is not None and accuracy <= self.majority:
            return "majority"
        return "helped" if self.gain > 2 * self.noise else "undecided"

    @property
    def helped(self) -> bool:
        return self.verdict == "helped"

    def words(self) -> list[str]:
        """The report as sentences."""
        steps = f"{self.steps} fine-tuning step{'s' * (self.steps != 1)}"
        how = f"chosen by cross-validation from 0 … {len(self.curve) - 1}" if self.chosen else ""
        lines = [f"{self.samples} samples, {steps}" + (f", {how}" if how else "")]
        change = f"loss {self.before.loss:.3f} → {self.after.loss:.3f}"
        if self.before.accuracy is not None and self.after.accuracy is not None:
            right = f"accuracy {self.before.accuracy:.1%} → {self.after.accuracy:.1%}"
            change = f"{right}, {change}"
        lines.append(f"on held-out samples: {change}")
        if self.steps == 0:
            reason = "no number of steps is significantly better: " if self.chosen else ""
            lines.append(f"{reason}the model is left unchanged")
        return [*lines, *self._judged()]

    def _judged(self) -> Iterator[str]:
        """The verdict as a sentence."""
        if self.outside is not None:
            yield "can't be told whether adapting helped: the inputs are far from those of training"
        elif self.samples < ENOUGH and self.steps:
            yield (
                f"can't be told whether adapting helped: there are {self.samples} samples, and "
                f"{ENOUGH} or more are needed"
            )
        elif self.verdict == "majority":
            yield (
                "no better than always predicting the most frequent class (accuracy "
                f"{self.majority:.1%}): don't use it as it is; more samples or steps may help"
            )
        elif self.steps:
            yield {
                "helped": "adapting helped: the loss decreased significantly",
                "harmed": "adapting harmed: the loss increased significantly"
                + "; this model is the unadapted one" * self.refused,
                "undecided": "can't be told whether adapting helped: the change of the loss is "
                "within noise",
            }[self.verdict]


def fine_tuned(
    bundle: Bundle, samples: Samples, rows: Array | range, steps: int, seed: int, times: float = 1.0
) -> Iterator[Tensor]:
    """The models after 0, 1, … ``steps`` fine-tuning steps on these rows, of size ``times``·α."""
    none = np.empty(0, dtype=np.int64)
    split = Split([np.asarray(rows)], [none], [none], ("own",))
    batches = Federation(samples, split, "use_all").batches(0, seed, "own")
    drawn = batches.draw("adapt", bundle.about.adapt.batch_size, steps)
    return trajectory(bundle.objective, bundle.objective.initial(), drawn, times * bundle.rate())


def cross_validate(
    bundle: Bundle,
    samples: Samples,
    steps: int | Literal["auto"],
    most: int,
    seed: int,
    outside: str | None = None,
) -> Report:
    """The effect of fine-tuning on held-out samples; ``"auto"`` also chooses ``steps``."""
    last = most if steps == "auto" else steps
    order = stream(seed, "folds").permutation(len(samples))
    folds = np.array_split(order, min(FOLDS, len(samples)))
    scored = [_score_fold(bundle, samples, fold, order, last, seed) for fold in folds]
    losses = np.concatenate([loss for loss, _ in scored])
    right = np.concatenate([right for _, right in scored])
    answers, majority = right[:, :-1], right[:, -1:]
    taken = choose_steps(losses, answers if samples.classes else -losses)
    taken = taken if steps == "auto" else steps
    gains = losses[:, 0] - losses[:, taken]
    shares: Any = answers.mean(axis=0) if samples.classes else [None] * (last + 1)
    return Report(
        samples=len(samples),
        steps=taken,
        chosen=steps == "auto",
        curve=tuple(
            Score(float(loss), None if share is None else float(share))
            for loss, share in zip(losses.mean(axis=0), shares, strict=True)
        ),
        gain=float(gains.mean()),
        noise=_standard_error(gains),
        majority=float(majority.mean()) if samples.classes else None,
        outside=outside,
    )


def choose_steps(losses: Array, scores: Array) -> int:
    """The number of steps with the lowest loss among those whose score equals the best.

    Equal means within one standard error of the difference. ``scores`` (higher is better) and
    ``losses`` have a column per number of steps; a row is a sample or a group of samples.
    """
    gaps = scores[:, [int(np.nan_to_num(scores.mean(axis=0), nan=-np.inf).argmax())]] - scores
    noise = gaps.std(axis=0, ddof=1) / np.sqrt(len(gaps))
    means = np.nan_to_num(losses.mean(axis=0), nan=np.inf)
    return int(np.where(gaps.mean(axis=0) <= noise, means, np.inf).argmin())


def _score_fold(
    bundle: Bundle, samples: Samples, fold: Array, order: Array, last: int, seed: int
) -> tuple[Array, Array]:
    """Losses on a fold (groups of samples × steps), and whether predictions are right (samples ×
    steps); the last column of the second is for the most frequent class of the other folds.
    """
    others = np.setdiff1d(order, fold)
    inputs, targets = samples.take(fold)
    groups = torch.arange(len(fold)).tensor_split(min(len(fold), MAX_GROUPS // FOLDS))
    losses, right = [], []
    for w in fine_tuned(bundle, samples, others, last, seed):
        outputs = bundle.objective.predict(w, inputs)
        losses.append([float(bundle.objective.loss(outputs[g], targets[g])) for g in groups])
        if samples.classes:
            right.append((outputs.argmax(dim=1) == targets).numpy())
    if samples.classes:
        most = torch.bincount(samples.targets[others]).argmax()
        right.append((targets == most).numpy())
    return np.array(losses).T, np.array(right, dtype=float).T.reshape(len(fold), -1)


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


class Prediction(NamedTuple):
    """A prediction for one sample: a class and its probability, or numbers."""

    answer: str | list[float]
    probability: float | None


class Prepare(nn.Module):
    """Preprocessing: converts raw inputs to the model's shape, scale and dtype."""

    def __init__(self, inputs: InputsAbout, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.scale, self.shift = tuple(inputs.shape), inputs.scale, inputs.shift
        self.input_dtype: torch.dtype = getattr(torch, inputs.dtype)
        self.model_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x.to(self.input_dtype), self.scale, self.shift).reshape(x.shape[0], *self.shape)
        return x.to(self.model_dtype) if x.is_floating_point() else x


class PrepareSeveral(nn.Module):
    """Prepares several inputs, and holds the model that takes them."""

    def __init__(self, about: About, model: nn.Module) -> None:
        super().__init__()
        dtype = getattr(torch, about.dtype)
        self.names = about.names
        self.prepare = nn.ModuleList(Prepare(one, dtype) for one in about.formats.values())
        self.model = model

    def forward(self, *arrays: Tensor, **named: Tensor) -> Any:
        given = [named[name] for name in self.names] if named else arrays
        changed = [change(x) for change, x in zip(self.prepare, given, strict=True)]
        if not named:
            return self.model(*changed)
        return self.model(**dict(zip(self.names, changed, strict=True)))


def prepared(about: About, module: nn.Module) -> nn.Module:
    """The module with preprocessing, which takes raw inputs."""
    if about.names:
        return PrepareSeveral(about, module).eval()
    before = Prepare(about.inputs, getattr(torch, about.dtype))
    return nn.Sequential(OrderedDict(prepare=before, model=module)).eval()


@dataclass(frozen=True)
class Adapted:
    """A model for one agent.

    Args:
        about: the metadata of its bundle.
        module: takes raw inputs, as ``adapt`` does, in the units of the data; of a table those that
            ``about.preparation`` makes of its columns.
        report: the effect of adapting; None for a model that was not adapted.
    """

    about: About
    module: nn.Module
    report: Report | None

    def predict(self, inputs: Any) -> list[Prediction]:
        """The model's prediction for every sample; warns of inputs on another scale."""
        given = self.about.read_inputs(inputs)
        self.about.warn_outside(given)
        return self._predict(given)

    def _predict(self, given: Inputs) -> list[Prediction]:
        with torch.no_grad():
            if isinstance(given, Tensor):
                outputs = logits_of(self.module(given))
            elif isinstance(given, Mapping):
                outputs = logits_of(self.module(**given))
            else:
                outputs = logits_of(self.module(*given))
        if not self.about.classes:
            return [Prediction(row.reshape(-1).tolist(), None) for row in outputs]
        probabilities = outputs.softmax(dim=1)
        best, numbers = probabilities.max(dim=1)
        return [
            Prediction(self.about.classes[number], probability)
            for number, probability in zip(numbers.tolist(), best.tolist(), strict=True)
        ]

    def save(self, path: str | Path) -> Path:
        """Write it as one sealed, self-contained safetensors file."""
        about = {
            "adapted": self.about.model_dump(mode="json"),
            "report": None if self.report is None else asdict(self.report),
        }
        write_sealed(
            Path(path), about, stored_state(self.about, self.module.get_submodule("model"))
        )
        return Path(path)


def load_adapted(
    path: str | Path,
    *,
    trust: bool = False,
    module: nn.Module | None = None,
    base: str | None = None,
) -> Adapted:
    """Read a model written by :meth:`Adapted.save`; runs no code from the file.

    Args:
        path: the file.
        trust, module, base: as for :func:`nufed.load_bundle`.
    """
    path = Path(path)
    try:
        sealed = unseal(path.read_bytes())
        about = read_about(sealed.about["adapted"])
        if about.personal is None:
            built = build_model(about, sealed.tensors, trust, module, base)
        else:
            built = build_personal(about, about.personal, sealed.tensors, trust, module, base)
        adapted = Adapted(about, prepared(about, built), _report(sealed.about["report"]))
        if about.personal is not None:  # its tensors may be anything
            adapted._predict(about.zeros(1))
    except MissingPartError as error:
        raise InputError(f"{path} can't be loaded: {error}") from error
    except Exception as error:  # a foreign or crafted file may raise anything
        reason = "it does not contain an adapted model" if isinstance(error, KeyError) else error
        raise InputError(
            f"{path} can't be used as an adapted model ({reason}): make it with `nufed adapt`"
        ) from error
    return adapted


def _report(record: dict[str, Any] | None) -> Report | None:
    if record is None:
        return None
    curve: Sequence[dict[str, Any]] = record["curve"]
    return Report(**{**record, "curve": tuple(Score(**score) for score in curve)})
