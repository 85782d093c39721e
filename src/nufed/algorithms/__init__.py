"""The algorithms, by name. One short file each; CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable

from nufed.algorithm import Algorithm
from nufed.algorithms.gmeta import GMeta, fedavg, gmeta, per_fedavg

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "per_fedavg": per_fedavg,
    "gmeta": gmeta,
}

__all__ = ["ALGORITHMS", "GMeta", "fedavg", "gmeta", "per_fedavg"]
