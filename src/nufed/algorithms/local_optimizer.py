"""The optimiser of local steps: SGD, with Nesterov's momentum, and AdamW, by torch's formulas.

SGD without momentum, weight decay, clipping and a schedule is the default: the steps are then
bit-equal to the paper's w ← w − η∇f(w). The optimiser's state (momentum, moments) is reset in every
round: an agent that is rarely picked would continue with gradients of an old model. With
``optimizer_state = "kept"`` it is part of the agent's state instead, and the next round in which
the agent takes part continues from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nufed.errors import require
from nufed.meta.fine_tuning import Rate, descend
from nufed.objective import AnyBatch, AnyObjective
from nufed.settings import check_settings, setting


@dataclass(frozen=True)
class SGD:
    """SGD as in torch: g ← clip(g) + λw, m ← μm + g, w ← w − η_k·m.

    m starts at 0, in every round or once (``optimizer_state``). η_k is the step size of round k,
    with γ = ``schedule_rounds``:

    * ``constant``: η;
    * ``inverse``: η·γ/(γ + k − 1), the 1/k decay of Li et al. (2020);
    * ``cosine``: η·½(1 + cos(π·min(1, (k − 1)/γ))).

    At evaluation, outside of rounds, it is η.

    Args:
        momentum: μ.
        weight_decay: λ.
        clip_norm: the maximum of ‖g‖, to which larger gradients are scaled; 0: no clipping.
        schedule: how the step size depends on the round.
        schedule_rounds: γ.
        optimizer_state: whether m is part of an agent's state.
    """

    momentum: float = setting(0.0, "μ, momentum of local steps", least=0, below=1)
    weight_decay: float = setting(0.0, "λ, weight decay of local steps", least=0)
    clip_norm: float = setting(0.0, "maximum norm of a local gradient; 0: no clipping", least=0)
    schedule: Literal["constant", "inverse", "cosine"] = setting(
        "constant", "how local step sizes depend on the round"
    )
    schedule_rounds: int = setting(
        100, "γ: inverse halves the step size in round γ + 1, cosine ends at 0 there", least=1
    )
    optimizer_state: Literal["fresh", "kept"] = setting(
        "fresh", "the optimiser's state: fresh in every round, or kept in the agent's state"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        allowed = "SGD without momentum has no state to keep; set momentum, or remove it"
        remembers = self.momentum > 0 or isinstance(self, AdamW) or not self.keeps
        require(remembers, "optimizer_state", self.optimizer_state, allowed)

    @property
    def keeps(self) -> bool:
        """Whether agents keep the optimiser's state from round to round."""
        return self.optimizer_state == "kept"

    def initial(self, w: Tensor) -> dict[str, Tensor]:
        """The optimiser's state for a vector like w before the first step."""
        return {"momentum": torch.zeros_like(w)}

    @property
    def linear(self) -> bool:
        """Whether a step is a linear combination of vectors, with scalar coefficients."""
        return not self.clip_norm

    def rate(self, lr: Rate, round: int) -> Rate:
        """η_k in round k = ``round``."""
        if self.schedule == "constant" or round < 1:
            return lr
        share = (round - 1) / self.schedule_rounds
        if self.schedule == "inverse":
            return lr / (1 + share)
        return lr * (0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def start(
        self, objective: AnyObjective, lr: Rate, round: int, memory: Memory | None = None
    ) -> Steps:
        """The optimiser at the start of a loop of steps in a round.

        With ``optimizer_state = "kept"`` its state is read from and written to ``memory``.
        """
        return Steps(self, objective, self.rate(lr, round), memory)


@dataclass(frozen=True)
class Nesterov(SGD):
    """SGD with Nesterov's momentum, as in torch: m ← μm + g, w ← w − η_k·(g + μm)."""

    momentum: float = setting(0.9, "μ, momentum of local steps", above=0, below=1)


@dataclass(frozen=True)
class AdamW(SGD):
    """AdamW as in torch (Loshchilov and Hutter, 2019), in step t = 1, 2, … of a round:

        g ← clip(g),  m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,
        w ← (1 − η_kλ)w − η_k·m̂/(√v̂ + ε),   m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ).

    A first step moves every coordinate by about η_k, whatever the size of its gradient: step sizes
    of SGD do not suit it.

    Args:
        weight_decay: λ.
        beta1: β₁.
        beta2: β₂.
        epsilon: ε.
    """

    momentum: float = field(default=0.0, init=False)
    weight_decay: float = setting(0.01, "λ, weight decay of local steps", least=0)
    beta1: float = setting(0.9, "β₁, decay of AdamW's mean of gradients", least=0, below=1)
    beta2: float = setting(0.999, "β₂, decay of AdamW's mean of squares", least=0, below=1)
    epsilon: float = setting(1e-8, "ε, added to AdamW's root of the mean of squares", above=0)

    @property
    def linear(self) -> bool:
        return False

    def initial(self, w: Tensor) -> dict[str, Tensor]:
        zero = torch.zeros_like(w)
        return {"mean": zero, "squares": zero, "steps": w.new_zeros(1)}

    def start(
        self, objective: AnyObjective, lr: Rate, round: int, memory: Memory | None = None
    ) -> AdamWSteps:
        return AdamWSteps(self, objective, self.rate(lr, round), memory)


@dataclass(frozen=True)
class Memory:
    """The state of one loop's optimiser, as part of an agent's state.

    Args:
        state: the agent's next state, which is written to.
        loop: the name of the loop, with which its names in the state begin.
    """

    state: dict[str, Tensor]
    loop: str = "local"

    def __getitem__(self, name: str) -> Tensor | None:
        return self.state.get(f"{self.loop}.{name}")

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.state[f"{self.loop}.{name}"] = value


class Steps:
    """SGD in one loop of local steps.

    >>> from nufed import Objective
    >>> objective = Objective(torch.nn.Linear(2, 1, bias=False))
    >>> steps = SGD(momentum=0.5, clip_norm=5.0).start(objective, lr=0.1, round=1)
    >>> w = steps(torch.zeros(2), torch.tensor([30.0, 40.0]))
    >>> w, steps(w, torch.zeros(2))
    (tensor([-0.3000, -0.4000]), tensor([-0.4500, -0.6000]))
    """

    def __init__(
        self, optimizer: SGD, objective: AnyObjective, rate: Rate, memory: Memory | None = None
    ) -> None:
        self._optimizer, self._objective, self._rate = optimizer, objective, rate
        self._memory = memory if memory is not None and optimizer.keeps else Memory({})

    def __call__(self, w: Tensor, gradient: Tensor, batch: AnyBatch | None = None) -> Tensor:
        """w after one step; ``batch`` updates running statistics, if the model tracks them."""
        after = self._step(w, self._clipped(gradient))
        if batch is None:
            return after
        return self._objective.base.track(after, batch, at=w, overwrite=True)

    def _clipped(self, g: Tensor) -> Tensor:
        most = self._optimizer.clip_norm
        if not most:
            return g
        norm = self._objective.norm(g)
        return g * torch.where(norm > most, most / norm, torch.ones_like(norm))

    def _step(self, w: Tensor, g: Tensor) -> Tensor:
        settings = self._optimizer
        if settings.weight_decay:
            g = g + settings.weight_decay * w
        if settings.momentum:
            before = self._memory["momentum"]
            self._memory["momentum"] = m = g if before is None else settings.momentum * before + g
            g = g + settings.momentum * m if isinstance(settings, Nesterov) else m
        return descend(w, self._rate, g)


class AdamWSteps(Steps):
    """AdamW in one loop of local steps.

    >>> from nufed import Objective
    >>> objective = Objective(torch.nn.Linear(2, 1, bias=False))
    >>> steps = AdamW(weight_decay=0.0).start(objective, lr=0.1, round=1)
    >>> steps(torch.zeros(2), torch.tensor([30.0, -0.4]))
    tensor([-0.1000,  0.1000])
    """

    def __init__(
        self, optimizer: AdamW, objective: AnyObjective, rate: Rate, memory: Memory | None = None
    ) -> None:
        super().__init__(optimizer, objective, rate, memory)
        self._adamw, steps = optimizer, self._memory["steps"]
        self._taken = 0 if steps is None else int(steps)

    def _step(self, w: Tensor, g: Tensor) -> Tensor:
        adamw, memory = self._adamw, self._memory
        self._taken += 1
        mean, squares = (1 - adamw.beta1) * g, (1 - adamw.beta2) * g * g
        if (before := memory["mean"]) is not None:
            mean = adamw.beta1 * before + mean
        if (before := memory["squares"]) is not None:
            squares = adamw.beta2 * before + squares
        memory["mean"], memory["squares"] = mean, squares
        if adamw.keeps:
            memory["steps"] = w.new_full((1,), self._taken)
        of_squares = squares / (1 - adamw.beta2**self._taken)
        direction = mean / (1 - adamw.beta1**self._taken) / (of_squares.sqrt() + adamw.epsilon)
        decayed = w * (1 - self._rate * adamw.weight_decay) if adamw.weight_decay else w
        return descend(decayed, self._rate, direction)


LOCAL_OPTIMIZERS: dict[str, type[SGD]] = {"sgd": SGD, "nesterov": Nesterov, "adamw": AdamW}
