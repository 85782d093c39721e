"""Algorithm 1 of the paper, on this machine: the loop over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import Tensor

from nufed.aggregate import NOT_FINITE
from nufed.algorithm import Algorithm, ClientUpdate, Cost
from nufed.errors import UpdateError
from nufed.server import (
    TOO_LATE,
    Progress,
    Rules,
    choose_cohort,
    close_round,
    to_send,
    try_round,
)
from nufed.simulation.diagnose import diagnose, doubt
from nufed.simulation.engine import Engine, work_of
from nufed.simulation.faults import Faults

Doubt: TypeAlias = Callable[[int, str], None]
"""Takes the number of a round, and what is wrong with the numbers behind it."""


def train(
    algorithm: Algorithm,
    engine: Engine,
    w: Tensor,
    *,
    rounds: int,
    participation: float,
    start: Progress | None = None,
    rules: Rules = Rules(),
    faults: Faults = Faults(),
    label: str = "",
    on_doubt: Doubt | None = None,
) -> Iterator[Progress]:
    """Train from the model w, yielding where it stands before the first and after every round.

    Or go on from ``start``, where training stood once: it gives the same bits. ``label`` says in
    the log what is being trained. With ``on_doubt``, the curvature is checked at one agent before
    rounds 1, 10, 100, …: what is found does not depend on workers, or on where it was resumed.
    """
    progress = start or Progress(0, algorithm.server_init(engine.objective, w))
    del w, start  # a large model's memory is needed again
    yield progress
    while progress.round < rounds:
        if on_doubt is not None:
            _check_curvature(algorithm, engine, progress, participation, on_doubt)
        progress = run_round(algorithm, engine, progress, participation, rules, faults, label)
        yield progress


def run_round(
    algorithm: Algorithm,
    engine: Engine,
    progress: Progress,
    participation: float,
    rules: Rules = Rules(),
    faults: Faults = Faults(),
    label: str = "",
) -> Progress:
    """One round: choose agents, let them work, and take in what they send.

    A round with too few usable updates is tried again with another cohort.
    """

    def attempt(cohort: list[int], number: int) -> Progress:
        return _attempt(algorithm, engine, progress, cohort, number, rules, faults, label)

    return try_round(
        attempt,
        progress.round + 1,
        engine.federation.split.seen,
        participation=participation,
        seed=engine.seed,
        rules=rules,
        explain=lambda rejected: _explained(rejected, algorithm, engine, progress),
    )


def _check_curvature(
    algorithm: Algorithm,
    engine: Engine,
    progress: Progress,
    participation: float,
    on_doubt: Doubt,
) -> None:
    k, federation, seed = progress.round + 1, engine.federation, engine.seed
    if k != 10 ** (len(str(k)) - 1):
        return
    agent = choose_cohort(federation.split.seen, participation, seed, k)[0]
    with work_of([agent], f"round {k}"):
        found = doubt(
            algorithm,
            engine.objective,
            federation,
            agent,
            seed=seed,
            round=k,
            server=progress.server,
        )
    if found:
        on_doubt(k, found)


def _attempt(
    algorithm: Algorithm,
    engine: Engine,
    progress: Progress,
    cohort: list[int],
    attempt: int,
    rules: Rules,
    faults: Faults,
    label: str,
) -> Progress:
    k, federation, seed = progress.round + 1, engine.federation, engine.seed
    fates = faults.fates(cohort, seed, k, attempt)
    asked = [agent for agent in cohort if agent not in fates.dropped]
    states = progress.client_states(algorithm, asked)
    received = to_send(algorithm, progress.server)
    results = engine.client_updates(algorithm, received, states, k) if asked else {}
    corrupt = faults.corrupt_agents(federation.split.seen, seed)
    before = {name: progress.server[name] for name in algorithm.sends}
    updates = [
        ClientUpdate(
            agent,
            k,
            len(federation.split.train[agent]),
            faults.instead_of(result.vectors, before, seed, k, agent)
            if agent in corrupt
            else result.vectors,
        )
        for agent, result in results.items()
        if agent not in fates.late
    ]
    server, rejected = close_round(
        algorithm,
        progress.server,
        updates,
        k,
        cohort=cohort,
        failed=[UpdateError(agent, k, TOO_LATE) for agent in fates.late],
        rules=rules,
        label=label,
    )
    if not corrupt:  # of those the cause is known
        rejected = _explained(rejected, algorithm, engine, progress)
    left_out = {update.agent for update in rejected}
    kept = {a: r.state for a, r in results.items() if r.state and a not in left_out}
    return Progress(
        round=k,
        server=server,
        clients={**progress.clients, **kept},
        cohort=tuple(cohort),
        rejected=tuple(rejected),
        dropped=tuple(fates.dropped),
        cost=sum((result.cost for result in results.values()), Cost()),
    )


def _explained(
    rejected: list[UpdateError], algorithm: Algorithm, engine: Engine, progress: Progress
) -> list[UpdateError]:
    """The same, the first that is not finite with its likely cause."""
    explained = list(rejected)
    for place, error in enumerate(rejected):
        if error.reason.endswith(NOT_FINITE):
            cause = diagnose(
                algorithm,
                engine.objective,
                engine.federation,
                error.agent,
                seed=engine.seed,
                round=error.round,
                server=progress.server,
            )
            if cause:
                reason = f"{error.reason}: {cause}"
                explained[place] = UpdateError(error.agent, error.round, reason)
            break
    return explained
