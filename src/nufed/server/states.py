"""Agents' states between rounds: the protocol of a store, and a store in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from nufed.algorithms.compression import without_residuals
from nufed.algorithms.protocol import State


class AgentStates(Protocol):
    """Stores the state that each agent keeps for the next round it takes part in.

    There is one per training; rounds update it in place.
    """

    def get(self, agent: int) -> State | None:
        """The agent's newest state; None if it has none."""

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Store the states after a round; empty ones are skipped."""

    def agents(self) -> Iterator[int]:
        """The agents that have a state, in order."""


def on_device(state: State, device: str | torch.device) -> State:
    """The state with its vectors on the device; those that are there already are not copied."""
    return {name: vector.to(device) for name, vector in state.items()}


class StatesOf(Mapping[int, State | None]):
    """The states of some agents, each read from a store when it is looked up, and not kept.

    None for an agent without a state (a newcomer). So evaluating many agents needs little memory.

    >>> list(StatesOf([8, 7], MemoryStates({7: {}})).items())
    [(8, None), (7, {})]
    """

    def __init__(self, agents: Sequence[int], store: AgentStates) -> None:
        self._agents, self._store = dict.fromkeys(agents), store

    def __getitem__(self, agent: int) -> State | None:
        self._agents[agent]  # raises KeyError for any other agent
        state = self._store.get(agent)
        return state if not state else without_residuals(state)

    def __iter__(self) -> Iterator[int]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


class MemoryStates:
    """States in memory, for training without a run directory (an :class:`AgentStates`).

    >>> import torch
    >>> states = MemoryStates()
    >>> states.put(1, {7: {"control": torch.ones(2)}, 8: {}})
    >>> states.get(7), states.get(8), list(states.agents())
    ({'control': tensor([1., 1.])}, None, [7])
    """

    def __init__(self, states: Mapping[int, State] | None = None) -> None:
        self._states = dict(states or {})

    def get(self, agent: int) -> State | None:
        return self._states.get(agent)

    def put(self, round: int, states: Mapping[int, State]) -> None:
        self._states |= {agent: state for agent, state in states.items() if state}

    def agents(self) -> Iterator[int]:
        return iter(sorted(self._states))
