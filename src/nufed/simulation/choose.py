"""Which engine runs a method: the one asked for, or the fastest that gives the same model.

The choice follows from the configuration and from shapes alone, never from the machine, so that one
configuration gives the same bits wherever it is run. Whether an engine can run a module at all is
found out by a trial in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from nufed.algorithm import Algorithm, Combining, State
from nufed.algorithms import GMeta
from nufed.data import Federation
from nufed.errors import InputError
from nufed.gram import MOST_ROWS, first_layer
from nufed.metagrad import FirstOrder
from nufed.objective import Objective
from nufed.simulation.batched import BatchedEngine
from nufed.simulation.direct import DirectEngine
from nufed.simulation.engine import Engine
from nufed.simulation.gram import GramEngine

EngineName: TypeAlias = Literal["direct", "batched", "gram"]
ENGINES: dict[EngineName, str] = {
    "direct": "one agent after another, on tensors as they are",
    "batched": "several agents of a small model at once",
    "gram": "models whose first layer is linear, without that layer's products in every step",
}
assert tuple(ENGINES) == get_args(EngineName)

STACK = 2**18  # numbers in a stack of models, above which stacking saves nothing
MANY = 32  # agents in a stack
GRAM_MOST = 5  # agents in a stack of the Gram engine
GRAM_STACK = 2**22  # numbers in such a stack, above which memory matters more
GRAM_BYTES = 2**31  # for the matrices K of all agents and seeds
# a gradient step's passes over the first layer's weights take about as long as the product of those
# weights with this many samples
PASSES = 100


@dataclass(frozen=True)
class Engines:
    """The engines of one seed, each made once.

    Args:
        visits: how often an agent is expected to be trained.
        seeds: how many seeds keep their engines at the same time.
    """

    objective: Objective
    federation: Federation
    seed: int
    visits: float = 1.0
    seeds: int = 1
    _made: dict[EngineName, Engine] = field(default_factory=dict, repr=False)
    _fit: dict[tuple[EngineName, int], bool] = field(default_factory=dict, repr=False)

    def get(self, name: EngineName) -> Engine:
        """The engine of that name."""
        if name not in self._made:
            engine = _make(name, self.objective, self.federation, self.seed)
            assert engine is not None, name
            self._made[name] = engine
        return self._made[name]

    def choose(self, algorithm: Algorithm, wanted: EngineName | Literal["auto"]) -> EngineName:
        """The engine for an algorithm; one that is asked for and can't run it is refused."""
        if wanted == "auto":
            choices: list[tuple[EngineName, bool]] = [
                ("batched", self._stackable(MANY)),
                ("gram", self._gram_pays(algorithm)),
                ("batched", self._stackable(2)),
            ]
            for name, pays in choices:
                if pays and self._obstacle(name, algorithm) is None:
                    return name
            return "direct"
        obstacle = self._obstacle(wanted, algorithm)
        if obstacle:
            raise InputError(f'engine = "{wanted}": {obstacle}; use "direct" or "auto"')
        return wanted

    def _obstacle(self, name: EngineName, algorithm: Algorithm) -> str | None:
        """Why an engine can't run an algorithm here."""
        if name == "direct":
            return None
        if not isinstance(algorithm, Combining):
            return f"{type(algorithm).__name__} does not say that its agents may be run together"
        samples = self.federation.samples
        if not samples.classes and not samples.targets.is_floating_point():
            return "the targets are neither classes nor numbers, and some may have to be ignored"
        if name == "gram":
            vectors = {*algorithm.receives, *algorithm.sends}
            if algorithm.combines != "linearly" or vectors != {"model"}:
                return "Gram space needs one step size for all weights and nothing but the model"
            if algorithm.client_init(self.objective.initial()):
                return "Gram space is for algorithms whose agents keep nothing between rounds"
            if self.objective.initial().device.type != "cpu":
                return "Gram space is for the CPU"
            if self._gram_bytes() > GRAM_BYTES:
                return (
                    f"the agents' matrices would take {self._gram_bytes() / 2**30:.1f} GiB and "
                    f"{GRAM_BYTES / 2**30:.0f} GiB are allowed"
                )
        key = name, algorithm.batch_size
        if key not in self._fit:
            self._fit[key] = self._trial(name, algorithm.batch_size)
        if self._fit[key]:
            return None
        needs = {
            "batched": "this module can't be run for several agents at once (random layers can't)",
            "gram": "this module does not begin with a linear layer on the inputs as they are",
        }
        return needs[name]

    def _trial(self, name: EngineName, batch_size: int) -> bool:
        """Whether an engine gives the direct engine's model for a small step in float64."""
        algorithm = GMeta(1, 0.01, 0.01, 1, batch_size, FirstOrder())
        double = self.objective.double
        w, agents = double.initial(), self.federation.split.seen[:2]
        try:
            trial = _make(name, self.objective, self.federation, self.seed, double=True)
            if trial is None:
                return False
            direct = DirectEngine(double, self.federation, self.seed)
            # chunk by chunk: of a large model that is one agent at a time
            chunks = trial.chunks(algorithm, agents)
            return all(_agree(trial, direct, algorithm, w, chunk) for chunk in chunks)
        except Exception:  # whatever a module does that can't be done for several agents
            return False

    def _stackable(self, agents: int) -> bool:
        """Whether so many models make a small stack; convolutions take their time in any stack."""
        module = self.objective.module(self.objective.initial())
        convolutions = any(parameter.ndim > 2 for parameter in module.parameters())
        return not convolutions and agents * self.objective.size <= STACK

    def _gram_pays(self, algorithm: Algorithm) -> bool:
        """Whether the first layer takes less in Gram space, counted in samples times weights."""
        if not isinstance(algorithm, Combining):
            return False
        layer = first_layer(self.objective, self.federation.samples.input_shape)
        if layer is None:
            return False
        most = self.federation.split.most_rows
        batch = min(algorithm.batch_size, most)
        batches = sum(draw.number for draw in algorithm.update_draws())
        used = most * (1 - (1 - batch / most) ** batches)
        matrix = most**2 / 2 / layer.outputs / self.visits
        rows = min(batches * batch / 2, MOST_ROWS)
        steps = batches * batch * rows / layer.inputs
        return 2 * used + matrix + steps < batches * (2 * batch + PASSES)

    def _gram_bytes(self) -> int:
        split, size = self.federation.split, self.objective.dtype.itemsize
        return self.seeds * len(split.agents) * split.most_rows**2 * size


def _agree(
    trial: Engine, direct: Engine, algorithm: Algorithm, w: Tensor, agents: Sequence[int]
) -> bool:
    """Whether two engines give these agents the same models but for rounding."""
    states: dict[int, State] = {agent: {} for agent in agents}
    right, got = (
        engine.client_updates(algorithm, {"model": w}, states, round=0)
        for engine in (direct, trial)
    )
    for agent in agents:
        a, b = got[agent].vectors["model"], right[agent].vectors["model"]
        if not a.sub_(b).norm() <= 1e-7 * b.sub_(w).norm():
            return False
    return True


def _make(
    name: EngineName,
    objective: Objective,
    federation: Federation,
    seed: int,
    double: bool = False,
) -> Engine | None:
    """The engine of that name, with vectors in float64 if ``double``."""
    own = objective.double if double else objective
    if name == "direct":
        return DirectEngine(own, federation, seed)
    if name == "batched":
        most = max(1, min(MANY, STACK // objective.size))
        return BatchedEngine(own, federation, seed, most)
    layer = first_layer(objective, federation.samples.input_shape)
    plain = isinstance(federation.samples.inputs, Tensor)
    if layer is None or not plain:
        return None
    most = max(1, min(GRAM_MOST, GRAM_STACK // layer.rest.size))
    if double:  # which takes no memory, other than the first layer of a double
        layer = replace(layer, rest=layer.rest.double)
    return GramEngine(own, federation, seed, layer, most)
