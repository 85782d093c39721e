"""What an engine is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import Federation, ScoredOn
from nufed.errors import NufedError, TrainingError
from nufed.evaluate import AgentScores, Measure
from nufed.objective import Objective


@contextmanager
def work_of(agents: Sequence[int], where: str) -> Iterator[None]:
    """Name the agents whose work fails: whatever a module does wrong ends the method's training."""
    try:
        yield
    except NufedError:
        raise
    except Exception as error:
        who = "agent" if len(agents) == 1 else "one of agents"
        names = ", ".join(map(str, agents))
        raise TrainingError(
            f"{who} {names} failed in {where}: {type(error).__name__}: {error}"
        ) from error


class Engine(Protocol):
    """Runs an algorithm's agents on this machine.

    An engine maps work over agents and decides nothing: what it returns depends neither on the
    order of agents nor on how the work was spread.
    """

    @property
    def objective(self) -> Objective: ...

    @property
    def federation(self) -> Federation: ...

    @property
    def seed(self) -> int: ...

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        """The agents in the groups that are worked on together, in a fixed way."""
        ...

    def client_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        """The work of a round for every agent in ``states``, which holds the agents' states."""
        ...

    def evaluate(
        self,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        *,
        steps: int,
        measure: Measure,
    ) -> list[AgentScores]:
        """The scores of every agent in ``states`` after 0 … ``steps`` fine-tuning steps."""
        ...

    def evaluate_scales(
        self,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        *,
        steps: int,
        measure: Measure,
        scales: Sequence[float],
        part: ScoredOn,
    ) -> list[list[AgentScores]]:
        """The same with the step size of fine-tuning times each of ``scales``.

        Agents are scored on ``part``; those that have no samples there are left out.
        """
        ...


class EvaluatesScales:
    """:meth:`Engine.evaluate` of engines that have :meth:`Engine.evaluate_scales`."""

    def evaluate(
        self: Engine,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        *,
        steps: int,
        measure: Measure,
    ) -> list[AgentScores]:
        (scores,) = self.evaluate_scales(
            algorithm,
            server,
            states,
            steps=steps,
            measure=measure,
            scales=[1.0],
            part=self.federation.scored_on,
        )
        return scores
