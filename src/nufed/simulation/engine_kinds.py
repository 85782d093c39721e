"""The engines by name: what they are, what they need of a module, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, get_args

from torch import Tensor

from nufed.config.names import EngineName
from nufed.data import Federation
from nufed.objective import Objective
from nufed.objective.first_layer import first_layer
from nufed.simulation.batched_engine import BatchedEngine
from nufed.simulation.direct_engine import DirectEngine
from nufed.simulation.engine import Engine
from nufed.simulation.gram_engine import GramEngine

STACK = 2**18  # elements in a stack of models, above which stacking saves nothing
MAX_AGENTS = 32  # in a stack
GRAM_MAX_AGENTS = 5  # in a stack of the Gram engine
GRAM_STACK = 2**22  # elements in such a stack, above which memory is the bottleneck


class EngineKind(NamedTuple):
    """An engine that can be chosen.

    Args:
        about: its description.
        needs: why it can't run a module, as a sentence.
        make: makes it, with vectors in float64 if the last argument is True; None if it can't.
    """

    about: str
    needs: str
    make: Callable[[Objective, Federation, int, bool], Engine | None]


def _direct(objective: Objective, federation: Federation, seed: int, double: bool) -> Engine:
    return DirectEngine(objective.double if double else objective, federation, seed)


def _batched(objective: Objective, federation: Federation, seed: int, double: bool) -> Engine:
    most = max(1, min(MAX_AGENTS, STACK // objective.size))
    return BatchedEngine(objective.double if double else objective, federation, seed, most)


def _gram(objective: Objective, federation: Federation, seed: int, double: bool) -> Engine | None:
    layer = first_layer(objective, federation.samples.input_shape)
    plain = isinstance(federation.samples.inputs, Tensor)
    if layer is None or not plain:
        return None
    most = max(1, min(GRAM_MAX_AGENTS, GRAM_STACK // layer.rest.size))
    if double:  # the rest is small, unlike the first layer
        layer, objective = replace(layer, rest=layer.rest.double), objective.double
    return GramEngine(objective, federation, seed, layer, most)


ENGINES: dict[EngineName, EngineKind] = {
    "direct": EngineKind("one agent at a time, on plain tensors", "", _direct),
    "batched": EngineKind(
        "several agents of a small model at once, stacked",
        "this module can't be stacked over agents (random layers can't)",
        _batched,
    ),
    "gram": EngineKind(
        "models with a linear first layer, whose products are not computed in every step",
        "this module does not begin with a linear layer on the raw inputs",
        _gram,
    ),
}
assert tuple(ENGINES) == get_args(EngineName)
