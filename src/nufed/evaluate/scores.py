"""Scores of agents' global and personal models, and of the majority-class baseline.

Every agent fine-tunes on its training part and is scored on its test part (or, for choices, on its
validation part). Algorithms never see test data: they get batches of the training part and return
models, the global one and the personal one after every number of steps. Only the functions here
apply them to the samples that are scored, and read the targets.

Beside the scores there is the training loss of a round: how well the model fits the samples that it
was just trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.algorithms.protocol import AgentContext, Algorithm, BatchSource, Cost, State
from nufed.data import Federation, ScoredOn
from nufed.evaluate.metrics import METRICS, Better, Metric, accuracies, accuracy
from nufed.objective import AnyObjective, Inputs, Objective
from nufed.seeding import stream
from nufed.server import AgentStates, Downlink

Predict: TypeAlias = Callable[[State, Inputs], Tensor]
Apply: TypeAlias = Callable[[Predict, State], Any]
"""Applies a prediction to the samples that agents are scored on."""


@dataclass(frozen=True)
class Outputs:
    """Outputs of the global model (None: there is none), and of the personal model by scale and
    number of fine-tuning steps; ``cost`` is that of computing the personal model, ``newcomer``
    says that this was done without a state."""

    shared: Any
    personal: list[list[Any]]
    cost: Cost
    newcomer: bool


def outputs_of(
    algorithm: Algorithm,
    context: AgentContext,
    received: State,
    state: State | None,
    apply: Apply,
    steps: int,
    scales: Sequence[float] = (1.0,),
) -> Outputs:
    """The outputs of one agent, or of a stack of them.

    Args:
        algorithm, context, received, state: as for :meth:`Algorithm.personal_model`.
        apply: applies a prediction to the scored samples.
        steps, scales: as for :class:`Scoring`.
    """

    def predict(tensors: State, inputs: Inputs) -> Tensor:
        return algorithm.predict(context.objective, tensors, inputs)

    def predict_shared(tensors: State, inputs: Inputs) -> Tensor:
        return context.objective.predict(tensors["model"], inputs)

    personal = algorithm.personal_model(context, received, state)
    first = apply(predict, personal.tensors)

    def tuned(scale: float) -> Iterator[Any]:
        yield first
        if not scale:  # no step, which differs from steps of size 0 where statistics are tracked
            yield from [first] * steps
            return
        models = algorithm.fine_tune(context, received, personal.tensors, steps, scale)
        next(models)  # the personal model itself
        for tensors in models:
            yield apply(predict, tensors)

    model = algorithm.global_model(context.objective, received)
    shared = None
    if model is not None:
        same = personal.tensors.keys() == {"model"} and personal.model is model
        shared = first if same else apply(predict_shared, {"model": model})
    return Outputs(shared, [list(tuned(scale)) for scale in scales], personal.cost, not state)


NO_COST = Cost()
ENOUGH_AGENTS = 10  # from which standard errors are over agents, below over groups of samples
GROUPS = 10  # of an agent's validation samples, whose losses are compared
FEW_AGENTS = 20  # up to so many, scores have intervals over samples, too
RESAMPLES = 100  # of an agent's samples


@dataclass(frozen=True)
class Measure:
    """What agents are scored by: a metric, or else the loss, of which lower is better.

    ``resamples``: how many times an agent's scored samples are resampled, for intervals over them.
    """

    name: str
    metric: Metric | None = accuracy
    better: Better = "higher"  # of the metric
    resamples: int = 0

    def resampled(self, agents: int) -> Measure:
        """A copy with bootstrap resamples, if agents are few: they take time and disk space."""
        return replace(self, resamples=RESAMPLES if agents <= FEW_AGENTS else 0)

    @property
    def words(self) -> str:
        """The name as text of a page: of nufed's own metrics without underscores.

        >>> Measure("bits_per_character").words, Measure("my_metric").words
        ('bits per character', 'my_metric')
        """
        return self.name.replace("_", " ") if self.name in METRICS else self.name

    @property
    def higher_is_better(self) -> bool:
        return self.metric is not None and self.better == "higher"


@dataclass(frozen=True)
class Scoring:
    """How agents are scored: on a part of their samples, of the global model and of the personal
    one after 0 … ``steps`` fine-tuning steps, whose step size is multiplied by each of ``scales``.
    """

    steps: int
    measure: Measure
    scales: Sequence[float] = (1.0,)
    part: ScoredOn = "test"


@dataclass(frozen=True)
class AgentScores:
    """One agent's loss and score: of its personal model after 0, 1, … fine-tuning steps, and of the
    global model (None where the server holds no whole model).

    For classes also what accuracy hides under class imbalance: ``balanced`` is the balanced
    accuracy, the mean of the accuracies on the agent's classes; ``minority`` is the accuracy on its
    ``minority_samples`` test samples that are not of its most frequent training class (NaN if there
    are none).

    ``resampled`` holds, by number of steps, how far the personal model's score on each bootstrap
    resample of the scored samples is from its score on all of them. All methods have the same
    resamples, so that differences of theirs are those of a paired bootstrap.
    """

    agent: int
    name: str
    seen: bool
    train_samples: int
    test_samples: int
    loss: tuple[float, ...]
    score: tuple[float, ...]
    global_loss: float | None = None
    global_score: float | None = None
    balanced: tuple[float, ...] = ()
    minority: tuple[float, ...] = ()
    minority_samples: int = 0
    personal_gradients: int = 0  # evaluated to compute the personal model, beyond training
    personal_hvps: int = 0  # the same of Hessian-vector products
    newcomer: bool = False  # its personal model was computed without a state
    resampled: tuple[tuple[float, ...], ...] = ()
    group_loss: tuple[tuple[float, ...], ...] = ()  # by steps, of groups of validation samples


@dataclass(frozen=True)
class Summary:
    """Scores of personal models over agents, after one number of fine-tuning steps.

    ``global_mean`` and ``harmed`` are NaN where there is no global model.
    """

    agents: int
    mean: float
    weighted_mean: float
    std: float
    deciles: tuple[float, ...]
    worst_tenth: float
    global_mean: float
    harmed: float
    loss: float
    balanced: float
    minority: float


def evaluate_agent(
    algorithm: Algorithm,
    context: AgentContext,
    received: State,
    state: State | None,
    federation: Federation,
    scoring: Scoring,
) -> list[AgentScores]:
    """Score the global and the personal model of one agent on held-out samples, for each scale.

    ``federation`` has the agent's samples and says which are scored; ``context`` is that of
    :func:`evaluation_context`, or at a site, which knows only its own part, the plan's.
    """
    agent, objective = int(context.agent), context.objective.base
    inputs, _ = federation.scored(agent)
    outputs = outputs_of(
        algorithm,
        context,
        received,
        state,
        lambda predict, tensors: predict(tensors, inputs),
        scoring.steps,
        scoring.scales,
    )
    return score_agent(objective, federation, agent, outputs, scoring.measure)


def evaluation_context(
    federation: Federation, objective: AnyObjective, batches: BatchSource, samples: int | Tensor
) -> AgentContext:
    """The context of agents at evaluation.

    The batches of fine-tuning depend on seed and agent only, so that methods and rounds are
    compared on the same ones.
    """
    return AgentContext(0, len(federation.split.seen), 0, objective, batches, samples)


def majority_class(
    federation: Federation, agent: int, steps: int, resamples: int = 0
) -> AgentScores:
    """The null baseline that always predicts the agent's most frequent training class."""
    most = torch.tensor(_most_frequent(federation, agent))
    guess = most.expand(len(federation.scored_rows(agent)))
    return _untrained_guess(federation, agent, guess, steps, resamples)


def nearest_centroid(
    federation: Federation, agent: int, steps: int, resamples: int = 0
) -> AgentScores:
    """The null baseline that predicts the class whose mean training input is nearest.

    Distances are Euclidean, of inputs as they are; what needs no training at all, and is strong
    with few samples per class.
    """
    rows = federation.split.train[agent]
    (known, labels), (asked, _) = federation.take(rows), federation.scored(agent)
    assert isinstance(known, Tensor) and isinstance(asked, Tensor)
    classes = torch.unique(labels)
    centres = torch.stack([known[labels == each].flatten(1).double().mean(0) for each in classes])
    guess = classes[torch.cdist(asked.flatten(1).double(), centres).argmin(dim=1)].cpu()
    return _untrained_guess(federation, agent, guess, steps, resamples)


def _untrained_guess(
    federation: Federation, agent: int, guess: Tensor, steps: int, resamples: int
) -> AgentScores:
    """The scores of predictions that no model made: without a loss, a global model and anything to
    fine-tune, so that every step has the same score."""
    targets = federation.samples.targets[federation.scored_rows(agent)]
    most = _most_frequent(federation, agent)
    correct = float((targets == guess).double().mean())
    (by_class,) = _by_class(guess[None], targets, most)
    scored = [(float("nan"), correct, *by_class)]
    minority = int((targets != most).sum())
    record = _record(federation, agent, scored * (steps + 1), None, minority)
    right = _deviations(targets == guess, _resamples(agent, len(targets), resamples))
    return replace(record, resampled=(right,) * (steps + 1) if resamples else ())


def summarise(scores: Iterable[AgentScores], step: int, measure: Measure) -> Summary:
    """Mean, spread, worst tenth and share of harmed agents after ``step`` fine-tuning steps.

    ``worst_tenth`` is the mean of the worst ⌈n/10⌉ agents; an agent is harmed if its personal model
    is worse than the global one; ``minority`` pools the minority samples of all agents.
    """
    scores = list(scores)
    after = np.array([s.score[step] for s in scores])
    shared = np.array([np.nan if s.global_score is None else s.global_score for s in scores])
    defined = all(s.global_score is not None for s in scores)
    sign = 1 if measure.higher_is_better else -1
    tenth = -(-len(scores) // 10)
    after[~np.isfinite(after)] = np.nan  # diverged, and shown as such
    ranked = np.sort(np.nan_to_num(sign * after, nan=-np.inf))  # NaN ranks worst
    return Summary(
        agents=len(scores),
        mean=float(after.mean()),
        weighted_mean=float(np.average(after, weights=[s.test_samples for s in scores])),
        std=float(after.std()),
        deciles=tuple(np.quantile(after, np.linspace(0, 1, 11)).tolist()),
        worst_tenth=float(sign * ranked[:tenth].mean()),
        global_mean=float(shared.mean()),
        # a personal score of NaN counts as harm
        harmed=float((~(sign * after >= sign * shared)).mean()) if defined else float("nan"),
        loss=float(np.mean([s.loss[step] for s in scores])),
        balanced=float(np.mean([s.balanced[step] if s.balanced else np.nan for s in scores])),
        minority=_pooled_minority(scores, step),
    )


def score_agent(
    objective: Objective, federation: Federation, agent: int, outputs: Outputs, measure: Measure
) -> list[AgentScores]:
    """An agent's scores by scale, from its models' outputs on the scored samples."""
    rows, samples = federation.scored_rows(agent), federation.samples
    targets, by_class = samples.targets[rows], measure.metric is accuracy and bool(samples.classes)
    most = _most_frequent(federation, agent) if by_class else None
    minority = 0 if most is None else int((targets != most).sum())
    shared = [] if outputs.shared is None else [outputs.shared]
    every = [*chain.from_iterable(outputs.personal), *shared]
    # losses are computed where the outputs are, metrics on the host; either is copied once
    there = samples.take_targets(rows, every[0].device)
    losses, on_host = _losses(objective, ((each, there) for each in every)), _on_host(every)
    scored = _scores(losses, on_host, targets, measure, most)
    whole = scored.pop() if shared else None
    grouped = federation.scored_on == "validation" and len(federation.split.seen) < ENOUGH_AGENTS
    records, start = [], 0
    for personal in outputs.personal:
        part = slice(start, start := start + len(personal))
        made = outputs.cost, outputs.newcomer
        record = _record(federation, agent, scored[part], whole, minority, *made)
        if grouped:
            record = replace(record, group_loss=_group_losses(objective, personal, there))
        if measure.resamples:
            host = on_host[part]
            resampled = _resampled(objective, measure, record, personal, there, host, targets)
            record = replace(record, resampled=resampled)
        records.append(record)
    return records


def score_stack(
    objective: Objective,
    federation: Federation,
    agents: Sequence[int],
    outputs: Outputs,
    measure: Measure,
) -> list[dict[int, AgentScores]]:
    """The scores of a stack of agents by scale; behind an agent's samples there may be others."""
    scores: list[dict[int, AgentScores]] = [{} for _ in outputs.personal]
    for row, agent in enumerate(agents):
        size = len(federation.scored_rows(agent))
        of_agent = replace(
            outputs,
            shared=None if outputs.shared is None else outputs.shared[row][:size],
            personal=[[each[row][:size] for each in by_steps] for by_steps in outputs.personal],
        )
        records = score_agent(objective, federation, agent, of_agent, measure)
        for by_agent, record in zip(scores, records, strict=True):
            by_agent[agent] = record
    return scores


def _group_losses(
    objective: Objective, outputs: Sequence[Tensor], targets: Tensor
) -> tuple[tuple[float, ...], ...]:
    """The losses of groups of an agent's samples, by number of steps."""
    groups = min(len(targets), GROUPS)
    parts = targets.tensor_split(groups)
    pairs = (zip(each.tensor_split(groups), parts, strict=True) for each in outputs)
    return tuple(tuple(_losses(objective, of_groups)) for of_groups in pairs)


def _resampled(
    objective: Objective,
    measure: Measure,
    record: AgentScores,
    outputs: Sequence[Tensor],
    there: Tensor,
    on_host: Sequence[Tensor],
    targets: Tensor,
) -> tuple[tuple[float, ...], ...]:
    """The record's score minus that on each resample, by number of steps; ``there`` are the targets
    on the device of the outputs."""
    picks = _resamples(record.agent, len(targets), measure.resamples)
    if measure.metric is accuracy:
        answers = [each.argmax(dim=1) for each in on_host]
        return tuple(_deviations(y == targets, picks) for y in answers)
    resampled = []
    for each, host, score in zip(outputs, on_host, record.score, strict=True):
        try:
            if measure.metric is None:
                on = _losses(objective, ((each[p], there[p]) for p in picks.to(there.device)))
            else:
                on = [float(measure.metric(host[picked], targets[picked])) for picked in picks]
        except Exception:  # a user's metric may fail, for example without samples of every class
            return ()
        resampled.append(_rounded(score - value for value in on))
    return tuple(resampled)


def _resamples(agent: int, samples: int, number: int) -> Tensor:
    """The samples of every resample: as many as there are, with replacement."""
    rng = stream(0, "resamples", agent=agent)
    return torch.from_numpy(rng.integers(samples, size=(number, samples)))


def _deviations(values: Tensor, picks: Tensor) -> tuple[float, ...]:
    """How far the mean of a sample's values on each resample is from that on all."""
    values = values.double().cpu()
    return _rounded((values[picks].mean(dim=1) - values.mean()).tolist())


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values)


def _losses(objective: Objective, pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of outputs and their targets; a device is waited for once."""
    return _numbers([objective.loss(*pair) for pair in pairs])


def _numbers(scalars: list[Tensor]) -> list[float]:
    numbers: list[float] = torch.stack(scalars).tolist()
    return numbers


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, moved together if they have one shape."""
    if all(x.device.type == "cpu" for x in tensors):
        return tensors
    if len({(x.shape, x.dtype, x.device) for x in tensors}) > 1:
        return [x.cpu() for x in tensors]
    return list(torch.stack(tensors).cpu())


def _scores(
    losses: Sequence[float],
    outputs: Sequence[Tensor],
    targets: Tensor,
    measure: Measure,
    most: int | None,
) -> list[tuple[float, ...]]:
    """Loss and score of each of the outputs, and for classes balanced and minority accuracy."""
    if measure.metric is None:
        return [(loss, loss) for loss in losses]
    if measure.metric is not accuracy:
        scores = [float(measure.metric(each, targets)) for each in outputs]
        return list(zip(losses, scores, strict=True))
    together = torch.stack(list(outputs))  # of small models, launching operations takes longest
    scores = accuracies(together, targets)
    if most is None:
        return list(zip(losses, scores, strict=True))
    by_class = _by_class(together.argmax(dim=2), targets, most)
    return [
        (loss, score, *(both if score == score else (score, score)))
        for loss, score, both in zip(losses, scores, by_class, strict=True)
    ]


def _by_class(answers: Tensor, targets: Tensor, most: int) -> list[tuple[float, float]]:
    """Mean accuracy over classes, and accuracy on all classes but the most frequent one, for each
    row of answers."""
    right, members = (answers == targets).double(), F.one_hot(targets).double()
    counts = members.sum(dim=0)
    held = counts > 0
    per_class = (right @ members)[:, held] / counts[held]
    minority = right[:, targets != most].mean(dim=1)
    return list(zip(per_class.mean(dim=1).tolist(), minority.tolist(), strict=True))


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


def _record(
    federation: Federation,
    agent: int,
    scored: Sequence[tuple[float, ...]],
    shared: tuple[float, ...] | None,
    minority: int,
    cost: Cost = NO_COST,
    newcomer: bool = False,
) -> AgentScores:
    """An agent's record from its scores after 0, 1, … steps and those of the global model;
    ``minority`` is the number of scored samples that are not of its most frequent class."""
    split, rows = federation.split, federation.scored_rows(agent)
    loss, score, *by_class = zip(*scored, strict=True)
    more: dict[str, Any] = {}
    if by_class:
        more = {"balanced": by_class[0], "minority": by_class[1], "minority_samples": minority}
    return AgentScores(
        agent=agent,
        name=split.names[agent],
        seen=agent not in split.unseen,
        train_samples=len(split.train[agent]),
        test_samples=len(rows),
        loss=loss,
        score=score,
        global_loss=None if shared is None else shared[0],
        global_score=None if shared is None else shared[1],
        personal_gradients=cost.gradients,
        personal_hvps=cost.hvps,
        newcomer=newcomer,
        **more,
    )


PIECE = 256  # samples that go through the model at once


def training_loss(
    algorithm: Algorithm,
    objective: Objective,
    federation: Federation,
    agents: Sequence[int],
    received: State,
    states: AgentStates,
    seed: int,
) -> tuple[float, Cost]:
    """The mean over ``agents`` of f_i(w), and the cost of computing their models.

    f_i is agent i's mean loss on its training part and w the global model, before any fine-tuning;
    where there is none, it is the agent's personal model. It takes one forward pass and, with a
    global model, no gradient. A part is evaluated in pieces, whose mean losses are averaged by
    their number of samples.

    Args:
        algorithm, objective, federation: what is trained, and on which data.
        agents: the round's cohort.
        received: what the server sends after the round.
        states: the agents' states.
        seed: of the training.
    """
    model, losses, cost = algorithm.global_model(objective, received), [], Cost()
    for agent in agents:
        tensors: State = {} if model is None else {"model": model}
        if model is None:
            batches = federation.batches(agent, seed, "evaluate")
            context = evaluation_context(federation, objective, batches, batches.samples)
            mine = Downlink.of(received).to(agent)
            personal = algorithm.personal_model(context, mine, states.get(agent))
            tensors, cost = personal.tensors, cost + personal.cost
        rows = federation.split.train[agent]
        sizes, of_pieces = list[int](), list[Tensor]()
        for start in range(0, len(rows), PIECE):
            inputs, targets = federation.take(rows[start : start + PIECE])
            if model is None:
                outputs = algorithm.predict(objective, tensors, inputs)
            else:
                outputs = objective.predict(model, inputs)
            sizes.append(len(targets))
            of_pieces.append(objective.loss(outputs, targets))
        pairs = zip(sizes, _numbers(of_pieces), strict=True)
        losses.append(sum(size * loss for size, loss in pairs) / len(rows))
    return math.fsum(losses) / len(losses) if losses else math.nan, cost
