"""The memory that a round's updates take at the server, stated before a run."""

from __future__ import annotations

import logging
from pathlib import Path

from nufed.algorithms.protocol import Algorithm, Context, State
from nufed.server.incoming import sums_suffice

LOG = logging.getLogger("nufed")
GIB = 2**30


def kept_bytes(algorithm: Algorithm, server: State, context: Context) -> int:
    """Bytes of the updates that the server keeps in a round; 0 if it adds them as they arrive."""
    if sums_suffice(algorithm, context, server):
        return 0
    size = sum(server[name].nbytes for name in algorithm.sends if name in server)
    return context.cohort * size * algorithm.update_copies


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
