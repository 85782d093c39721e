"""ScaleFL: weaker agents train narrower and shallower sub-networks (Ilhan et al., 2023).

The network has an exit after each stage (:func:`exit_lists`). Level l of L capacity
levels holds the first ⌈s_l·n⌉ of the n units of each hidden layer, in stages and exits 1 … e_l: an
index set I_l of the flat vector. Levels are nested, and the last is the whole network. An agent of
level l, whose d = e_l exits have outputs z_1 … z_d, takes τ steps on these coordinates,

    y ← w on I_l, 0 elsewhere;  τ times:  y ← y − η∇f(y) on I_l,
    f = [d·ℓ(z_d) + Σ_{j<d} j·(a·ℓ(z_j) + γT²·KL(p_d ‖ p_j))] / [d + Σ_{j<d} j·a],

with p_j = softmax(z_j/T), where p_d is a constant target, and a = 1. The server averages each
coordinate over those agents of the cohort that hold it:

    w[c] ← mean of y_i[c] over agents i with c ∈ I_{l(i)};  without any, w[c] is unchanged.

The server holds w and, for each coordinate, the first level that holds it; agents keep nothing. w
and y are exchanged; coordinates that an agent does not hold are returned as received and ignored.
The level of an agent is a fixed function of its number (:class:`CapacityLevels`), known to
both sides. The personal model is the agent's sub-network of w with its last exit, fine-tuned on I_l
with f; newcomers have a level, too. The optimiser drives the local steps. A server optimiser with
momentum also moves coordinates that nobody holds.

Known mistakes elsewhere: Only the abstract and the authors' code (git-disl/scale-fl) were
available; a, the weights j and γT² are from there. That code has γ = 0 by default; averages the
divergence over classes as well (``KLDivLoss()``), which divides γ by their number; lets the
gradient of the divergence flow into the last exit, which then learns from weaker ones; adds the
divergence only after a quarter of the rounds; reports the mean accuracy over all exits as that of
the last (one meter in ``[AverageMeter()] * n``); gives agents that rounding leaves without a level,
"skipped" by its comment, the largest (index −1); and divides the outputs of narrow layers by s_l
before a BatchNorm with batch statistics, which undoes it: here nothing is divided. A copy that
serves as a baseline has γ = 0 hard-coded in its loss, and may draw one agent several times in a
round.
"""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from nufed.algorithms.aggregation import Mean
from nufed.algorithms.fixed_point import fixed_point_mean
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Notes,
    Personal,
    State,
    Updates,
)
from nufed.errors import InputError, require
from nufed.meta.fine_tuning import descend
from nufed.objective import AnyObjective, Inputs, Loss, Objective
from nufed.objective.parts import Part
from nufed.settings import setting


@dataclass(frozen=True)
class ScaleFL(LocalTraining):
    """ScaleFL: sub-networks by capacity, early exits, self-distillation (Ilhan et al., 2023).

    Args:
        widths: s, the share of units of each level, in ascending order; the last is 1.
        depths: e, the number of exits of each level, in ascending order; the last has all exits.
            ``"auto"``: in proportion to the level; a model without exits has one, its output, and
            its levels differ in width alone.
        shares: the relative numbers of agents of each level.
        exit_weight: a, the weight of the loss of exits before the agent's last.
        distill_weight: γ, the weight of the divergence from the agent's last exit.
        temperature: T, the temperature of the softmax in the divergence.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η.
    """

    widths: str = setting("0.7, 0.7, 0.75, 1", "s, share of units of each capacity level")
    depths: str = setting("auto", "e, number of exits of each capacity level, or auto")
    shares: str = setting("1, 1, 1, 1", "relative numbers of agents of each capacity level")
    exit_weight: float = setting(1.0, "a, weight of the loss of earlier exits", least=0)
    distill_weight: float = setting(0.05, "γ, weight of distillation from the last exit", least=0)
    temperature: float = setting(3.0, "T, temperature of distillation", above=0)

    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the sub-network of its capacity level",
        optimized="the local steps",
    )
    combines: ClassVar[None] = None  # the loss depends on the agent's level

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.levels  # validates them

    @property
    def levels(self) -> CapacityLevels:
        """s, e and the levels of agents."""
        return CapacityLevels.read(self.widths, self.depths, self.shares)

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        exits = exit_number(objective.base)
        if self.levels.depths_of(exits)[-1] != exits:
            raise InputError(
                f"depths = {self.depths!r}: the model has {exits} exit{'s' * (exits > 1)}, which "
                'the last level must reach; change depths, or take model.name = "multi_exit" or a '
                "module with stages and exits of your own"
            )
        return {"model": w, "levels": self.first_levels(objective)}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, (narrow, part) = received["model"], self.narrow(context)
        y = self.descend(replace(context, objective=narrow), part.take(w))
        cost = Cost(self.steps_per_round(context))
        return AgentResult({"model": part.put(w, y)}, state, cost)

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        before, levels = server["model"], [self.levels.of(update.agent) for update in updates]
        w = before.clone()
        # coordinates that the same agents hold are aggregated together
        for smaller, level in pairwise([-1, *sorted(set(levels))]):
            part = _between(server["levels"], smaller, level)
            pairs = zip(updates, levels, strict=True)
            holders = [update for update, held in pairs if held >= level]
            if part.size:
                self.combine(context, holders, part, before, w)
        return {**server, "model": w}

    def combine(
        self,
        context: Context,
        holders: Updates,
        part: Part,
        before: Tensor,
        w: Tensor,
    ) -> None:
        """Write the aggregate of a part of these updates into w."""
        if self.aggregation == Mean():  # of views, where they are long
            for piece in part.pieces:
                sent = [piece.take(update.vectors["model"]) for update in holders]
                piece.fill(w, fixed_point_mean(sent, piece.take(before)))
            return
        levels = [
            replace(update, vectors={"model": part.take(update.vectors["model"])})
            for update in holders
        ]
        counted = part.below(context.counted.get("model", len(before)))
        inside = replace(context, counted={"model": counted})
        part.fill(w, self.aggregate(inside, levels, "model", part.take(before)))

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        depth, held = self.subnetwork(context)
        w = torch.where(held, received["model"], 0)
        return Personal({"model": w, "exit": torch.tensor(depth, device=w.device)})

    def fine_tune(
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
    ) -> Iterator[State]:
        depth, held = self.subnetwork(context)
        exits, w = self.objective(context.objective, depth), personal["model"]
        rate = scale * self.rate(context.objective, received)
        yield personal
        for batch in context.batches.draw("adapt", self.batch_size, steps):
            after = exits.track(descend(w, rate, exits.grad(w, batch)), batch, at=w)
            w = torch.where(held, after, 0)
            yield {**personal, "model": w}

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        exits = first_exits(objective.base, int(personal["exit"]))
        return exits.predict(personal["model"], inputs)[-1]

    # the sub-networks, and the loss of their exits

    def subnetwork(self, context: AgentContext) -> tuple[int, Tensor]:
        """The agent's number of exits d, and its coordinates I_l as a mask."""
        level = self.levels.of(int(context.agent))
        depths = self.levels.depths_of(exit_number(context.objective.base))
        return depths[level], self.first_levels(context.objective) <= level

    def narrow(self, context: AgentContext) -> tuple[Objective, Part]:
        """f as a function of the agent's coordinates y[I_l] alone, and I_l."""
        base, levels = context.objective.base, self.levels
        depths, level = levels.depths_of(exit_number(base)), levels.of(int(context.agent))
        narrow = narrowed(base, levels.widths[level], depths[level], ExitsLoss(self, base))
        return narrow, _between(first_levels(base, levels.widths, depths), -1, level)

    def first_levels(self, objective: AnyObjective) -> Tensor:
        """The first level that holds each coordinate."""
        depths = self.levels.depths_of(exit_number(objective.base))
        return first_levels(objective.base, self.levels.widths, depths)

    def objective(self, objective: AnyObjective, depth: int) -> Objective:
        """f of the first d exits."""
        return first_exits(objective.base, depth, ExitsLoss(self, objective.base))

    def exits_loss(self, loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        """f, from the outputs z_1 … z_d of the agent's exits and the loss ℓ of one."""
        *earlier, last = outputs
        depth, a, gamma = len(outputs), self.exit_weight, self.distill_weight
        total = depth + a * sum(range(depth))
        value = depth / total * loss(last, targets)
        if a:
            for j, z in enumerate(earlier, 1):
                value = value + a * j / total * loss(z, targets)
        if gamma and earlier:
            weights = gamma / total * torch.arange(1, depth, dtype=last.dtype, device=last.device)
            value = value + weights @ self.distillation(outputs, targets)
        return value

    def distillation(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """T²·KL(p_d ‖ p_j) for j < d, each the mean over samples."""
        if targets.is_floating_point() or outputs.ndim < 3 or outputs.shape[2] < 2:
            raise InputError(
                f"distill_weight = {self.distill_weight:g}: distillation needs an output for each "
                "class; set it to 0 for other tasks"
            )
        students = F.log_softmax(outputs[:-1] / self.temperature, dim=2)
        teacher = F.log_softmax(outputs[-1].detach() / self.temperature, dim=1)
        each = F.kl_div(students, teacher.expand_as(students), reduction="none", log_target=True)
        return self.temperature**2 * each.sum(dim=2).flatten(1).mean(dim=1)


@dataclass(frozen=True)
class ExitsLoss:
    """f as a function of the outputs of exits, with ℓ the loss of ``base``."""

    algorithm: ScaleFL
    base: Objective

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.algorithm.exits_loss(self.base.loss, outputs, targets)


_PARTS: MutableMapping[Tensor, dict[tuple[int, int], Part]] = WeakTensorKeyDictionary()


def _between(levels: Tensor, smaller: int, level: int) -> Part:
    """The coordinates whose level is above ``smaller`` and at most ``level``."""
    known = _PARTS.setdefault(levels, {})  # the same in every round
    if (smaller, level) not in known:
        known[smaller, level] = Part.where((levels > smaller) & (levels <= level))
    return known[smaller, level]


AUTO = "auto"


@dataclass(frozen=True)
class CapacityLevels:
    """Nested levels of capacity, counted from 0; the last is the whole network.

    Args:
        widths: the share of units of each hidden layer, by level.
        depths: the number of exits, by level; empty: in proportion to the level.
        shares: the relative numbers of agents, by level.
    """

    widths: tuple[Fraction, ...]
    depths: tuple[int, ...]
    shares: tuple[Fraction, ...]

    @classmethod
    @lru_cache(maxsize=64)  # called for each agent in each round
    def read(cls, widths: str, depths: str, shares: str) -> CapacityLevels:
        """Parse numbers that are separated by commas; ``depths`` may be "auto"."""
        texts = {"widths": widths, "depths": depths, "shares": shares}
        if depths == AUTO:
            texts["depths"] = ", ".join("1" for _ in widths.split(","))
        by_name = {name: _numbers(name, text) for name, text in texts.items()}
        levels = len(by_name["widths"])
        for name, numbers in by_name.items():
            allowed = f"must have one number for each of the {levels} levels in widths"
            require(len(numbers) == levels, name, texts[name], allowed)
        s, e, n = by_name.values()
        ok = s[0] > 0 and list(s) == sorted(s) and s[-1] == 1
        require(ok, "widths", widths, "must be above 0, in ascending order, and end with 1")
        ok = all(depth >= 1 and depth.denominator == 1 for depth in e) and list(e) == sorted(e)
        require(ok, "depths", depths, "must be whole numbers, 1 or more, in ascending order")
        require(sum(n) > 0, "shares", shares, "must not all be 0")
        return cls(s, () if depths == AUTO else tuple(map(int, e)), n)

    def depths_of(self, exits: int) -> tuple[int, ...]:
        """The number of exits by level, for a model with ``exits`` of them.

        >>> CapacityLevels.read("0.5, 1", "auto", "1, 1").depths_of(3)
        (2, 3)
        """
        levels = len(self.widths)
        return self.depths or tuple(-(-level * exits // levels) for level in range(1, levels + 1))

    def of(self, agent: int) -> int:
        """The level of an agent: a fixed function of its number i = …b₂b₁b₀ (binary).

        [0, 1) is divided in proportion to ``shares``; the level is the index of the interval that
        holds 0.b₀b₁b₂… (van der Corput's sequence), so that any run of consecutive agents has about
        these shares.

        >>> levels = CapacityLevels.read("0.5, 0.5, 1", "1, 2, 3", "1, 1, 2")
        >>> [levels.of(agent) for agent in range(8)]
        [0, 2, 1, 2, 0, 2, 1, 2]
        """
        return self._of(agent)

    @cached_property
    def _of(self) -> Callable[[int], int]:
        return lru_cache(maxsize=2**16)(self._level)  # called for each agent in each round

    def _level(self, agent: int) -> int:
        point = Fraction(int(f"{agent:b}"[::-1], 2), 2 ** agent.bit_length())
        ends = list(accumulate(self.shares))
        return bisect_right(ends, point * ends[-1])


def _numbers(name: str, text: str) -> tuple[Fraction, ...]:
    parts = [part.strip() for part in text.split(",")]
    ok = all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) for part in parts)
    require(ok, name, text, 'must be numbers, 0 or more, separated by commas, as "0.5, 1"')
    return tuple(map(Fraction, parts))


# Networks with early exits: the outputs of each exit, and narrower and shallower sub-networks.
#
# A module has exits if it has two ``nn.ModuleList`` s of equal length, ``stages`` and ``exits``:
# with h₀ the inputs, stage j computes features hⱼ = stageⱼ(hⱼ₋₁) and exit j outputs exitⱼ(hⱼ); the
# module's own outputs are those of the last exit. Any other module has one exit, its output.

_NETWORKS: WeakKeyDictionary[Objective, dict[object, Any]] = WeakKeyDictionary()
"""Of an objective: what the functions below made of it."""


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FirstExits(nn.Module):
    """The outputs of the first ``depth`` exits of a module, stacked: (exits, samples, …).

    Later stages are not computed.
    """

    draws_nothing = True  # its layers may

    def __init__(self, module: nn.Module, depth: int) -> None:
        super().__init__()
        self.module, self.depth = module, depth

    def forward(self, inputs: Tensor) -> Tensor:
        lists = exit_lists(self.module)
        if lists is None:
            return torch.stack([self.module(inputs)])
        features, outputs = inputs, []
        for stage, leave in islice(zip(*lists, strict=True), self.depth):
            features = stage(features)
            outputs.append(leave(features))
        return torch.stack(outputs)


def exit_lists(module: nn.Module) -> tuple[nn.ModuleList, nn.ModuleList] | None:
    """The stages and exits of a module; None if it has none."""
    stages, exits = getattr(module, "stages", None), getattr(module, "exits", None)
    if not isinstance(stages, nn.ModuleList) or not isinstance(exits, nn.ModuleList):
        return None
    if len(stages) != len(exits) or not exits:
        raise InputError(
            f"the model has {len(stages)} stages and {len(exits)} exits: each stage must have one "
            "exit"
        )
    return stages, exits


def exit_number(objective: Objective) -> int:
    """The number of exits of an objective's module."""
    known = _NETWORKS.setdefault(objective, {})
    if "exits" not in known:
        lists = exit_lists(objective.module(objective.initial()))
        known["exits"] = 1 if lists is None else len(lists[1])
    number: int = known["exits"]
    return number


def first_exits(objective: Objective, depth: int, loss: Loss | None = None) -> Objective:
    """An objective on the same vector with the outputs of the first ``depth`` exits.

    Outputs and the argument of ``loss`` have the shape (exits, samples, …). Not defined for a
    module with several inputs.
    """
    known = _NETWORKS.setdefault(objective, {})
    if depth not in known:
        module = objective.module(objective.initial(), training=True)
        known[depth] = objective.variant(module=FirstExits(module, depth))
    network: Objective = known[depth]
    return network if loss is None else network.variant(loss=loss)


def narrowed(objective: Objective, width: Fraction, depth: int, loss: Loss) -> Objective:
    """The objective of one capacity level's sub-network, on a vector of its own."""
    known, key = _NETWORKS.setdefault(objective, {}), ("narrow", width, depth)
    if key not in known:
        module = objective.module(objective.initial(), training=True)
        known[key] = objective.variant(module=narrow_module(module, width, depth))
    network: Objective = known[key]
    return network.variant(loss=loss)


def first_levels(objective: Objective, widths: Sequence[Fraction], depths: Sequence[int]) -> Tensor:
    """For every coordinate of the flat vector the first level, from 0, whose sub-network holds it.

    Level l holds the first ⌈widths[l]·n⌉ of the n units of each hidden layer up to exit
    depths[l]; inputs and outputs are never narrowed. No level may be smaller than the one before,
    and the last is the whole network.

    Args:
        objective: of the network.
        widths: the share of units, by level; the last is 1.
        depths: the number of exits, by level; the last is that of the module.
    """
    known, key = _NETWORKS.setdefault(objective, {}), (tuple(widths), tuple(depths))
    if key not in known:
        known[key] = _first_levels(objective, *key)
    levels: Tensor = known[key]
    return levels


def _first_levels(
    objective: Objective, widths: Sequence[Fraction], depths: Sequence[int]
) -> Tensor:
    last, w = len(widths) - 1, objective.initial()
    if set(widths) == {Fraction(1)} and len(set(depths)) == 1:
        return torch.zeros(objective.size, dtype=torch.int8, device=w.device)
    if len(objective.names) > len(objective.sizes):
        raise InputError("the model has tied weights: no layer of it can be made narrower alone")
    module = objective.module(w)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    layers = _layers(module, dict.fromkeys(name.rpartition(".")[0] for name in objective.names))
    levels = []
    for name in objective.names:
        layer, shape = layers[name.rpartition(".")[0]], tensors[name].shape
        level = torch.full(tuple(shape), last, dtype=torch.int8)
        for number in reversed(range(last)):
            if layer.stage < depths[number]:
                level[layer.held(shape, widths[number])] = number
        levels.append(level.flatten())
    return torch.cat(levels).to(w.device)


def narrow_module(module: nn.Module, width: Fraction, depth: int) -> nn.Module:
    """The sub-network of one capacity level: fewer units, and the first exits alone.

    Its parameters are those that :func:`first_levels` says, in the same order.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    names = dict.fromkeys(name.rpartition(".")[0] for name, _ in tensors)
    layers = {} if width == 1 else _layers(module, names)
    module = copy.deepcopy(module)
    for name, stage_layer in layers.items():
        layer = module.get_submodule(name)
        for key, p in layer.named_parameters(recurse=False):
            value = p.detach()[stage_layer.held(p.shape, width)].clone()
            layer.register_parameter(key, nn.Parameter(value, p.requires_grad))
        for key, b in layer.named_buffers(recurse=False):
            if b.ndim:
                layer.register_buffer(key, b[stage_layer.held(b.shape, width)].clone())
    for each in exit_lists(module) or ():
        del each[depth:]
    return FirstExits(module, depth)


@dataclass(frozen=True)
class _StageLayer:
    """A layer with parameters: its stage, and which of its dimensions are units of hidden layers.

    Args:
        stage: its stage, or that of its exit.
        last: whether its units are outputs.
        before: the number of units of the layer before it; 0: it takes the inputs.
    """

    stage: int
    last: bool
    before: int

    def held(self, shape: Sequence[int], width: Fraction) -> tuple[slice, ...]:
        """The part of a tensor of this layer that a network of this width holds."""
        rows = slice(None if self.last else math.ceil(width * shape[0]))
        if len(shape) == 1 or not self.before:
            return (rows,)
        # a linear layer on flattened channels has several columns per channel
        flat = len(shape) == 2 and shape[1] % self.before == 0
        each = shape[1] // self.before if flat else 1
        return rows, slice(math.ceil(width * (shape[1] // each)) * each)


def _layers(module: nn.Module, names: Collection[str]) -> dict[str, _StageLayer]:
    """All layers with parameters by name."""
    one = exit_lists(module) is None
    chains: dict[tuple[str, int], list[str]] = {}
    for name in names:
        kind, number = ("stages", "0") if one else [*name.split("."), "", ""][:2]
        if kind not in ("stages", "exits"):
            raise InputError(
                f"the model's parameters of {name or 'the model itself'} are in none of its "
                "stages and exits, so that it is unknown which exits need them"
            )
        chains.setdefault((kind, int(number)), []).append(name)
    stages: dict[str, _StageLayer] = {}
    units = {-1: 0}  # after each stage; before the first one there are inputs
    for kind, stage in sorted(chains, key=lambda key: (key[0] == "exits", key[1])):
        chain = chains[kind, stage]
        before = units[max(n for n in units if n < stage + (kind == "exits"))]
        for name in chain:
            layer = module.get_submodule(name)
            _check(name, layer)
            stages[name] = _StageLayer(
                stage, name == chain[-1] and (one or kind == "exits"), before
            )
            if isinstance(layer, nn.Linear):
                before = layer.out_features
            elif isinstance(layer, CONVOLUTIONS):
                before = layer.out_channels
        if kind == "stages":
            units[stage] = before
    return stages


def _check(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose units can't be removed one by one."""
    fine = isinstance(layer, (nn.Linear, nn.modules.batchnorm._BatchNorm))
    fine = fine or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1)
    if not fine:
        raise InputError(
            f"the model's layer {name or 'that is the model itself'} is a {type(layer).__name__}: "
            "only linear, convolution (without groups) and BatchNorm layers can be made narrower"
        )
