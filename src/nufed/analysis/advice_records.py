"""Records of what ``nufed advise`` finds; ``advice.json`` is written from them.

Scores are accuracies, or for regression negative losses: higher is better.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nufed.runs.json_files import finite


@dataclass(frozen=True)
class Point:
    """A number of steps: the score over agents, its spread, and the cost for an agent.

    ``harmed`` is the share of agents whose fine-tuned model is worse than the global one.
    """

    steps: int
    mean: float
    interval: float | None
    low: float
    high: float
    harmed: float
    gradients: int
    samples: int


@dataclass(frozen=True)
class Curve:
    """A method with ``times`` the step size of its bundle, by number of steps."""

    method: str
    times: float
    lr: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Against:
    """Difference to a fixed number of steps for all agents."""

    steps: int
    difference: float
    interval: float | None


@dataclass(frozen=True)
class Automatic:
    """Steps that each agent chose itself: mean score, mean number, and comparisons.

    ``best`` is against the best fixed number, chosen in hindsight on the same scores, ``default``
    against the number that the report shows.
    """

    mean: float
    steps: float
    best: Against
    default: Against


@dataclass(frozen=True)
class Amount:
    """Gain of the recommended choice with this many samples, over agents that have as many."""

    samples: int
    agents: int
    shared: float
    personal: float
    gain: float
    interval: float | None


@dataclass(frozen=True)
class Recommended:
    """The cheapest choice that is as good as the best; ``samples``: the fewest with a gain."""

    method: str
    steps: int
    lr: float
    times: float
    samples: int | None


@dataclass(frozen=True)
class LeftOut:
    """A method that the advice excludes, and why."""

    method: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """Advice from a finished run on fine-tuning its global models."""

    measure: str
    agents: int
    scored: str
    recommended: Recommended
    curves: tuple[Curve, ...]
    auto: dict[str, Automatic]
    amounts: tuple[Amount, ...]
    majority: float | None
    training: dict[str, dict[str, float]]
    left_out: tuple[LeftOut, ...]

    @property
    def accuracy(self) -> bool:
        """Whether scores are accuracies, not losses."""
        return self.measure == "accuracy"

    @property
    def recommended_curve(self) -> Curve:
        best = self.recommended
        return next(c for c in self.curves if (c.method, c.times) == (best.method, best.times))

    def record(self) -> dict[str, Any]:
        """For JSON, where ``shared`` is called ``global``, a keyword in Python."""
        found: dict[str, Any] = finite(asdict(self))
        found["amounts"] = [
            {"global" if key == "shared" else key: value for key, value in row.items()}
            for row in found["amounts"]
        ]
        return found
