"""The step size of fine-tuning at use, chosen for every method on validation samples.

A model that was not trained for fine-tuning (FedAvg) has no step size of its own, and the best one
for a model that was (Per-FedAvg, gMeta) need not be the one that it was trained with. A comparison
at one step size for all methods is arbitrary. So for every number s of fine-tuning steps

    L(c) = mean over seen agents of the validation loss after s steps of size c·α

is computed on a grid of scales c, with α the step size as trained; L(0) is the loss without a step.
Validation parts are small, so the lowest L may be luck. One standard error decides: a scale is as
good as the best one if its loss is higher by at most the standard error of the paired difference,
over agents, or below ten agents over samples. Of the scales that are as good as the best, and do
not harm (L(c) < L(0), or c = 0), the choice is

    the first of 1, 0 and the best    for methods whose training uses α,
    the smallest                      for others.

Nothing is retrained and no test sample is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from nufed.algorithms.protocol import Algorithm
from nufed.evaluate.examples import Fit, Guesses
from nufed.evaluate.scores import ENOUGH_AGENTS, AgentScores, Measure

FACTOR = 3.0  # between neighbouring scales of the coarse grid
FINE = (1.5**-2, 1.5**-1, 1.5, 1.5**2)  # of a coarse scale, where the grid is refined
INITIAL_REACH = 2  # coarse scales on each side of the step size as trained, at first
MAX_REACH = 6  # upper bound on coarse scales on each side, when the grid is extended

Prefer: TypeAlias = Literal["trained", "smallest", "best"]
"""Which of the scales that are as good as the best is chosen; "best": the best one itself."""
EvalLr: TypeAlias = Literal["as_trained", "chosen", "chosen_by_round"]
Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
ByScale: TypeAlias = Callable[[Sequence[float]], list[list[AgentScores]]]
"""Scores agents for each of the given scales of the step size."""


def chooses(eval_lr: EvalLr, last: bool) -> bool:
    """Whether step sizes are chosen at an evaluation, of the ``last`` round or an earlier one."""
    return eval_lr == "chosen_by_round" or (last and eval_lr == "chosen")


@dataclass(frozen=True)
class ScaleChoice:
    """The scale that was chosen for one number of fine-tuning steps; 0: no step.

    ``score`` and ``loss`` are means over seen agents on validation samples; ``at_edge``: that
    scale is at the edge of the grid, so that a better one may lie beyond it. ``gain`` is the
    decrease of the loss by steps of the best scale, ``noise`` its standard error (None: unknown).
    """

    steps: int
    scale: float
    score: float
    loss: float
    at_edge: bool
    gain: float | None = None
    noise: float | None = None

    @property
    def undecided(self) -> bool:
        """Whether validation samples can't tell if any step gains."""
        return self.gain is not None and (self.noise is None or abs(self.gain) <= self.noise)


@dataclass(frozen=True)
class StepSizes:
    """The scales tried, the one chosen for each number of steps, and the cost of the choice.

    ``agents`` and ``samples`` are the numbers of those that it was made on.
    """

    tried: tuple[float, ...]
    chosen: tuple[ScaleChoice, ...]
    gradients: int
    hvps: int = 0
    agents: int = 0
    samples: int = 0

    def choice(self, steps: int) -> ScaleChoice | None:
        return next((choice for choice in self.chosen if choice.steps == steps), None)

    def scale(self, steps: int) -> float:
        """The scale for a number of steps; 1, as trained, where none was chosen."""
        choice = self.choice(steps)
        return 1.0 if choice is None else choice.scale

    def notes(self, steps: int) -> Iterator[str]:
        """Caveats about the choice for a number of steps."""
        choice = self.choice(steps)
        if choice is None:
            return
        if choice.at_edge:
            yield (
                "the chosen step size is at the edge of the search range (scale "
                f"{choice.scale:.3g}); a better one may lie outside."
            )
        if choice.undecided:
            noise = "" if choice.noise is None else f" ± {choice.noise:.2g}"
            used = "the one of training is used" if choice.scale else "no step is taken"
            yield (
                f"the validation part is too small to choose a step size: on {self.samples} "
                f"samples of {self.agents} agents the best one lowers the loss by "
                f"{choice.gain:.2g}{noise}; {used}."
            )
        elif choice.scale == 0:
            yield "no step size clearly lowers the loss on validation samples: no step is taken."


@dataclass(frozen=True)
class Evaluation:
    """Agents' scores with the step size as trained, and with the chosen one where there is one.

    ``gradients`` and ``hvps`` are the cost of the evaluation, including the choice; ``fits`` the
    curves of some agents' models, where models are curves, ``guesses`` those on some images.
    """

    as_trained: list[AgentScores]
    chosen: list[AgentScores] | None = None
    step_sizes: StepSizes | None = None
    gradients: int = 0
    hvps: int = 0
    fits: tuple[Fit, ...] = ()
    guesses: tuple[Guesses, ...] = ()

    def scale(self, steps: int) -> float:
        """The scale of the step size that results show after ``steps`` steps."""
        return self.step_sizes.scale(steps) if self.step_sizes else 1.0


def preferred(algorithm: Algorithm) -> Prefer:
    """Which scale is chosen for an algorithm where several are equally good."""
    return "trained" if algorithm.adaptation.steps else "smallest"


def evaluate_with_choice(
    score: ByScale,
    validate: ByScale | None,
    steps: int,
    measure: Measure,
    prefer: Prefer,
    at: Sequence[int] | None = None,
) -> Evaluation:
    """Score agents after 0, …, ``steps`` steps: as trained, and with step sizes chosen for each.

    Args:
        score: scores agents on the part to report, for each scale.
        validate: the same on validation samples; None: there are none to choose on.
        steps: maximum number of fine-tuning steps.
        measure: what agents are scored by.
        prefer: which of equally good scales is chosen.
        at: the numbers of steps that one is chosen for; all by default. Others are as trained.
    """
    sizes = None
    if validate is not None and steps:
        at = range(1, steps + 1) if at is None else at
        sizes = choose_step_sizes(validate, at, measure, prefer)
    if sizes is None:
        (only,) = score([1.0])
        return Evaluation(only, gradients=_gradients(only, steps, 1), hvps=_hvps(only))
    scales = sorted({1.0, *(choice.scale for choice in sizes.chosen)} - {0.0})
    by_scale = dict(zip(scales, score(scales), strict=True))
    gradients = sizes.gradients + _gradients(by_scale[1.0], steps, len(scales))
    hvps = sizes.hvps + _hvps(by_scale[1.0])
    # a step of size 0 is no step
    taken = [(sizes.scale(s) or 1.0, s if sizes.scale(s) else 0) for s in range(steps + 1)]
    chosen = [
        _assemble([(agent, s) for agent, (_, s) in zip(by_steps, taken, strict=True)])
        for by_steps in zip(*(by_scale[scale] for scale, _ in taken), strict=True)
    ]
    return Evaluation(by_scale[1.0], chosen, sizes, gradients, hvps)


def choose_step_sizes(
    validate: ByScale, steps: Sequence[int], measure: Measure, prefer: Prefer
) -> StepSizes | None:
    """The scale of the step size for every number of fine-tuning steps in ``steps``.

    The rule is that of the module; between equal losses the score decides, then the smaller scale.
    Coarse scales are powers of 3; the grid is extended on the side where a best one lies at its
    edge, up to 3⁶, then refined to factors of 1.5 around the best and above the largest scale that
    does not harm, where instability begins. A scale with which any agent diverges ranks last.

    Args:
        validate: scores agents on their validation samples, for each scale; agents without such
            samples are excluded, and so are those that do not reply for every scale.
        steps: the numbers of steps.
        measure: what agents are scored by.
        prefer: which of equally good scales is chosen; "best" is for training, whose loss without
            a step is unknown, on the coarse grid.

    Returns:
        The choices; None if there is no seen agent to choose on.
    """
    grid: dict[float, list[AgentScores]] = {}

    def extend(scales: Iterable[float]) -> dict[float, list[AgentScores]]:
        missing = sorted(set(scales) - grid.keys())
        scored = zip(missing, validate(missing), strict=True) if missing else ()
        return _always_scored({**grid, **dict(scored)})

    low, high = -INITIAL_REACH, INITIAL_REACH
    while True:
        grid = extend(FACTOR**k for k in range(low, high + 1))
        if not grid[1.0]:
            return None
        best = {_best(grid, s, measure) for s in steps}
        lower = low - (FACTOR**low in best and low > -MAX_REACH)
        higher = high + (FACTOR**high in best and high < MAX_REACH)
        if (lower, higher) == (low, high):
            break
        low, high = lower, higher
    ends = FACTOR**low, FACTOR**high
    centres = set() if prefer == "best" else best | {_largest_harmless(grid, s) for s in steps}
    fine = (centre * factor for centre in centres for factor in FINE)
    grid = extend(scale for scale in fine if ends[0] < scale < ends[1])
    if not grid[1.0]:
        return None
    return StepSizes(
        tried=tuple(sorted(grid)),
        chosen=tuple(_choose(grid, s, measure, prefer, ends) for s in steps),
        gradients=_gradients(grid[1.0], max(steps), len(grid)),
        hvps=_hvps(grid[1.0]),
        agents=len(grid[1.0]),
        samples=sum(agent.test_samples for agent in grid[1.0]),
    )


def _choose(
    grid: Mapping[float, list[AgentScores]],
    steps: int,
    measure: Measure,
    prefer: Prefer,
    ends: tuple[float, float],
) -> ScaleChoice:
    """The rule of this module for one number of steps."""
    best = _best(grid, steps, measure)
    if prefer == "best" or not steps:
        score, loss = _means(grid[best], steps)
        return ScaleChoice(steps, best, score, loss, at_edge=best in ends)
    # the model without a step is the first of every scale
    entries = {0.0: (grid[1.0], 0), **{scale: (grid[scale], steps) for scale in sorted(grid)}}
    losses = {scale: _losses(*entry) for scale, entry in entries.items()}
    means = {scale: _or_inf(_means(*entry)[1]) for scale, entry in entries.items()}
    gain, noise = means[0.0] - means[best], _standard_error(losses[0.0], losses[best])
    leader = best if gain > 0 else 0.0

    def as_good(scale: float) -> bool:
        harms = scale != 0 and not means[scale] < means[0.0]
        gap = means[scale] - means[leader]
        return not harms and gap <= _standard_error(losses[scale], losses[leader])

    # of a model that diverged at every scale, no gap is defined
    equal = [scale for scale in entries if scale == leader or as_good(scale)]
    order = (1.0, 0.0, leader) if prefer == "trained" else sorted(entries)
    scale = next(scale for scale in order if scale in equal)
    score, loss = _means(*entries[scale])
    return ScaleChoice(steps, scale, score, loss, scale in ends, _or_none(gain), _or_none(noise))


def _gradients(scores: Sequence[AgentScores], steps: int, scales: int) -> int:
    """The gradients of scoring these agents: fine-tuning per scale, personal models once."""
    return len(scores) * steps * scales + sum(s.personal_gradients for s in scores)


def _hvps(scores: Sequence[AgentScores]) -> int:
    """The Hessian-vector products of scoring these agents: those of their personal models."""
    return sum(s.personal_hvps for s in scores)


def _always_scored(grid: Mapping[float, list[AgentScores]]) -> dict[float, list[AgentScores]]:
    """The scores of the seen agents that have one for every scale."""
    agents = [{s.agent for s in scores if s.seen} for scores in grid.values()]
    always = set.intersection(*agents)
    return {c: [s for s in scores if s.agent in always] for c, scores in grid.items()}


def _best(grid: Mapping[float, Sequence[AgentScores]], steps: int, measure: Measure) -> float:
    """The scale with the lowest mean loss; the score breaks ties, then the smaller scale."""

    def rank(scale: float) -> tuple[float, float, float]:
        score, loss = _means(grid[scale], steps)
        return _or_inf(loss), _or_inf(-score if measure.higher_is_better else score), scale

    return min(grid, key=rank)


def _largest_harmless(grid: Mapping[float, Sequence[AgentScores]], steps: int) -> float:
    """The largest scale with which the loss is not above that without a step; else 1."""
    limit = _or_inf(_means(grid[1.0], 0)[1])
    return max((c for c in grid if _or_inf(_means(grid[c], steps)[1]) <= limit), default=1.0)


def _losses(scores: Sequence[AgentScores], steps: int) -> Array:
    """The losses of agents; below ten agents those of groups of their samples, if known."""
    if len(scores) >= ENOUGH_AGENTS or not all(agent.group_loss for agent in scores):
        return np.array([agent.loss[steps] for agent in scores])
    return np.concatenate([agent.group_loss[steps] for agent in scores])


def _standard_error(losses: Array, others: Array) -> float:
    """The standard error of the mean paired difference; infinite where it is unknown."""
    if len(losses) < 2:
        return math.inf
    with np.errstate(invalid="ignore"):  # of diverged models
        spread = (losses - others).std(ddof=1)
    return _or_inf(float(spread / math.sqrt(len(losses))))


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _means(scores: Sequence[AgentScores], steps: int) -> tuple[float, float]:
    """Mean score and loss over agents."""
    score, loss = np.mean([(s.score[steps], s.loss[steps]) for s in scores], axis=0).tolist()
    return score, loss


def _assemble(by_steps: Sequence[tuple[AgentScores, int]]) -> AgentScores:
    """One agent's record, whose entry after s steps is that of the s-th record and step number."""

    def pick(name: str) -> tuple[Any, ...]:
        values = [(getattr(scores, name), steps) for scores, steps in by_steps]
        return tuple(curve[steps] for curve, steps in values) if values[0][0] else ()

    return replace(
        by_steps[0][0],
        loss=pick("loss"),
        score=pick("score"),
        balanced=pick("balanced"),
        minority=pick("minority"),
        resampled=pick("resampled"),
    )
