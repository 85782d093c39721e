"""The step size of fine-tuning at evaluation, chosen for every method on validation samples.

A model that was not trained for fine-tuning (FedAvg) has no step size of its own, and the best one
for a model that was (Per-FedAvg, gMeta) need not be the one that it was trained with. Comparing
methods at one step size for all compares luck. So for every number s of fine-tuning steps the scale

    c_s = argmax_{c = 3^k}  mean over seen agents of the validation score after s steps of size c·α

is chosen, with α the step size as trained. Nothing is trained again and no test sample is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from nufed.evaluate.scores import AgentScores, Measure

FACTOR = 3.0  # between neighbouring step sizes
FIRST_REACH = 2  # factors tried on each side of the step size as trained, to begin with
LAST_REACH = 6  # factors on each side after which the grid is not extended any more

EvalLr: TypeAlias = Literal["as_trained", "chosen", "chosen_by_round"]
ByScale: TypeAlias = Callable[[Sequence[float]], list[list[AgentScores]]]
"""The scores of agents for each of some scales of the step size."""


def chooses(eval_lr: EvalLr, last: bool) -> bool:
    """Whether step sizes are chosen at an evaluation, of the ``last`` round or an earlier one."""
    return eval_lr == "chosen_by_round" or (last and eval_lr == "chosen")


@dataclass(frozen=True)
class ScaleChoice:
    """The scale that was chosen for one number of fine-tuning steps.

    ``score`` and ``loss`` are means over seen agents on validation samples; ``at_edge`` says that
    the best scale is the last one tried, so that a better one may lie beyond.
    """

    steps: int
    scale: float
    score: float
    loss: float
    at_edge: bool


@dataclass(frozen=True)
class StepSizes:
    """The scales tried, the one chosen for each number of steps, and the gradients it took."""

    tried: tuple[float, ...]
    chosen: tuple[ScaleChoice, ...]
    gradients: int

    def scale(self, steps: int) -> float:
        """The scale for so many steps; as trained where none was chosen."""
        return next((own.scale for own in self.chosen if own.steps == steps), 1.0)

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """Agents' scores with the step size as trained, and with the chosen one where there is one.

    ``gradients`` is what the evaluation took, choosing included.
    """

    as_trained: list[AgentScores]
    chosen: list[AgentScores] | None = None
    step_sizes: StepSizes | None = None
    gradients: int = 0


def evaluate_with_choice(
    score: ByScale, validate: ByScale | None, steps: int, measure: Measure
) -> Evaluation:
    """Score agents after 0, …, ``steps`` steps: as trained, and with step sizes chosen for each.

    Args:
        score: scores agents on the part to report, for each of some scales.
        validate: the same on validation samples; None: there are none to choose on.
        steps: the most fine-tuning steps.
        measure: what agents are scored by.
    """
    if validate is None or not steps:
        (only,) = score([1.0])
        return Evaluation(only, gradients=len(only) * steps)
    sizes = choose_step_sizes(validate, range(1, steps + 1), measure)
    if sizes is None:
        return evaluate_with_choice(score, None, steps, measure)
    scales = sorted({1.0, *(own.scale for own in sizes.chosen)})
    found = dict(zip(scales, score(scales), strict=True))
    by_steps = zip(*(found[sizes.scale(s)] for s in range(steps + 1)), strict=True)
    gradients = sizes.gradients + len(found[1.0]) * steps * len(scales)
    return Evaluation(found[1.0], [_assemble(own) for own in by_steps], sizes, gradients)


def choose_step_sizes(
    validate: ByScale, steps: Sequence[int], measure: Measure
) -> StepSizes | None:
    """The scale of the step size for every number of fine-tuning steps in ``steps``.

    It is the one with the best mean validation score over seen agents; of equal ones that with the
    lower mean loss, then the smaller. Scales are powers of 3; the grid is extended on the side
    where a best one lies at its edge, up to 3⁶. A scale with which an agent diverges is worse than
    any with which none does.

    Args:
        validate: scores agents on their validation samples, for each of some scales; agents
            without such samples are left out, and so is one that does not answer every time.
        steps: the numbers of steps.
        measure: what agents are scored by.

    Returns:
        What was chosen; None if there is no seen agent to choose on.
    """
    found: dict[int, list[AgentScores]] = {}
    wanted = range(-FIRST_REACH, FIRST_REACH + 1)
    while len(wanted) > len(found):
        missing = [k for k in wanted if k not in found]
        found |= zip(missing, validate([FACTOR**k for k in missing]), strict=True)
        found = _answering(found)
        if not found[0]:
            return None
        best = _best(found, steps, measure)
        low, high = min(found), max(found)
        lower = low - (low in best.values() and low > -LAST_REACH)
        higher = high + (high in best.values() and high < LAST_REACH)
        wanted = range(lower, higher + 1)
    return StepSizes(
        tried=tuple(FACTOR**k for k in sorted(found)),
        chosen=tuple(
            ScaleChoice(s, FACTOR**k, *_means(found[k], s), at_edge=k in (low, high))
            for s, k in best.items()
        ),
        gradients=len(found[0]) * max(steps) * len(found),
    )


def _answering(found: Mapping[int, list[AgentScores]]) -> dict[int, list[AgentScores]]:
    """The scores of the seen agents that have some with every scale."""
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
    """One agent's record whose s-th entries are those of the s-th record."""

    def pick(name: str) -> tuple[float, ...]:
        values = [getattr(scores, name) for scores in by_steps]
        return tuple(own[s] for s, own in enumerate(values)) if values[0] else ()

    return replace(
        by_steps[0],
        loss=pick("loss"),
        score=pick("score"),
        balanced=pick("balanced"),
        minority=pick("minority"),
    )
