"""ScaleFL: weaker agents train narrower and shallower sub-networks (Ilhan et al., 2023).

The network has an exit after each stage (:mod:`nufed.objective.exits`). Level l of L capacity
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

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nufed.algorithms.aggregation import Mean
from nufed.algorithms.fixed_point import fixed_point_mean
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    AgentUpdate,
    Context,
    Cost,
    Personal,
    State,
)
from nufed.errors import InputError, require
from nufed.meta.fine_tuning import descend
from nufed.objective import AnyObjective, Inputs, Loss, Objective
from nufed.objective.loss_gradient import (
    KnownGradient,
    log_softmax_backward,
    nll_gradients,
    of_classes,
)
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

    newcomer: ClassVar[str] = "fine-tunes the sub-network of its capacity level"
    combines: ClassVar[None] = None  # the loss depends on the agent's level

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.levels  # validates them

    @property
    def levels(self) -> CapacityLevels:
        """s, e and the levels of agents."""
        return CapacityLevels.read(self.widths, self.depths, self.shares)

    @property
    def averages_uniformly(self) -> bool:
        return False  # the means of parts are over the agents that hold them

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        exits = objective.base.exits
        if self.levels.depths_of(exits)[-1] != exits:
            raise InputError(
                f"depths = {self.depths!r}: the model has {exits} exit{'s' * (exits > 1)}, which "
                'the last level must reach; change depths, or take model.name = "multi_exit" or a '
                "module with stages and exits of your own"
            )
        return {"model": w, "levels": self.first_levels(objective)}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, (own, part) = received["model"], self.narrow(context)
        cost, rate = Cost(self.steps_per_round(context)), self.start_steps(context).plain_rate
        if rate is None or part.size == len(w):
            y = self.descend(replace(context, objective=own), part.take(w))
            y = y if part.size == len(w) else part.put(w, y)
        else:  # in the coordinates of the whole vector
            y = w.clone()
            own.descend_tensors(own.tensors_inside(y), self.local_batches(context), rate)
        return AgentResult({"model": y}, state, cost)

    def server_update(
        self, context: Context, server: State, updates: Sequence[AgentUpdate]
    ) -> State:
        before, levels = server["model"], [self.levels.of(update.agent) for update in updates]
        w = before.clone()
        # coordinates that the same agents hold are aggregated together
        for smaller, level in pairwise([-1, *sorted(set(levels))]):
            part = _between(server["levels"], smaller, level)
            pairs = zip(updates, levels, strict=True)
            holders = [update for update, own in pairs if own >= level]
            if part.size:
                self.combine(context, holders, part, before, w)
        return {**server, "model": w}

    def combine(
        self,
        context: Context,
        holders: Sequence[AgentUpdate],
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
        own = [
            replace(update, vectors={"model": part.take(update.vectors["model"])})
            for update in holders
        ]
        counted = part.below(context.counted.get("model", len(before)))
        inside = replace(context, counted={"model": counted})
        part.fill(w, self.aggregate(inside, own, "model", part.take(before)))

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        depth, held = self.subnetwork(context)
        w = torch.where(held, received["model"], 0)
        return Personal({"model": w, "exit": torch.tensor(depth, device=w.device)})

    def fine_tune(
        self,
        context: AgentContext,
        received: State,
        personal: State,
        steps: int,
        scale: float = 1.0,
    ) -> Iterator[State]:
        depth, held = self.subnetwork(context)
        own, w = self.objective(context.objective, depth), personal["model"]
        rate = scale * self.rate(context.objective, received)
        yield personal
        for batch in context.batches.draw("adapt", self.batch_size, steps):
            after = own.track(descend(w, rate, own.grad(w, batch)), batch, at=w)
            w = torch.where(held, after, 0)
            yield {**personal, "model": w}

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        exits = objective.base.with_exits(int(personal["exit"]))
        return exits.predict(personal["model"], inputs)[-1]

    # the sub-networks, and the loss of their exits

    def subnetwork(self, context: AgentContext) -> tuple[int, Tensor]:
        """The agent's number of exits d, and its coordinates I_l as a mask."""
        level = self.levels.of(int(context.agent))
        depths = self.levels.depths_of(context.objective.base.exits)
        return depths[level], self.first_levels(context.objective) <= level

    def narrow(self, context: AgentContext) -> tuple[Objective, Part]:
        """f as a function of the agent's coordinates y[I_l] alone, and I_l."""
        base, levels = context.objective.base, self.levels
        depths, level = levels.depths_of(base.exits), levels.of(int(context.agent))
        return base.level(levels.widths, depths, level, ExitsLoss(self, base))

    def first_levels(self, objective: AnyObjective) -> Tensor:
        """The first level that holds each coordinate."""
        depths = self.levels.depths_of(objective.base.exits)
        return objective.base.first_levels(self.levels.widths, depths)

    def objective(self, objective: AnyObjective, depth: int) -> Objective:
        """f of the first d exits."""
        return objective.base.with_exits(depth, ExitsLoss(self, objective.base))

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
class ExitsLoss(KnownGradient):
    """f as a function of the outputs of exits, with ℓ the loss of ``base``."""

    algorithm: ScaleFL
    base: Objective

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.algorithm.exits_loss(self.base.loss, outputs, targets)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        own, kind = self.algorithm, type(self.algorithm)
        same = (kind.exits_loss, kind.distillation) == (ScaleFL.exits_loss, ScaleFL.distillation)
        if not (same and self.base.is_cross_entropy and of_classes(outputs[0], targets)):
            return None
        settings = own.exit_weight, own.distill_weight, own.temperature
        return exits_gradient(outputs, targets, *settings)


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
        found = {name: _numbers(name, text) for name, text in texts.items()}
        levels = len(found["widths"])
        for name, numbers in found.items():
            allowed = f"must have one number for each of the {levels} levels in widths"
            require(len(numbers) == levels, name, texts[name], allowed)
        s, e, n = found.values()
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


def exits_gradient(
    outputs: Tensor, targets: Tensor, exit_weight: float, distill_weight: float, temperature: float
) -> Tensor:
    """∂f/∂z_j of exits j = 1 … d (:mod:`.scalefl`), with ℓ cross-entropy and autograd's bits.

    Args:
        outputs: z, (exits, samples, classes).
        targets: class numbers.
        exit_weight: a.
        distill_weight: γ.
        temperature: T.
    """
    depth = len(outputs)
    total = depth + exit_weight * sum(range(depth))
    weights = [*(exit_weight * j / total for j in range(1, depth)), depth / total]
    logs = torch.log_softmax(outputs, dim=2)
    by_logs = torch.stack(nll_gradients(logs.unbind(), targets, weights))
    d: Tensor = log_softmax_backward(by_logs, logs, 2, logs.dtype)
    if distill_weight and depth > 1:
        # T²·KL(p_d ‖ p_j) has the derivative −T²p_d by log p_j
        logs = torch.log_softmax(outputs / temperature, dim=2)
        weight, kind = distill_weight / total, (d.dtype, d.device)
        each = _distillation(depth, len(targets), weight, temperature, *kind)
        by_logs = each * logs[-1].exp()
        d[:-1] += log_softmax_backward(by_logs, logs[:-1], 2, logs.dtype).div_(temperature)
    return d


@lru_cache(maxsize=64)  # the same in every step
def _distillation(
    depth: int,
    samples: int,
    weight: float,
    temperature: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The derivative of f by −p_d·log p_j of a sample, for j < d."""
    exits = torch.arange(1, depth, dtype=dtype, device=device).view(-1, 1, 1)
    return (weight * exits * temperature**2 / samples).neg_()
