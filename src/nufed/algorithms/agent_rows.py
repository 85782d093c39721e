"""What a server keeps of single agents: tables with a row for each that has sent updates.

The rows are sorted by agent; ``"agents"`` holds the agents' numbers. A table takes memory, and
space in every checkpoint, in proportion to the number of these agents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nufed.algorithms.protocol import State

AGENTS = "agents"


def no_rows(**like: Tensor) -> State:
    """Empty tables, by name, whose rows will be like these vectors.

    >>> {name: tuple(table.shape) for name, table in no_rows(models=torch.zeros(5)).items()}
    {'agents': (0,), 'models': (0, 5)}
    """
    tables = {name: vector.new_empty(0, *vector.shape) for name, vector in like.items()}
    (agents,) = {vector.device for vector in like.values()}
    return {AGENTS: torch.empty(0, dtype=torch.int64, device=agents), **tables}


def row_of(server: State, agent: int | None) -> int | None:
    """The row of an agent; None if the server has none."""
    known = [] if agent is None else server[AGENTS].tolist()
    return known.index(agent) if agent in known else None


def with_rows(server: State, rows: Mapping[int, State]) -> State:
    """The server's tables after these agents' rows were replaced or inserted.

    >>> server = with_rows(no_rows(sizes=torch.zeros(())), {7: {"sizes": torch.tensor(2.0)}})
    >>> server = with_rows(server, {a: {"sizes": torch.tensor(5.0)} for a in (3, 7)})
    >>> server["agents"].tolist(), server["sizes"].tolist()
    ([3, 7], [5.0, 5.0])
    """
    before, device = server[AGENTS].tolist(), server[AGENTS].device
    agents = sorted({*before, *rows})
    place = {agent: row for row, agent in enumerate(agents)}
    moved = torch.tensor([place[agent] for agent in before], dtype=torch.int64, device=device)
    tables = {AGENTS: torch.tensor(agents, dtype=torch.int64, device=device)}
    for name in next(iter(rows.values()), {}):
        old = server[name]
        tables[name] = old.new_zeros(len(agents), *old.shape[1:])
        tables[name][moved] = old
        for agent, row in rows.items():
            tables[name][place[agent]] = row[name]
    return {**server, **tables}
