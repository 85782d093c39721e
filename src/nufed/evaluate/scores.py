"""How good models are for agents: before adaptation, after each step of it, and beside baselines.

Every agent adapts on its training part and is scored on its test part (or, for choices, on its
validation part). What adapts never sees test data: :meth:`Algorithm.personalize` gets batches of
the training part and yields models, and only the functions here look at what they are scored on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.algorithm import Algorithm, State
from nufed.data import Federation
from nufed.errors import InputError
from nufed.objective import Objective

Metric: TypeAlias = Callable[[Tensor, Tensor], float | Tensor]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of targets whose class has the largest output; NaN if an output is not finite.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    0.5
    """
    if outputs.ndim != 2 or outputs.shape[1] < 2 or int(targets.max()) >= outputs.shape[1]:
        raise InputError(
            f"accuracy needs one output per class, and the model gives outputs of shape "
            f"{tuple(outputs.shape)} for classes up to {int(targets.max())}: change the model, or "
            "give a metric of your own"
        )
    if not torch.isfinite(outputs).all():
        return float("nan")  # argmax would call it class 0
    return int((outputs.argmax(dim=1) == targets).sum()) / len(targets)


@dataclass(frozen=True)
class Measure:
    """What agents are scored by: the user's metric (more is better), or else the loss (less is)."""

    name: str
    metric: Metric | None = accuracy

    @property
    def higher_is_better(self) -> bool:
        return self.metric is not None


@dataclass(frozen=True)
class AgentScores:
    """One agent's test loss and score after 0, 1, … fine-tuning steps.

    For classes also what accuracy hides where one class is frequent: ``balanced`` is the mean over
    the agent's classes of the accuracy on each; ``minority`` the accuracy on its
    ``minority_samples`` test samples that are not of its most frequent training class (not a
    number if there are none).
    """

    agent: int
    name: str
    seen: bool
    train_samples: int
    test_samples: int
    loss: tuple[float, ...]
    score: tuple[float, ...]
    balanced: tuple[float, ...] = ()
    minority: tuple[float, ...] = ()
    minority_samples: int = 0

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """Scores over agents, after one number of fine-tuning steps."""

    agents: int
    mean: float
    weighted_mean: float
    std: float
    deciles: tuple[float, ...]
    worst_tenth: float
    harmed: float
    loss: float
    balanced: float
    minority: float


def evaluate_agent(
    algorithm: Algorithm,
    objective: Objective,
    federation: Federation,
    agent: int,
    server: State,
    state: State,
    *,
    seed: int,
    steps: int,
    measure: Measure,
    scale: float = 1.0,
) -> AgentScores:
    """Personalise the server's model for one agent and score it on what was kept back.

    The batches of fine-tuning depend on seed and agent only, so that methods and rounds are
    compared on the same ones. ``scale`` multiplies the step size of fine-tuning.
    """
    batches = federation.batches(agent, seed, "evaluate")
    models = algorithm.personalize(objective, server, state, batches, steps, scale)
    inputs, _ = federation.scored(agent)
    outputs = (objective.predict(w, inputs) for w in models)
    return score_agent(objective, federation, agent, outputs, measure)


def majority_class(federation: Federation, agent: int, steps: int) -> AgentScores:
    """The null baseline of always answering the agent's most frequent training class.

    It has no loss and nothing to fine-tune: the same score stands for every step.
    """
    targets = federation.samples.targets[federation.scored_rows(agent)]
    answer = torch.tensor(_most_frequent(federation, agent)).expand(len(targets))
    right = float((targets == answer).double().mean())
    scored = [(float("nan"), right, *_by_class(answer, targets, int(answer[0])))]
    return _record(federation, agent, scored * (steps + 1))


def summarise(scores: Iterable[AgentScores], step: int, measure: Measure) -> Summary:
    """Mean, spread, worst tenth and share of harmed agents after ``step`` fine-tuning steps.

    ``worst_tenth`` is the mean of the worst ⌈n/10⌉ agents; an agent is harmed if its score after
    the steps is worse than before; ``minority`` is over the minority samples of all agents.
    """
    scores = list(scores)
    after = np.array([s.score[step] for s in scores])
    before = np.array([s.score[0] for s in scores])
    sign = 1 if measure.higher_is_better else -1
    tenth = -(-len(scores) // 10)
    after[~np.isfinite(after)] = np.nan  # diverged, and shown so
    ranked = np.sort(np.nan_to_num(sign * after, nan=-np.inf))  # not a number is worst
    return Summary(
        agents=len(scores),
        mean=float(after.mean()),
        weighted_mean=float(np.average(after, weights=[s.test_samples for s in scores])),
        std=float(after.std()),
        deciles=tuple(np.quantile(after, np.linspace(0, 1, 11)).tolist()),
        worst_tenth=float(sign * ranked[:tenth].mean()),
        harmed=float((~(sign * after >= sign * before)).mean()),  # not a number: harmed
        loss=float(np.mean([s.loss[step] for s in scores])),
        balanced=float(np.mean([s.balanced[step] if s.balanced else np.nan for s in scores])),
        minority=_pooled_minority(scores, step),
    )


def score_agent(
    objective: Objective,
    federation: Federation,
    agent: int,
    outputs: Iterable[Tensor],
    measure: Measure,
) -> AgentScores:
    """An agent's record from its models' outputs on what it is scored on, after 0, 1, … steps."""
    targets = federation.samples.targets[federation.scored_rows(agent)]
    by_class = measure.metric is accuracy and bool(federation.samples.classes)
    most = _most_frequent(federation, agent) if by_class else None
    scored = [_scores(objective, each, targets, measure, most) for each in outputs]
    return _record(federation, agent, scored)


def _scores(
    objective: Objective, outputs: Tensor, targets: Tensor, measure: Measure, most: int | None
) -> tuple[float, ...]:
    """Loss and score, and for classes balanced and minority accuracy."""
    loss = float(objective.loss(outputs, targets))
    if measure.metric is None:
        return loss, loss
    outputs = outputs.to(targets.device)
    score = float(measure.metric(outputs, targets))
    if most is None:
        return loss, score
    if score != score:
        return loss, score, score, score
    return loss, score, *_by_class(outputs.argmax(dim=1), targets, most)


def _by_class(answers: Tensor, targets: Tensor, most: int) -> tuple[float, float]:
    """Mean accuracy over classes, and accuracy on all classes but the most frequent one."""
    right = (answers == targets).double()
    counts = torch.bincount(targets)
    held = counts > 0
    per_class = torch.bincount(targets, weights=right)[held] / counts[held]
    return float(per_class.mean()), float(right[targets != most].mean())


def _most_frequent(federation: Federation, agent: int) -> int:
    """The most frequent class of an agent's training part."""
    train = federation.samples.targets[federation.split.train[agent]]
    return int(torch.bincount(train).argmax())


def _pooled_minority(scores: Sequence[AgentScores], step: int) -> float:
    held = [s for s in scores if s.minority_samples]
    if not held:
        return float("nan")
    weights = [s.minority_samples for s in held]
    return float(np.average([s.minority[step] for s in held], weights=weights))


def _record(federation: Federation, agent: int, scored: Sequence[tuple[float, ...]]) -> AgentScores:
    """An agent's record from what was measured after 0, 1, … steps."""
    split, rows = federation.split, federation.scored_rows(agent)
    loss, score, *by_class = zip(*scored, strict=True)
    more: dict[str, Any] = {}
    if by_class:
        targets = federation.samples.targets[rows]
        minority = int((targets != _most_frequent(federation, agent)).sum())
        more = {"balanced": by_class[0], "minority": by_class[1], "minority_samples": minority}
    return AgentScores(
        agent=agent,
        name=split.names[agent],
        seen=agent not in split.unseen,
        train_samples=len(split.train[agent]),
        test_samples=len(rows),
        loss=loss,
        score=score,
        **more,
    )
