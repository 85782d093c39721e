"""The step size of fine-tuning at evaluation, chosen for every method on validation samples.

A model that was not trained for fine-tuning (FedAvg) has no step size of its own, and the best one
for a model that was (Per-FedAvg, gMeta) need not be the one that it was trained with. A comparison
at one step size for all methods is arbitrary. So for every number s of fine-tuning steps the scale

    c_s = argmax_{c = 3^k}  mean over seen agents of the validation score after s steps of size c·α

is chosen, with α the step size as trained. Nothing is retrained and no test sample is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from nufed.evaluate.fits import Fit
from nufed.evaluate.scores import AgentScores, Measure

FACTOR = 3.0  # between neighbouring step sizes of the grid
INITIAL_REACH = 2  # grid points on each side of the step size as trained, at first
MAX_REACH = 6  # upper bound on grid points on each side, when the grid is extended

EvalLr: TypeAlias = Literal["as_trained", "chosen", "chosen_by_round"]
ByScale: TypeAlias = Callable[[Sequence[float]], list[list[AgentScores]]]
"""Scores agents for each of the given scales of the step size."""


def chooses(eval_lr: EvalLr, last: bool) -> bool:
    """Whether step sizes are chosen at an evaluation, of the ``last`` round or an earlier one."""
    return eval_lr == "chosen_by_round" or (last and eval_lr == "chosen")


@dataclass(frozen=True)
class ScaleChoice:
    """The scale that was chosen for one number of fine-tuning steps.

    ``score`` and ``loss`` are means over seen agents on validation samples; ``at_edge``: the best
    scale is at the edge of the grid, so that a better one may lie beyond it.
    """

    steps: int
    scale: float
    score: float
    loss: float
    at_edge: bool


@dataclass(frozen=True)
class StepSizes:
    """The scales tried, the one chosen for each number of steps, and the cost of the choice."""

    tried: tuple[float, ...]
    chosen: tuple[ScaleChoice, ...]
    gradients: int
    hvps: int = 0

    def scale(self, steps: int) -> float:
        """The scale for a number of steps; 1, as trained, where none was chosen."""
        return next((own.scale for own in self.chosen if own.steps == steps), 1.0)

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """Agents' scores with the step size as trained, and with the chosen one where there is one.

    ``gradients`` and ``hvps`` are the cost of the evaluation, including the choice; ``fits`` the
    curves of some agents' models, where models are curves.
    """

    as_trained: list[AgentScores]
    chosen: list[AgentScores] | None = None
    step_sizes: StepSizes | None = None
    gradients: int = 0
    hvps: int = 0
    fits: tuple[Fit, ...] = ()

    def scale(self, steps: int) -> float:
        """The scale of the step size that results show after ``steps`` steps."""
        return self.step_sizes.scale(steps) if self.step_sizes else 1.0


def evaluate_with_choice(
    score: ByScale, validate: ByScale | None, steps: int, measure: Measure
) -> Evaluation:
    """Score agents after 0, …, ``steps`` steps: as trained, and with step sizes chosen for each.

    Args:
        score: scores agents on the part to report, for each scale.
        validate: the same on validation samples; None: there are none to choose on.
        steps: maximum number of fine-tuning steps.
        measure: what agents are scored by.
    """
    if validate is None or not steps:
        (only,) = score([1.0])
        return Evaluation(only, gradients=_gradients(only, steps, 1), hvps=_hvps(only))
    sizes = choose_step_sizes(validate, range(1, steps + 1), measure)
    if sizes is None:
        return evaluate_with_choice(score, None, steps, measure)
    scales = sorted({1.0, *(own.scale for own in sizes.chosen)})
    found = dict(zip(scales, score(scales), strict=True))
    by_steps = zip(*(found[sizes.scale(s)] for s in range(steps + 1)), strict=True)
    gradients = sizes.gradients + _gradients(found[1.0], steps, len(scales))
    hvps = sizes.hvps + _hvps(found[1.0])
    return Evaluation(found[1.0], [_assemble(own) for own in by_steps], sizes, gradients, hvps)


def choose_step_sizes(
    validate: ByScale, steps: Sequence[int], measure: Measure
) -> StepSizes | None:
    """The scale of the step size for every number of fine-tuning steps in ``steps``.

    It is the one with the best mean validation score over seen agents; ties go to the lower mean
    loss, then to the smaller scale. Scales are powers of 3; the grid is extended on the side where
    a best one lies at its edge, up to 3⁶. A scale with which any agent diverges ranks below all
    with which none does.

    Args:
        validate: scores agents on their validation samples, for each scale; agents without such
            samples are excluded, and so are those that do not reply for every scale.
        steps: the numbers of steps.
        measure: what agents are scored by.

    Returns:
        The choices; None if there is no seen agent to choose on.
    """
    found: dict[int, list[AgentScores]] = {}
    wanted = range(-INITIAL_REACH, INITIAL_REACH + 1)
    while len(wanted) > len(found):
        missing = [k for k in wanted if k not in found]
        found |= zip(missing, validate([FACTOR**k for k in missing]), strict=True)
        found = _always_scored(found)
        if not found[0]:
            return None
        best = _best(found, steps, measure)
        low, high = min(found), max(found)
        lower = low - (low in best.values() and low > -MAX_REACH)
        higher = high + (high in best.values() and high < MAX_REACH)
        wanted = range(lower, higher + 1)
    return StepSizes(
        tried=tuple(FACTOR**k for k in sorted(found)),
        chosen=tuple(
            ScaleChoice(s, FACTOR**k, *_means(found[k], s), at_edge=k in (low, high))
            for s, k in best.items()
        ),
        gradients=_gradients(found[0], max(steps), len(found)),
        hvps=_hvps(found[0]),
    )


def _gradients(scores: Sequence[AgentScores], steps: int, scales: int) -> int:
    """The gradients of scoring these agents: fine-tuning per scale, personal models once."""
    return len(scores) * steps * scales + sum(s.personal_gradients for s in scores)


def _hvps(scores: Sequence[AgentScores]) -> int:
    """The Hessian-vector products of scoring these agents: those of their personal models."""
    return sum(s.personal_hvps for s in scores)


def _always_scored(found: Mapping[int, list[AgentScores]]) -> dict[int, list[AgentScores]]:
    """The scores of the seen agents that have one for every scale."""
    agents = [{s.agent for s in scores if s.seen} for scores in found.values()]
    always = set.intersection(*agents)
    return {k: [s for s in scores if s.agent in always] for k, scores in found.items()}


def _best(
    found: Mapping[int, Sequence[AgentScores]], steps: Sequence[int], measure: Measure
) -> dict[int, int]:
    """The exponent of the best scale, by number of steps."""

    def rank(k: int, s: int) -> tuple[float, float, int]:
        score, loss = _means(found[k], s)
        score = score if measure.higher_is_better else -score
        return _or_worst(score), _or_worst(-loss), -k

    return {s: max(found, key=lambda k: rank(k, s)) for s in steps}


def _or_worst(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _means(scores: Sequence[AgentScores], steps: int) -> tuple[float, float]:
    """Mean score and loss over agents."""
    score, loss = np.mean([(s.score[steps], s.loss[steps]) for s in scores], axis=0).tolist()
    return score, loss


def _assemble(by_steps: Sequence[AgentScores]) -> AgentScores:
    """One agent's record whose s-th entries come from the s-th record."""

    def pick(name: str) -> tuple[Any, ...]:
        values = [getattr(scores, name) for scores in by_steps]
        return tuple(own[s] for s, own in enumerate(values)) if values[0] else ()

    return replace(
        by_steps[0],
        loss=pick("loss"),
        score=pick("score"),
        balanced=pick("balanced"),
        minority=pick("minority"),
        resampled=pick("resampled"),
    )
