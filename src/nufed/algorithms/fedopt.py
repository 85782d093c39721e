"""FedAvg with a server optimiser: FedAvgM, FedAdagrad, FedAdam and FedYogi.

Every algorithm takes ``server_optimizer`` as a setting; these are FedAvg with it, under the names
of the literature. The formulas are in :mod:`nufed.algorithms.server_optimizer`. Reddi et al. weigh
agents equally in their Algorithm 2, Hsu et al. by samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nufed.algorithms.gmeta import FedAvg, GMeta
from nufed.algorithms.protocol import Notes
from nufed.algorithms.server_optimizer import Adagrad, Adam, AvgM, Plain, Yogi
from nufed.settings import setting


def _only(name: str, optimizer: Plain) -> Any:
    return setting(optimizer, "the server's optimiser", choices={name: type(optimizer)})


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """FedAvgM: FedAvg with server momentum (Hsu et al., 2019)."""

    server_optimizer: Plain = _only("avgm", AvgM())


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedAvg):
    """FedAdagrad: FedAvg with Adagrad at the server (Reddi et al., 2021)."""

    notes: ClassVar[Notes] = GMeta.notes
    server_optimizer: Plain = _only("adagrad", Adagrad())


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedAvg):
    """FedAdam: FedAvg with Adam at the server (Reddi et al., 2021)."""

    notes: ClassVar[Notes] = GMeta.notes
    server_optimizer: Plain = _only("adam", Adam())


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAvg):
    """FedYogi: FedAvg with Yogi at the server (Reddi et al., 2021)."""

    notes: ClassVar[Notes] = GMeta.notes
    server_optimizer: Plain = _only("yogi", Yogi())
