"""Algorithm 1 of the paper, on this machine: the loop over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from nufed.algorithms.compression import Codec, compress, update_bytes, without_residuals
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    AgentUpdate,
    Algorithm,
    Context,
    Cost,
    State,
)
from nufed.errors import Fault, UpdateError
from nufed.server import (
    TOO_LATE,
    AgentStates,
    Attempts,
    Downlink,
    MemoryStates,
    Progress,
    Rules,
    choose_cohort,
    close_round,
    cohort_size,
    counted_parameters,
    initial_server,
    open_round,
    replaced,
    to_send,
    update_norm,
)
from nufed.simulation.engine import Engine, work_of
from nufed.simulation.faults import Faults

LARGEST_REUSED = 2**25 - 2**12  # bytes of a block that glibc does not return to the system
PART_BYTES = 2**24  # of updates that are in memory at once, before aggregation
Doubt: TypeAlias = Callable[[int, str], None]
"""Called with a round and the numerical problem found in it."""


@dataclass(frozen=True)
class Training:
    """An algorithm on an engine, and the rules of its rounds.

    Args:
        algorithm, engine: what is trained, and where.
        participation: fraction of the agents in a cohort.
        rules: when the server accepts a round.
        faults: simulated faults of agents.
        label: names the training in the log.
        on_doubt: called with what is inaccurate at one agent before rounds 1, 10, 100, …; the
            findings depend neither on workers nor on where training was resumed.
    """

    algorithm: Algorithm
    engine: Engine
    participation: float
    rules: Rules = Rules()
    faults: Faults = Faults()
    label: str = ""
    on_doubt: Doubt | None = None

    def start(self, w: Tensor, states: AgentStates | None = None) -> Progress:
        """The progress before the first round; agents' states are kept in memory by default."""
        server = initial_server(self.algorithm, self.engine.objective, w)
        return Progress(0, server, states or MemoryStates())

    def rounds(self, progress: Progress, last: int) -> Iterator[Progress]:
        """The progress itself, then that after every round up to the ``last``.

        The bits are those of an uninterrupted training.
        """
        yield progress
        while progress.round < last:
            progress = self.round(progress)
            yield progress

    def round(self, progress: Progress, agents: Sequence[int] | None = None) -> Progress:
        """One round: draw a cohort, train its agents, check and aggregate their updates.

        A round below the quorum is retried with another cohort. With ``agents``, these are trained
        instead, as when recorded rounds are repeated.
        """
        self._check_numbers(progress)
        context = self._context(progress)
        attempts = Attempts(
            context.round,
            self.engine.federation.split.seen,
            participation=self.participation,
            seed=self.engine.seed,
            rules=self.rules,
            explain=lambda rejected: self._explained(rejected, progress, context),
        )
        for cohort, number in attempts:
            with attempts.quorum():
                attempt = _Attempt(self, progress, context, list(agents or cohort), number)
                for states in attempt.groups():
                    attempt.receive(
                        self.engine.agent_updates(self.algorithm, attempt.received, states, context)
                    )
                return attempts.accepted(attempt.close())
        raise AssertionError("attempts end with an error")

    def _context(self, progress: Progress) -> Context:
        """The context of the round after ``progress``."""
        agents = len(self.engine.federation.split.seen)
        counted = counted_parameters(self.algorithm, self.engine.objective, progress.server)
        size = cohort_size(agents, self.participation)
        seed = self.engine.seed
        return Context(progress.round + 1, agents, size, counted=counted, seed=seed)

    def _agent_context(self, agent: int, context: Context) -> AgentContext:
        engine = self.engine
        batches = engine.federation.batches(agent, engine.seed, "train", context.round)
        return AgentContext.of(context, engine.objective, batches, batches.samples)

    def _state(self, progress: Progress, received: State, agent: int) -> State:
        """An agent's stored state, or its initial one."""
        state = without_residuals(progress.states.get(agent))
        if state is None:
            return self.algorithm.agent_init(self.engine.objective, Downlink.of(received).to(agent))
        return state

    def _check_numbers(self, progress: Progress) -> None:
        k, seen = progress.round + 1, self.engine.federation.split.seen
        if self.on_doubt is None or k != 10 ** (len(str(k)) - 1):
            return
        agent = choose_cohort(seen, self.participation, self.engine.seed, k)[0]
        context = self._context(progress)
        down = Downlink.of(to_send(self.algorithm, progress.server, context))
        with work_of([agent], f"round {k}"):
            doubt = self.algorithm.checks.doubt(self._agent_context(agent, context), down.to(agent))
        if doubt:
            self.on_doubt(k, doubt)

    def _explained(
        self, rejected: list[UpdateError], progress: Progress, context: Context
    ) -> list[UpdateError]:
        """The rejected updates, with the likely cause added to the first non-finite one."""
        explained = list(rejected)
        for place, error in enumerate(rejected):
            if error.fault is Fault.NOT_FINITE:
                cause = self._diagnosed(progress, context, error.agent)
                reason = f"{error.reason}: {cause}"
                explained[place] = UpdateError(error.agent, error.round, reason, error.fault)
                break
        return explained

    def _diagnosed(self, progress: Progress, context: Context, agent: int) -> str:
        algorithm = self.algorithm
        received = Downlink.of(to_send(algorithm, progress.server, context)).to(agent)
        for name, vector in received.items():
            if not vector.isfinite().all():
                return f"the {name} it was sent is not finite"
        state = self._state(progress, received, agent)
        cause = algorithm.checks.diagnose(self._agent_context(agent, context), received, state)
        return cause or f"{type(algorithm).__name__} can't say why; lower its step sizes"


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
) -> Iterator[Progress]:
    """Train from the model w, yielding the progress before the first and after every round.

    With ``start``, resumes from that progress.
    """
    training = Training(algorithm, engine, participation, rules, faults)
    return training.rounds(start or training.start(w), rounds)


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
    training = Training(algorithm, engine, participation, Rules(codec=codec))
    progress = training.start(w)
    yield progress
    for agents in taken:
        progress = training.round(progress, agents)
        yield progress


class _Attempt:
    """An attempt at a round with one cohort: what its agents have sent so far."""

    def __init__(
        self,
        training: Training,
        progress: Progress,
        context: Context,
        cohort: list[int],
        number: int = 0,
    ) -> None:
        _keep_freed_memory()
        algorithm, seen = training.algorithm, training.engine.federation.split.seen
        self._training, self._progress, self._context = training, progress, context
        self._cohort, self._seed = cohort, training.engine.seed
        self._fates = training.faults.fates(cohort, self._seed, context.round, number)
        self._corrupt = training.faults.corrupt_agents(seen, self._seed)
        self.received = to_send(algorithm, progress.server, context)
        sent = algorithm.sent_in(context.round)
        self._before = {name: progress.server[name] for name in sent}
        self._incoming = open_round(algorithm, progress, context, cohort, training.rules)
        self._states, self._cost = dict[int, State](), Cost()

    def groups(self) -> Iterator[dict[int, State]]:
        """The states of the agents that take part, in groups that are trained together."""
        training, progress = self._training, self._progress
        present = [agent for agent in self._cohort if agent not in self._fates.dropped]
        for agents in _parts(training.algorithm, training.engine, self._before, present):
            yield {agent: training._state(progress, self.received, agent) for agent in agents}

    def receive(self, results: Mapping[int, AgentResult]) -> None:
        """Take what agents send; their next states take effect when the round is closed."""
        codec, context, faults = self._training.rules.codec, self._context, self._training.faults
        train = self._training.engine.federation.split.train
        for agent, result in results.items():
            self._states[agent], vectors = result.state, result.vectors
            self._cost += result.cost
            before: State = {}
            if codec or agent in self._corrupt:
                before = replaced(Downlink.of(self.received).to(agent), self._before)
            if codec:
                state = self._progress.states.get(agent) or {}
                sent = compress(codec, vectors, before, state, context.counted)
                self._states[agent], vectors = {**result.state, **sent.residuals}, sent.vectors
            if agent in self._fates.late:
                continue
            if agent in self._corrupt:
                vectors = faults.corrupted(vectors, before, self._seed, context.round, agent)
            self._incoming.add(AgentUpdate(agent, context.round, len(train[agent]), vectors))

    def close(self) -> Progress:
        """The progress after the round."""
        training, progress, context = self._training, self._progress, self._context
        k, rules = context.round, training.rules
        server, rejected = close_round(
            training.algorithm,
            progress.server,
            self._incoming,
            context,
            failed=[UpdateError(agent, k, TOO_LATE, Fault.LATE) for agent in self._fates.late],
            rules=rules,
            label=training.label,
        )
        if not self._corrupt:  # with corrupt agents the cause is known
            rejected = training._explained(rejected, progress, context)
        left_out = {update.agent for update in rejected}
        taken = {agent: state for agent, state in self._states.items() if agent not in left_out}
        progress.states.put(k, taken)
        codec, counted = rules.codec, context.counted
        return Progress(
            round=k,
            server=server,
            states=progress.states,
            cohort=tuple(self._cohort),
            rejected=tuple(rejected),
            dropped=tuple(self._fates.dropped),
            taken=tuple(taken),
            cost=self._cost,
            update_norm=update_norm(training.algorithm, progress.server, server, context),
            medians=self._incoming.medians,
            update_bytes=update_bytes(codec, self._before, counted) if codec else None,
        )


@cache
def _keep_freed_memory() -> None:
    """Let local steps and the next part reuse the memory of freed vectors.

    glibc returns the free end of its heap to the system if that is twice as long as the largest
    block, up to 32 MiB, that was ever mapped alone and freed (mallopt(3)). With such a block
    vectors do not take new pages from the system every time, which costs more than their sums.
    """
    torch.empty(LARGEST_REUSED, dtype=torch.uint8)


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
