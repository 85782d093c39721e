"""Algorithm 1 of the paper, on this machine: the loop over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from nufed.algorithm import Algorithm, ClientUpdate, Cost, State
from nufed.errors import UpdateError
from nufed.server import choose_cohort, close_round, to_send
from nufed.simulation.engine import Engine


@dataclass(frozen=True)
class Progress:
    """Where training stands after ``round`` rounds, and what the last of them took.

    ``server`` and ``clients`` are all that the next round needs; the rest is for records.
    """

    round: int
    server: State
    clients: Mapping[int, State] = field(default_factory=dict)
    cohort: tuple[int, ...] = ()
    rejected: tuple[UpdateError, ...] = ()
    cost: Cost = field(default_factory=Cost)

    def client_states(self, algorithm: Algorithm, agents: Iterable[int]) -> dict[int, State]:
        """The agents' states; an agent that never took part starts from the present model."""
        model = self.server["model"]
        return {
            agent: self.clients[agent] if agent in self.clients else algorithm.client_init(model)
            for agent in agents
        }


def train(
    algorithm: Algorithm,
    engine: Engine,
    w: Tensor,
    *,
    rounds: int,
    participation: float,
    start: Progress | None = None,
) -> Iterator[Progress]:
    """Train from the model w, yielding where it stands before the first and after every round.

    Or go on from ``start``, where training stood once: it gives the same bits.
    """
    progress = start or Progress(0, algorithm.server_init(w))
    yield progress
    while progress.round < rounds:
        progress = run_round(algorithm, engine, progress, participation)
        yield progress


def run_round(
    algorithm: Algorithm, engine: Engine, progress: Progress, participation: float
) -> Progress:
    """One round: choose agents, let them work, and take in what they send."""
    k = progress.round + 1
    federation = engine.federation
    cohort = choose_cohort(federation.split.seen, participation, engine.seed, k)
    states = progress.client_states(algorithm, cohort)
    results = engine.client_updates(algorithm, to_send(algorithm, progress.server), states, k)
    updates = [
        ClientUpdate(agent, k, len(federation.split.train[agent]), result.vectors)
        for agent, result in results.items()
    ]
    server, rejected = close_round(algorithm, progress.server, updates, k)
    left_out = {update.agent for update in rejected}
    kept = {a: r.state for a, r in results.items() if r.state and a not in left_out}
    return Progress(
        round=k,
        server=server,
        clients={**progress.clients, **kept},
        cohort=tuple(cohort),
        rejected=tuple(rejected),
        cost=sum((result.cost for result in results.values()), Cost()),
    )
