"""What the server sends: vectors that are the same for all agents, and each agent's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from nufed.algorithms.protocol import Algorithm, Context, State, defines

EVALUATION = Context(0, 0, 0)
"""All that ``Algorithm.downlink`` knows at evaluation beside the server's state."""


class Downlink(Mapping[str, Tensor]):
    """The broadcast ``shared`` by all agents, and each agent's ``own`` vectors, made on access.

    As a mapping it holds what a newcomer receives.
    """

    def __init__(
        self, shared: State, individual: Callable[[int | None], State] = lambda agent: {}
    ) -> None:
        self.shared, self.own = shared, individual

    @classmethod
    def of(cls, received: State) -> Downlink:
        """Wrap plain vectors, which all agents receive; a Downlink is returned as it is."""
        return received if isinstance(received, Downlink) else cls(received)

    def to(self, agent: int | None) -> State:
        """All that an agent receives; None: any newcomer."""
        individual = self.own(agent)
        return {**self.shared, **individual} if individual else self.shared

    def __getitem__(self, name: str) -> Tensor:
        return self.to(None)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to(None))

    def __len__(self) -> int:
        return len(self.to(None))


def to_send(algorithm: Algorithm, server: State, context: Context = EVALUATION) -> State:
    """What the server sends: a :class:`Downlink` if each agent gets vectors of its own."""
    shared = {name: server[name] for name in algorithm.receives}
    if not defines(algorithm, "downlink"):
        return shared
    return Downlink(shared, lambda agent: algorithm.downlink(context, server, agent))


def replaced(received: State, like: State) -> dict[str, Tensor]:
    """What the vectors that an agent sends replace: those that it received, else zeros.

    ``like`` holds vectors with the names and shapes of those that it sends.
    """
    return {n: received[n] if n in received else torch.zeros_like(v) for n, v in like.items()}
