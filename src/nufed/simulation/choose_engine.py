"""Chooses the engine of a method: the requested one, or the fastest that gives the same model.

The choice depends on the configuration and on shapes alone, never on the machine, so that one
configuration gives the same bits on every machine. A trial in float64 shows whether an engine can
run a module at all.

The engines by name: what they are, what they need of a module, and how they are made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nufed.algorithms.protocol import AgentUpdate, Algorithm, Context, State, defines
from nufed.data import Federation
from nufed.errors import InputError, in_short
from nufed.evaluate import Measure
from nufed.objective import Objective
from nufed.objective.fast.gram_space import MOST_ROWS, FirstLayer, first_layer
from nufed.objective.fast.onednn import (
    OneDNNFirstLayer,
    closed_form,
    has_large_products,
    with_onednn,
)
from nufed.objective.micro_batches import IGNORED
from nufed.server import Downlink, initial_server, next_server, to_send
from nufed.simulation.batched_engine import BatchedEngine
from nufed.simulation.engine import DirectEngine, Engine, EngineName, States
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


def _direct_onednn(objective: Objective, federation: Federation, seed: int, double: bool) -> Engine:
    return _direct(with_onednn(objective), federation, seed, double)


def _closed_form(
    objective: Objective, federation: Federation, seed: int, double: bool
) -> Engine | None:
    fast = closed_form(objective.double if double else objective)
    return None if fast is None else DirectEngine(fast, federation, seed)


def _batched(
    objective: Objective, federation: Federation, seed: int, double: bool
) -> BatchedEngine:
    most = max(1, min(MAX_AGENTS, STACK // objective.size))
    return BatchedEngine(objective.double if double else objective, federation, seed, most)


def _gram(
    objective: Objective,
    federation: Federation,
    seed: int,
    double: bool,
    kind: type[FirstLayer] = FirstLayer,
) -> Engine | None:
    layer = first_layer(objective, federation.samples.input_shape, kind)
    plain = isinstance(federation.samples.inputs, Tensor)
    if layer is None or not plain:
        return None
    most = max(1, min(GRAM_MAX_AGENTS, GRAM_STACK // layer.rest.size))
    if double:  # the rest is small, unlike the first layer
        layer, objective = replace(layer, rest=layer.rest.double), objective.double
    stacked = _batched(objective, federation, seed, double=False)
    small = stacked.most > GRAM_MAX_AGENTS  # more agents than would be evaluated together here
    return GramEngine(objective, federation, seed, layer, most, stacked if small else None)


NO_FIRST_LAYER = "this module does not begin with a linear layer on the raw inputs"
ENGINES: dict[EngineName, EngineKind] = {
    "direct": EngineKind("one agent at a time, on plain tensors", "", _direct),
    "direct_onednn": EngineKind(
        "direct, with large float32 products of linear layers by oneDNN", "", _direct_onednn
    ),
    "closed_form": EngineKind(
        "one agent at a time, with the derivatives of fully connected networks written out, and "
        "large float32 products by oneDNN",
        "this module is no fully connected network, or the loss is not cross-entropy",
        _closed_form,
    ),
    "batched": EngineKind(
        "several agents of a small model at once, stacked",
        "this module can't be stacked over agents (random layers can't)",
        _batched,
    ),
    "gram": EngineKind(
        "models with a linear first layer, whose products are not computed in every step",
        NO_FIRST_LAYER,
        _gram,
    ),
    "gram_onednn": EngineKind(
        "gram, with large float32 products by oneDNN",
        NO_FIRST_LAYER,
        partial(_gram, kind=OneDNNFirstLayer),
    ),
}
assert tuple(ENGINES) == get_args(EngineName)
GRAM: tuple[EngineName, ...] = ("gram", "gram_onednn")
"""Engines in Gram space."""


GRAM_BYTES = 2**31  # upper bound for the matrices K of all agents and seeds
# a gradient step's passes over the first layer's weights cost about as much as the product of those
# weights with this many samples
PASSES = 100
SEARCHED_AGENTS = 100  # for two that a trial stacks


@dataclass(frozen=True)
class Engines:
    """The engines of one seed, each made once.

    Args:
        visits: expected number of rounds that an agent trains in.
        seeds: number of seeds whose engines are kept at the same time.
    """

    objective: Objective
    federation: Federation
    seed: int
    visits: float = 1.0
    seeds: int = 1
    _made: dict[EngineName, Engine] = field(default_factory=dict, repr=False)
    _tried: list[tuple[EngineName, Algorithm, str]] = field(default_factory=list, repr=False)

    def get(self, name: EngineName) -> Engine:
        """The engine of that name."""
        if name not in self._made:
            engine = ENGINES[name].make(self.objective, self.federation, self.seed, False)
            assert engine is not None, name
            self._made[name] = engine
        return self._made[name]

    def fresh(self) -> Engines:
        """A copy without the engines made so far, whose caches take memory."""
        return replace(self, _made={})

    def choose(
        self,
        algorithm: Algorithm,
        wanted: EngineName | Literal["auto"],
        tried: Algorithm | None = None,
    ) -> EngineName:
        """The engine for an algorithm; an InputError if the requested one can't run it.

        ``tried`` is the same algorithm with fewer local steps, for one whose round is too long for
        a trial.
        """
        if wanted == "auto":
            choices: list[tuple[EngineName, bool]] = [
                ("batched", self._stackable(MAX_AGENTS)),
                ("gram_onednn", self._gram_pays(algorithm)),
                ("batched", self._stackable(2)),
                ("closed_form", self._closed_form_pays()),
                ("direct_onednn", self._products_are_large(algorithm)),
            ]
            for name, pays in choices:
                if pays and self.obstacle(name, algorithm, tried) is None:
                    return name
            return "direct"
        obstacle = self.obstacle(wanted, algorithm, tried)
        if obstacle:
            raise InputError(f'engine = "{wanted}": {obstacle}; use "direct" or "auto"')
        return wanted

    def obstacle(
        self, name: EngineName, algorithm: Algorithm, tried: Algorithm | None = None
    ) -> str | None:
        """Why an engine can't run an algorithm on this problem; None if it can.

        ``tried`` as for :meth:`choose`.
        """
        if name in ("direct", "direct_onednn"):
            return None
        if algorithm.combines is None and name != "closed_form":
            return f"{type(algorithm).__name__} does not declare that its agents may be stacked"
        samples = self.federation.samples
        if not samples.classes and bool((samples.targets == IGNORED).any()):
            return "the targets are integers other than classes, of which the loss ignores some"
        if name in GRAM:
            vectors = {*algorithm.receives, *algorithm.sends}
            only_model = vectors == {"model"} and not defines(algorithm, "downlink")
            if algorithm.combines != "linearly" or not only_model:
                return "Gram space needs one step size for all weights, and no vector but the model"
            if algorithm.agent_init(self.objective, self._received(algorithm)):
                return "Gram space needs an algorithm whose agents keep no state between rounds"
            if self.objective.initial().device.type != "cpu":
                return "Gram space runs on the CPU only"
            if self.federation.augment is not None:
                return "Gram space needs samples that data.augment does not change"
            if self._gram_bytes() > GRAM_BYTES:
                return (
                    f"the agents' Gram matrices would take {self._gram_bytes() / 2**30:.1f} GiB, "
                    f"and the limit is {GRAM_BYTES / 2**30:.0f} GiB"
                )
        trial = algorithm if tried is None else tried
        known = (r for engine, tried, r in self._tried if engine == name and tried is trial)
        reason = next(known, None)
        if reason is None:
            reason = self._trial(name, trial)
            self._tried.append((name, trial, reason))
        return reason or None

    def _received(self, algorithm: Algorithm) -> State:
        """What agents receive in the first round."""
        server = initial_server(algorithm, self.objective, self.objective.initial())
        return to_send(algorithm, server)

    def _trial(self, name: EngineName, algorithm: Algorithm) -> str:
        """Compare an engine with the direct one for this very algorithm, in float64, on two rounds
        and one evaluation of two agents: why they differ, or "" if they agree."""
        needs = ENGINES[name].needs
        large = self.objective.size > STACK  # in float64 it would take more memory than training
        algorithm = _in_double(algorithm.checks.for_trial() if large else algorithm)
        try:
            trial = ENGINES[name].make(self.objective, self.federation, self.seed, True)
            if trial is None:
                return needs
            direct = DirectEngine(self.objective.double, self.federation, self.seed)
            # chunk by chunk: with a large model that is one agent at a time
            for chunk in trial.chunks(algorithm, self._tried_agents(algorithm)):
                if not agree(trial, direct, algorithm, chunk):
                    return (
                        f"{type(algorithm).__name__} gives other results than the direct engine, "
                        f"although it declares that it combines vectors {algorithm.combines}"
                    )
        except Exception as error:  # anything that fails for several agents at once
            cause = error.__cause__ or error
            return f"{needs} ({in_short(cause)})"
        return ""

    def _tried_agents(self, algorithm: Algorithm) -> Sequence[int]:
        """Two agents that are stacked together, with different numbers of samples if possible.

        Agents are stacked if their batches are equally large. Where no two are, the first two.
        """
        split = self.federation.split
        first: dict[int, int] = {}  # agent of each batch size
        pair: list[int] = []
        for place, agent in enumerate(chain(split.seen, split.unseen)):
            if pair and place >= SEARCHED_AGENTS:
                break
            rows, size = self.federation.batch_rows(agent, algorithm.batch_size)
            other = first.setdefault(size, agent)
            if len(rows) != len(split.train[other]):
                return [other, agent]
            if other != agent:
                pair = pair or [other, agent]
        return pair or split.seen[:2]

    def _stackable(self, agents: int) -> bool:
        """Whether stacking this many models pays; it does not speed up convolutions."""
        module = self.objective.module(self.objective.initial())
        convolutions = any(parameter.ndim > 2 for parameter in module.parameters())
        return not convolutions and agents * self.objective.size <= STACK

    def _closed_form_pays(self) -> bool:
        """Whether derivatives are written out, and the model not so large that a trial is."""
        return self.objective.joint.closed_form and self.objective.size <= GRAM_STACK

    def _gram_pays(self, algorithm: Algorithm) -> bool:
        """Whether the first layer costs less in Gram space, counted in samples times weights."""
        if algorithm.combines is None:
            return False
        layer = first_layer(self.objective, self.federation.samples.input_shape)
        if layer is None:
            return False
        most = self.federation.split.most_rows
        batch = min(algorithm.batch_size, most)
        batches = sum(draw.number for draw in algorithm.update_draws())
        used = most * (1 - (1 - batch / most) ** batches)
        # half of its products, and as much for gathering the samples and writing it
        matrix = most**2 / layer.outputs / self.visits
        rows = min(batches * batch / 2, MOST_ROWS)
        steps = batches * batch * rows / layer.inputs
        return 2 * used + matrix + steps < batches * (2 * batch + PASSES)

    def _products_are_large(self, algorithm: Algorithm) -> bool:
        """Whether batches are large enough for products by oneDNN to pay."""
        batch = min(algorithm.batch_size, self.federation.split.most_rows)
        return has_large_products(self.objective, batch)

    def _gram_bytes(self) -> int:
        split, size = self.federation.split, self.objective.dtype.itemsize
        return self.seeds * len(split.agents) * split.most_rows**2 * size


def _in_double(algorithm: Algorithm) -> Algorithm:
    """A copy of the algorithm with tensor settings in float64."""
    same = copy.copy(algorithm)
    for each in fields(algorithm):
        value = getattr(algorithm, each.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            object.__setattr__(same, each.name, value.double())
    return same


def agree(trial: Engine, direct: Engine, algorithm: Algorithm, agents: Sequence[int]) -> bool:
    """Whether two engines give these agents the same vectors, states and losses up to rounding.

    In two rounds: in the first, agents have equal states, whose mixing would not show.
    """
    objective, split = direct.objective, direct.federation.split
    server = initial_server(algorithm, objective, objective.initial())
    states: dict[int, State] = {}
    for round in (1, 2):
        context = Context(round, len(split.seen), len(agents))
        down = Downlink.of(to_send(algorithm, server, context))
        for agent in agents if round == 1 else ():
            states[agent] = algorithm.agent_init(objective, down.to(agent))
        right, got = (
            engine.agent_updates(algorithm, down, states, context) for engine in (direct, trial)
        )
        for agent in agents:
            a, b = got.pop(agent), right[agent]
            if a.cost != b.cost or not _near(a.state, b.state, states[agent]):
                return False
            if not _near(a.vectors, b.vectors, down.to(agent)):
                return False
            del a, b  # what follows takes memory of its own
        updates = [
            AgentUpdate(agent, round, len(split.train[agent]), result.vectors)
            for agent, result in right.items()
        ]
        states = {agent: result.state for agent, result in right.items()}
        del right
        server = next_server(algorithm, context, server, updates)
        del updates
    received = to_send(algorithm, server)
    loss = Measure("loss", None)
    return all(
        math.isclose(x, y, rel_tol=1e-6) or not (math.isfinite(x) or math.isfinite(y))
        for known in (states, dict.fromkeys(agents))  # with a state, and as newcomers
        for x, y in zip(
            *(_losses(engine, algorithm, received, known, loss) for engine in (direct, trial)),
            strict=True,
        )
    )


def _losses(
    engine: Engine, algorithm: Algorithm, received: State, states: States, loss: Measure
) -> list[float]:
    """All losses of an evaluation with one fine-tuning step."""
    scores = engine.evaluate(algorithm, received, states, steps=1, measure=loss)
    return [x for s in scores for x in (s.global_loss or 0.0, *s.loss)]


def _near(got: State, right: State, start: State) -> bool:
    """Whether the changes of all vectors agree to 1e-7 of their norm, or both are not finite."""
    if got.keys() != right.keys():
        return False
    for name, b in right.items():
        before = start.get(name)
        before = before if before is not None and before.shape == b.shape else torch.zeros_like(b)
        change = _distance(b, before)
        if not math.isfinite(change):
            if math.isfinite(_distance(got[name], before)):
                return False
        elif not _distance(got[name], b) <= 1e-7 * change:
            return False
    return True


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖, without a copy of large vectors."""
    pieces = (torch.split(x.reshape(-1), 2**20) for x in (a, b))
    parts = zip(*pieces, strict=True)
    return math.hypot(*(float((x - y).norm()) for x, y in parts))
