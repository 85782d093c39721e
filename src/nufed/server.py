"""The server's half of a round, the same for every engine: whom to ask, and what to make of it."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nufed.aggregate import screen
from nufed.algorithm import Algorithm, ClientUpdate, Cost, State
from nufed.errors import TrainingError, UpdateError, require
from nufed.seeding import stream

LOG = logging.getLogger("nufed")
TOO_LATE = "it answered too late"


@dataclass(frozen=True)
class Rules:
    """When the server takes a round.

    Args:
        min_updates: usable updates that a round needs; with fewer it is tried again with another
            cohort.
        attempts: how often a round is tried before training stops.
        max_update_norm: how many times the median length of all changes a change may have, of each
            vector by itself; None: any.
    """

    min_updates: int = 1
    attempts: int = 3
    max_update_norm: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where training stands after ``round`` rounds, and what the last of them took.

    ``server`` and ``clients`` are all that the next round needs (on Flower sites keep their states
    themselves, and ``clients`` is empty); the rest is for records. ``rejected`` are the updates of
    all ``attempts``, ``cohort`` and the others of the last.
    """

    round: int
    server: State
    clients: Mapping[int, State] = field(default_factory=dict)
    cohort: tuple[int, ...] = ()
    rejected: tuple[UpdateError, ...] = ()
    dropped: tuple[int, ...] = ()
    attempts: int = 1
    cost: Cost = field(default_factory=Cost)

    def client_states(self, algorithm: Algorithm, agents: Iterable[int]) -> dict[int, State]:
        """The agents' states; an agent that never took part starts from the present model."""
        model = self.server["model"]
        return {
            agent: self.clients[agent] if agent in self.clients else algorithm.client_init(model)
            for agent in agents
        }


def cohort_size(agents: int, participation: float) -> int:
    """max(1, round(rN)): how many of so many agents are asked in a round."""
    return max(1, builtins.round(participation * agents))


def choose_cohort(
    agents: Sequence[int], participation: float, seed: int, round: int, attempt: int = 0
) -> list[int]:
    """max(1, round(rN)) of the N agents, uniformly without replacement (line 2 of Algorithm 1).

    Another ``attempt`` at the same round asks others.

    >>> choose_cohort(range(10), participation=0.3, seed=0, round=1)
    [5, 7, 8]
    """
    require(0 < participation <= 1, "participation", participation, "must be above 0 and at most 1")
    size = cohort_size(len(agents), participation)
    picked = stream(seed, "cohort", round, step=attempt).choice(len(agents), size, replace=False)
    return sorted(agents[i] for i in picked)


def to_send(algorithm: Algorithm, server: State) -> State:
    """What the server sends to an agent."""
    return {name: server[name] for name in algorithm.receives}


class TooFewError(TrainingError):
    """A round has fewer usable updates than it needs; another cohort may do better."""

    def __init__(self, round: int, rejected: list[UpdateError], rules: Rules) -> None:
        super().__init__(too_few(round, rejected, rules))
        self.rejected = rejected


def too_few(round: int, rejected: Sequence[UpdateError], rules: Rules) -> str:
    """What is wrong with a round that has too few usable updates."""
    reasons = "; ".join(str(r) for r in rejected) or "too few agents answered"
    return (
        f"round {round} has no usable update or fewer than min_updates = {rules.min_updates} "
        f"({reasons}); if values are not finite, lower meta_lr or adapt_lr"
    )


def try_round(
    attempt: Callable[[list[int], int], Progress],
    round: int,
    agents: Sequence[int],
    *,
    participation: float,
    seed: int,
    rules: Rules = Rules(),
    explain: Callable[[list[UpdateError]], list[UpdateError]] = list,
) -> Progress:
    """Where training stands after a round: ``attempt(cohort, number)`` with the first cohort that
    has enough usable updates.

    Args:
        attempt: lets a cohort work and closes the round; it may raise :class:`TooFewError`.
        round: the number of the round.
        agents: those that take part in training.
        participation: the share of them that makes a cohort.
        seed: what cohorts are drawn from.
        rules: when the server takes a round.
        explain: adds likely causes to the updates that are named when training stops.
    """
    rejected: list[UpdateError] = []
    for number in range(rules.attempts):
        cohort = choose_cohort(agents, participation, seed, round, number)
        try:
            after = attempt(cohort, number)
            return replace(after, rejected=(*rejected, *after.rejected), attempts=number + 1)
        except TooFewError as error:
            rejected += error.rejected
            if number + 1 == rules.attempts:
                tried = f", in {rules.attempts} attempts" if rules.attempts > 1 else ""
                reasons = too_few(round, explain(error.rejected), rules)
                raise TrainingError(f"{reasons}{tried}") from error
    raise AssertionError("a round is tried at least once")


def close_round(
    algorithm: Algorithm,
    server: State,
    updates: Iterable[ClientUpdate],
    round: int,
    *,
    cohort: Collection[int] | None = None,
    failed: Iterable[UpdateError] = (),
    rules: Rules = Rules(),
    label: str = "",
) -> tuple[State, list[UpdateError]]:
    """The server's next state from the updates of a round, and the updates it left out.

    What is left out is also logged (logger "nufed", level WARNING), each under ``label``.

    Args:
        algorithm: what combines the updates.
        server: the server's state before the round.
        updates: what came in.
        round: the number of the round.
        cohort: the agents that were asked; None: anyone may answer.
        failed: agents of which there is no update to look at, and why.
        rules: when the server takes a round.
        label: what is being trained, for the log.

    Raises:
        TooFewError: too few updates can be used.
    """
    expected = {name: server[name] for name in algorithm.sends}
    accepted, rejected = screen(
        updates, expected, round, cohort=cohort, max_norm=rules.max_update_norm
    )
    rejected += failed
    for error in rejected:
        LOG.warning("update left out: %s%s", label and f"{label}, ", error)
    if len(accepted) < rules.min_updates:
        raise TooFewError(round, rejected, rules)
    return algorithm.server_update(server, accepted), rejected
