"""How good models are for agents: before adaptation, after each step of it, and beside baselines.

Every agent adapts on its training part and is scored on its test part. What adapts never sees
test data: :meth:`Algorithm.personalize` gets batches of the training part and yields models, and
only the functions here look at the test part.
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
    """One agent's test loss and score after 0, 1, … fine-tuning steps."""

    agent: int
    name: str
    seen: bool
    train_samples: int
    test_samples: int
    loss: tuple[float, ...]
    score: tuple[float, ...]

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
) -> AgentScores:
    """Personalise the server's model for one agent and score it on the agent's test part.

    The batches of fine-tuning depend on seed and agent only, so that methods and rounds are
    compared on the same ones.
    """
    batches = federation.batches(agent, seed, "evaluate")
    models = algorithm.personalize(objective, server, state, batches, steps)
    inputs, targets = federation.test(agent)
    outputs = ((objective.predict(w, inputs), targets) for w in models)
    return agent_scores(
        federation, agent, [score_outputs(objective, *each, measure) for each in outputs]
    )


def majority_class(federation: Federation, agent: int, steps: int) -> AgentScores:
    """The null baseline of always answering the agent's most frequent training class.

    It has no loss and nothing to fine-tune: the same score stands for every step.
    """
    targets = federation.samples.targets
    most = torch.bincount(targets[federation.split.train[agent]]).argmax()
    own = targets[federation.split.test[agent]]
    right = int((own == most).sum()) / len(own)
    return agent_scores(federation, agent, [(float("nan"), right)] * (steps + 1))


def summarise(scores: Iterable[AgentScores], step: int, measure: Measure) -> Summary:
    """Mean, spread, worst tenth and share of harmed agents after ``step`` fine-tuning steps.

    ``worst_tenth`` is the mean of the worst ⌈n/10⌉ agents; an agent is harmed if its score after
    the steps is worse than before.
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
    )


def score_outputs(
    objective: Objective, outputs: Tensor, targets: Tensor, measure: Measure
) -> tuple[float, float]:
    """The loss and the score of a model's outputs."""
    loss = float(objective.loss(outputs, targets))
    if measure.metric is None:
        return loss, loss
    return loss, float(measure.metric(outputs.to(targets.device), targets))


def agent_scores(
    federation: Federation, agent: int, scores: Sequence[tuple[float, float]]
) -> AgentScores:
    """An agent's record from its loss and score after 0, 1, … steps."""
    split = federation.split
    loss, score = zip(*scores, strict=True)
    return AgentScores(
        agent=agent,
        name=split.names[agent],
        seen=agent not in split.unseen,
        train_samples=len(split.train[agent]),
        test_samples=len(split.test[agent]),
        loss=loss,
        score=score,
    )
