"""Algorithm 1 of the paper, on this machine: the loop over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor

from nufed.algorithms.compression import Codec, compress, update_bytes, without_residuals
from nufed.algorithms.protocol import AgentContext, AgentUpdate, Algorithm, Context, Cost, State
from nufed.errors import Fault, UpdateError
from nufed.server import (
    TOO_LATE,
    AgentStates,
    Attempts,
    MemoryStates,
    Progress,
    Rules,
    choose_cohort,
    close_round,
    cohort_size,
    open_round,
    to_send,
    update_norm,
)
from nufed.simulation.engine import Engine, work_of
from nufed.simulation.faults import Faults

PART_BYTES = 2**24  # of updates that are in memory at once, before aggregation
Doubt: TypeAlias = Callable[[int, str], None]
"""Called with a round and the numerical problem found in it."""


def train(
    algorithm: Algorithm,
    engine: Engine,
    w: Tensor,
    *,
    rounds: int,
    participation: float,
    start: Progress | None = None,
    states: AgentStates | None = None,
    rules: Rules = Rules(),
    faults: Faults = Faults(),
    label: str = "",
    on_doubt: Doubt | None = None,
) -> Iterator[Progress]:
    """Train from the model w, yielding the progress before the first and after every round.

    With ``start``, resumes from that progress; the bits are those of an uninterrupted training.
    ``states`` stores the agents' states of a new training, by default in memory. ``label`` names
    the training in the log. With ``on_doubt``, the curvature is checked at one agent before rounds
    1, 10, 100, …; the findings depend neither on workers nor on where training was resumed.
    """
    progress = start or Progress(
        0, algorithm.initial_server(engine.objective, w), states or MemoryStates()
    )
    del w, start  # frees the memory of a large model
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
    """One round: draw a cohort, train its agents, check and aggregate their updates.

    A round below the quorum is retried with another cohort.
    """
    context = _context(algorithm, engine, progress, participation)
    attempts = Attempts(
        context.round,
        engine.federation.split.seen,
        participation=participation,
        seed=engine.seed,
        rules=rules,
        explain=lambda rejected: _explained(rejected, algorithm, engine, progress, context),
    )
    run = partial(_attempt, algorithm, engine, progress, context, rules, faults, label)
    for cohort, number in attempts:
        with attempts.quorum():
            return attempts.accepted(run(cohort, number))
    raise AssertionError("attempts end with an error")


def replay(
    algorithm: Algorithm,
    engine: Engine,
    w: Tensor,
    taken: Iterable[Sequence[int]],
    participation: float,
    codec: Codec | None = None,
) -> Iterator[Progress]:
    """Train with the recorded participants of every round (``taken`` in metrics.jsonl).

    Yields the progress before the first and after every round: that of a federation whose server
    aggregated these agents' updates, whatever happened to the others.
    """
    progress = Progress(0, algorithm.initial_server(engine.objective, w))
    yield progress
    for agents in taken:
        context = _context(algorithm, engine, progress, participation)
        progress = _attempt(
            algorithm, engine, progress, context, Rules(codec=codec), Faults(), "", list(agents), 0
        )
        yield progress


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
    context = _agent_context(engine, agent, _context(algorithm, engine, progress, participation))
    with work_of([agent], f"round {k}"):
        found = algorithm.doubt(context, to_send(algorithm, progress.server))
    if found:
        on_doubt(k, found)


def _attempt(
    algorithm: Algorithm,
    engine: Engine,
    progress: Progress,
    context: Context,
    rules: Rules,
    faults: Faults,
    label: str,
    cohort: list[int],
    attempt: int,
) -> Progress:
    _keep_freed_memory()
    k, federation, seed = context.round, engine.federation, engine.seed
    fates = faults.fates(cohort, seed, k, attempt)
    present = [agent for agent in cohort if agent not in fates.dropped]
    received = to_send(algorithm, progress.server)
    corrupt = faults.corrupt_agents(federation.split.seen, seed)
    before = {name: progress.server[name] for name in algorithm.sent_in(k)}
    incoming = open_round(algorithm, progress, context, cohort, rules)
    states, cost = dict[int, State](), Cost()
    for agents in _parts(algorithm, engine, before, present):
        own = {agent: _state(algorithm, engine, progress, received, agent) for agent in agents}
        for agent, result in engine.agent_updates(algorithm, received, own, context).items():
            states[agent], vectors = result.state, result.vectors
            cost += result.cost
            if rules.codec:
                own_state = progress.states.get(agent) or {}
                sent = compress(rules.codec, vectors, before, own_state, context.counted)
                states[agent], vectors = {**result.state, **sent.residuals}, sent.vectors
            if agent not in fates.late:
                samples = len(federation.split.train[agent])
                if agent in corrupt:
                    vectors = faults.corrupted(vectors, before, seed, k, agent)
                incoming.add(AgentUpdate(agent, k, samples, vectors))
    server, rejected = close_round(
        algorithm,
        progress.server,
        incoming,
        context,
        failed=[UpdateError(agent, k, TOO_LATE, Fault.LATE) for agent in fates.late],
        rules=rules,
        label=label,
    )
    if not corrupt:  # with corrupt agents the cause is known
        rejected = _explained(rejected, algorithm, engine, progress, context)
    left_out = {update.agent for update in rejected}
    taken = {agent: state for agent, state in states.items() if agent not in left_out}
    progress.states.put(k, taken)
    return Progress(
        round=k,
        server=server,
        states=progress.states,
        cohort=tuple(cohort),
        rejected=tuple(rejected),
        dropped=tuple(fates.dropped),
        taken=tuple(taken),
        cost=cost,
        update_norm=update_norm(algorithm, progress.server, server, context),
        medians=incoming.medians,
        update_bytes=update_bytes(rules.codec, before, context.counted) if rules.codec else None,
    )


@cache
def _keep_freed_memory() -> None:
    """Let the next part reuse the memory of a part's updates.

    glibc returns the free end of its heap to the system if that is twice as long as the largest
    block that was ever mapped alone and freed (mallopt(3)). With a block as long as a part, parts
    do not take new pages from the system every time, which costs more than their aggregation.
    """
    torch.empty(PART_BYTES, dtype=torch.uint8)


def _parts(
    algorithm: Algorithm, engine: Engine, sent: State, agents: Sequence[int]
) -> Iterator[list[int]]:
    """The agents in groups of whole chunks, each trained together and then aggregated: as many as
    have updates of :data:`PART_BYTES`, and at least one chunk for each that the engine trains in
    parallel. What is prepared or added for many agents at once is several times as fast as between
    the products of their training, which replace everything in the caches."""
    size = sum(vector.nbytes for vector in sent.values())
    part, chunks = list[int](), 0
    for chunk in engine.chunks(algorithm, agents):
        part, chunks = [*part, *chunk], chunks + 1
        if chunks >= engine.parallel and len(part) * size >= PART_BYTES:
            yield part
            part, chunks = [], 0
    if part:
        yield part


def _context(
    algorithm: Algorithm, engine: Engine, progress: Progress, participation: float
) -> Context:
    """The context of the round after ``progress``."""
    agents = len(engine.federation.split.seen)
    counted = algorithm.counted(engine.objective, progress.server)
    size = cohort_size(agents, participation)
    return Context(progress.round + 1, agents, size, counted=counted)


def _agent_context(engine: Engine, agent: int, context: Context) -> AgentContext:
    batches = engine.federation.batches(agent, engine.seed, "train", context.round)
    return AgentContext.of(context, engine.objective, batches, batches.samples)


def _state(
    algorithm: Algorithm, engine: Engine, progress: Progress, received: State, agent: int
) -> State:
    """An agent's stored state, or its initial one."""
    found = without_residuals(progress.states.get(agent))
    return algorithm.agent_init(engine.objective, received) if found is None else found


def _explained(
    rejected: list[UpdateError],
    algorithm: Algorithm,
    engine: Engine,
    progress: Progress,
    context: Context,
) -> list[UpdateError]:
    """The same errors, the likely cause added to the first non-finite update."""
    explained = list(rejected)
    for place, error in enumerate(rejected):
        if error.fault is Fault.NOT_FINITE:
            cause = _diagnosed(algorithm, engine, progress, context, error.agent)
            reason = f"{error.reason}: {cause}"
            explained[place] = UpdateError(error.agent, error.round, reason, error.fault)
            break
    return explained


def _diagnosed(
    algorithm: Algorithm, engine: Engine, progress: Progress, context: Context, agent: int
) -> str:
    received = to_send(algorithm, progress.server)
    for name, vector in received.items():
        if not vector.isfinite().all():
            return f"the {name} it was sent is not finite"
    state = _state(algorithm, engine, progress, received, agent)
    own = _agent_context(engine, agent, context)
    cause = algorithm.diagnose(own, received, state)
    return cause or f"{type(algorithm).__name__} can't say why; lower its step sizes"
