"""Outputs of an agent's models: the global one, and the personal one after every number of steps.

Algorithms make models here from training batches. Models are applied to the samples that are
scored, but no algorithm that trains is handed these samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from nufed.algorithms.protocol import AgentContext, Algorithm, Cost, State
from nufed.objective import Inputs

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
    *,
    steps: int,
    scales: Sequence[float],
) -> Outputs:
    """The outputs of one agent, or of a stack of them.

    Args:
        algorithm, context, received, state: as for :meth:`Algorithm.personal_model`.
        apply: applies a prediction to the scored samples.
        steps: maximum number of fine-tuning steps.
        scales: multiples of the step size of fine-tuning to try.
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
