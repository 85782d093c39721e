"""The server's half of a round, the same for every engine: whom to ask, and what to make of it."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence

from nufed.aggregate import screen
from nufed.algorithm import Algorithm, ClientUpdate, State
from nufed.errors import TrainingError, UpdateError, require
from nufed.seeding import stream


def choose_cohort(agents: Sequence[int], participation: float, seed: int, round: int) -> list[int]:
    """max(1, round(rN)) of the N agents, uniformly without replacement (line 2 of Algorithm 1).

    >>> choose_cohort(range(10), participation=0.3, seed=0, round=1)
    [5, 7, 8]
    """
    require(0 < participation <= 1, "participation", participation, "must be above 0 and at most 1")
    size = max(1, builtins.round(participation * len(agents)))
    picked = stream(seed, "cohort", round).choice(len(agents), size, replace=False)
    return sorted(agents[i] for i in picked)


def to_send(algorithm: Algorithm, server: State) -> State:
    """What the server sends to an agent."""
    return {name: server[name] for name in algorithm.receives}


def close_round(
    algorithm: Algorithm, server: State, updates: Iterable[ClientUpdate], round: int
) -> tuple[State, list[UpdateError]]:
    """The server's next state from the updates of a round, and the updates it left out.

    Raises:
        TrainingError: no update can be used.
    """
    expected = {name: server[name] for name in algorithm.sends}
    accepted, rejected = screen(updates, expected, round)
    if not accepted:
        reasons = "; ".join(str(r) for r in rejected) or "no agent answered"
        raise TrainingError(
            f"round {round} has no usable update ({reasons}); if values are not finite, lower "
            "meta_lr or adapt_lr"
        )
    return algorithm.server_update(server, accepted), rejected
