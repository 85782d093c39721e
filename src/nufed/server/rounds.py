"""The server's half of a round, the same for every engine: cohort, update checks, quorum.

Before a run, it is stated how much memory a round's updates take at the server.
"""

from __future__ import annotations

import builtins
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from nufed.algorithms.aggregation import update_copies
from nufed.algorithms.compression import Codec
from nufed.algorithms.protocol import AgentUpdate, Algorithm, Context, Cost, State, SummedUpdates
from nufed.algorithms.server_optimizer import OPTIMIZER_STATE, check_statistics
from nufed.errors import Fault, TrainingError, UpdateError, require
from nufed.objective import AnyObjective
from nufed.seeding import stream
from nufed.server.checks import change_norm
from nufed.server.incoming import Incoming, sums_suffice
from nufed.server.states import AgentStates, MemoryStates

LOG = logging.getLogger("nufed")
GIB = 2**30


def kept_bytes(algorithm: Algorithm, server: State, context: Context) -> int:
    """Bytes of the updates that the server keeps in a round; 0 if it adds them as they arrive."""
    if sums_suffice(algorithm, context, server):
        return 0
    size = sum(server[name].nbytes for name in algorithm.sends if name in server)
    return context.cohort * size * update_copies(algorithm)


def warn_of_memory(
    name: str, algorithm: Algorithm, server: State, context: Context, available: int | None = None
) -> None:
    """Log a warning if the updates of a round need more memory than is available."""
    needed = kept_bytes(algorithm, server, context)
    free = available_memory() if available is None else available
    if free is not None and needed > free:
        LOG.warning(
            "%s: the server keeps all %d updates of a round, %.3g GiB, and %.3g GiB of memory are "
            "available: lower participation, or use the uniform mean, which adds updates as they "
            "arrive",
            *(name, context.cohort, needed / GIB, free / GIB),
        )


def available_memory() -> int | None:
    """Bytes of memory that are available; None where the system does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")), None)


TOO_LATE = "it answered too late"


@dataclass(frozen=True)
class Rules:
    """When the server accepts a round.

    Args:
        min_updates: quorum, the valid updates that a round needs; with fewer it is retried with
            another cohort.
        attempts: maximum number of attempts at a round before training stops.
        max_update_norm: upper bound on the norm of a change relative to the median over agents of
            this round or the last, for each vector separately (:mod:`nufed.server.checks`); None:
            no bound.
        codec: compresses what agents send; None: nothing is compressed.
    """

    min_updates: int = 1
    attempts: int = 3
    max_update_norm: float | None = None
    codec: Codec | None = None


@dataclass(frozen=True)
class Progress:
    """Training state after ``round`` rounds, and a record of the last one.

    ``server``, ``states`` and ``medians`` are all that the next round needs (on Flower sites keep
    their own states, and ``states`` is empty); the rest is for records. All rounds of a training
    share one store of ``states``, which holds the latest ones. ``rejected`` covers all ``attempts``
    at the round; ``cohort``, ``dropped`` and ``cost`` are of the last attempt, and ``taken`` are
    the agents whose updates were aggregated.
    """

    round: int
    server: State
    states: AgentStates = field(default_factory=MemoryStates)
    cohort: tuple[int, ...] = ()
    rejected: tuple[UpdateError, ...] = ()
    dropped: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    attempts: int = 1
    cost: Cost = field(default_factory=Cost)
    update_norm: float | None = None  # of the server's change of the model; None before round 1
    medians: Mapping[str, float] = field(default_factory=dict)  # of norms, for max_update_norm
    update_bytes: int | None = None  # of a compressed update; None: not compressed


def cohort_size(agents: int, participation: float) -> int:
    """max(1, round(rN)): the number of agents in a round's cohort."""
    return max(1, builtins.round(participation * agents))


def choose_cohort(
    agents: Sequence[int], participation: float, seed: int, round: int, attempt: int = 0
) -> list[int]:
    """max(1, round(rN)) of the N agents, uniformly without replacement (line 2 of Algorithm 1).

    Every ``attempt`` at a round draws another cohort.

    >>> choose_cohort(range(10), participation=0.3, seed=0, round=1)
    [5, 7, 8]
    """
    require(0 < participation <= 1, "participation", participation, "must be above 0 and at most 1")
    size = cohort_size(len(agents), participation)
    picked = stream(seed, "cohort", round, step=attempt).choice(len(agents), size, replace=False)
    return sorted(agents[i] for i in picked)


def server_model(algorithm: Algorithm) -> str:
    """The name of the server's model, or of the part of it that the server holds."""
    names = algorithm.receives
    return "model" if "model" in names or not names else str(names[0])


def initial_server(algorithm: Algorithm, objective: AnyObjective, w: Tensor) -> State:
    """The server's state before the first round, including its optimiser's."""
    server = algorithm.server_init(objective, w)
    check_statistics(algorithm, objective.base)
    name = server_model(algorithm)
    return (
        {**server, **algorithm.server_optimizer.initial(server[name])} if name in server else server
    )


def next_server(
    algorithm: Algorithm, context: Context, server: State, updates: Sequence[AgentUpdate]
) -> State:
    """The server's state after a round: ``server_update``, then its optimiser.

    The optimiser takes no step in a round that does not train the model, where ``server_update``
    returns the same tensor.
    """
    after = algorithm.server_update(context, server, updates)
    name = server_model(algorithm)
    if name not in after or after[name] is server[name]:
        return after
    memory = {key: server[key] for key in OPTIMIZER_STATE if key in server}
    model, memory = algorithm.server_optimizer.step(server[name], after[name], memory)
    return {**after, name: model, **memory}


def counted_parameters(
    algorithm: Algorithm, objective: AnyObjective, server: State
) -> dict[str, int]:
    """How many numbers of the vectors that agents send are parameters: the first ones.

    Only vectors that end in tracked running statistics are named
    (:meth:`nufed.Objective.counted`).
    """
    base, part = objective.base, algorithm.server_part(objective)
    number, size = base.counted(part), base.size if part is None else part.size
    like = [n for n in algorithm.sends if n in server and server[n].shape == (size,)]
    return dict.fromkeys(like, number) if number < size else {}


def update_norm(algorithm: Algorithm, before: State, after: State, context: Context) -> float:
    """‖w_k − w_{k−1}‖: the Euclidean norm of the server's change of its model in a round.

    Where the server holds a part of the model only, it is the change of that part; running
    statistics do not count.
    """
    name = server_model(algorithm)
    names = [name] if name in after else list(algorithm.receives)
    return math.hypot(*(change_norm(after[n], before[n], context.counted.get(n)) for n in names))


class QuorumError(TrainingError):
    """A round has fewer valid updates than its quorum; another cohort may do better."""

    def __init__(self, round: int, rejected: list[UpdateError], rules: Rules) -> None:
        super().__init__(below_quorum(round, rejected, rules))
        self.rejected = rejected


def below_quorum(round: int, rejected: Sequence[UpdateError], rules: Rules) -> str:
    """The message about a round with too few valid updates."""
    first: dict[str, UpdateError] = {}
    reasons = "; ".join(
        str(r) if first.setdefault(r.reason, r) is r else f"{r.who}: the same" for r in rejected
    )
    reasons = reasons or "too few agents replied"
    diverged = any(r.fault in (Fault.NOT_FINITE, Fault.DIVERGED) for r in rejected)
    return (
        f"round {round} has no usable update or fewer than min_updates = {rules.min_updates} "
        f"({reasons})" + ("; lower meta_lr or adapt_lr" if diverged else "")
    )


class Attempts:
    """The attempts at a round, each with another cohort, until one reaches the quorum::

        for cohort, number in attempts:
            with attempts.quorum():  # a QuorumError leads to the next attempt
                return attempts.accepted(progress_after(cohort))

    Args:
        round: the number of the round.
        agents: those that take part in training.
        participation: fraction of them in a cohort.
        seed: for drawing cohorts.
        rules: when the server accepts a round.
        explain: adds likely causes to the rejected updates when training stops.
    """

    def __init__(
        self,
        round: int,
        agents: Sequence[int],
        *,
        participation: float,
        seed: int,
        rules: Rules = Rules(),
        explain: Callable[[list[UpdateError]], list[UpdateError]] = list,
    ) -> None:
        self._round, self._agents, self._participation = round, agents, participation
        self._seed, self._rules, self._explain = seed, rules, explain
        self._rejected: list[UpdateError] = []
        self._last: list[UpdateError] = []  # not the error, whose traceback holds vectors
        self._number = 0

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """Cohorts and the numbers of attempts; after the last a TrainingError."""
        for number in range(self._rules.attempts):
            self._number = number
            k, seed = self._round, self._seed
            yield choose_cohort(self._agents, self._participation, seed, k, number), number
        tried = f", in {self._rules.attempts} attempts" if self._rules.attempts > 1 else ""
        reasons = below_quorum(self._round, self._explain(self._last), self._rules)
        raise TrainingError(f"{reasons}{tried}")

    @contextmanager
    def quorum(self) -> Iterator[None]:
        """An attempt, which may raise :class:`QuorumError`."""
        try:
            yield
        except QuorumError as error:
            self._rejected += error.rejected
            self._last = error.rejected

    def accepted(self, after: Progress) -> Progress:
        """The training state after the round, with a record of all attempts."""
        rejected = (*self._rejected, *after.rejected)
        return replace(after, rejected=rejected, attempts=self._number + 1)


def open_round(
    algorithm: Algorithm,
    progress: Progress,
    context: Context,
    cohort: Collection[int] | None = None,
    rules: Rules = Rules(),
) -> Incoming:
    """Takes the updates of the round after ``progress``, as they arrive.

    They are added to a sum where the algorithm needs only their means; else all are kept.
    """
    return Incoming(
        {name: progress.server[name] for name in algorithm.sent_in(context.round)},
        context.round,
        cohort=cohort,
        max_norm=rules.max_update_norm,
        medians=progress.medians,
        counted=context.counted,
        summed=sums_suffice(algorithm, context, progress.server),
    )


def close_round(
    algorithm: Algorithm,
    server: State,
    updates: Incoming | SummedUpdates,
    context: Context,
    *,
    failed: Iterable[UpdateError] = (),
    rules: Rules = Rules(),
    label: str = "",
    who: Callable[[int], str] = "agent {}".format,
) -> tuple[State, list[UpdateError]]:
    """The server's next state from the updates of a round, and the rejected updates.

    Each rejected update is logged under ``label`` (logger "nufed", level WARNING).

    Args:
        algorithm: aggregates the updates.
        server: the server's state before the round.
        updates: those of :func:`open_round`, or means of which single updates are unknown.
        context: the round, N and the size of a cohort.
        failed: agents without an update, and why.
        rules: when the server accepts a round.
        label: names the training in the log.
        who: names an agent in the log and in errors.

    Raises:
        QuorumError: there are too few valid updates.
    """
    accepted: Sequence[AgentUpdate]
    rejected: list[UpdateError] = []
    if isinstance(updates, SummedUpdates):  # single ones can't be checked
        accepted = updates
    else:
        accepted, rejected = updates.close()
    rejected = [
        UpdateError(e.agent, e.round, e.reason, e.fault, who(e.agent)) for e in (*rejected, *failed)
    ]
    for error in rejected:
        LOG.warning("update left out: %s%s", label and f"{label}, ", error)
    if len(accepted) < rules.min_updates:
        raise QuorumError(context.round, rejected, rules)
    return next_server(algorithm, context, server, accepted), rejected
