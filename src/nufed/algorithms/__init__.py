"""The algorithms, by name. One short file each; docs/algorithms.md says how to write one."""

from __future__ import annotations

from nufed.algorithms.anil import ANIL
from nufed.algorithms.apfl import APFL
from nufed.algorithms.ditto import Ditto
from nufed.algorithms.fedala import FedALA
from nufed.algorithms.fedamp import FedAMP
from nufed.algorithms.fedbabu import FedBABU
from nufed.algorithms.fedbn import FedBN
from nufed.algorithms.feddbe import FedDBE
from nufed.algorithms.feddyn import FedDyn
from nufed.algorithms.fedem import FedEM
from nufed.algorithms.fedfomo import FedFomo
from nufed.algorithms.fedl2p import FedL2P
from nufed.algorithms.fednova import FedNova
from nufed.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from nufed.algorithms.fedpac import FedPAC
from nufed.algorithms.fedper import FedPer
from nufed.algorithms.fedproto import FedProto
from nufed.algorithms.fedprox import FedProx
from nufed.algorithms.fedrep import FedRep
from nufed.algorithms.fedrod import FedRoD
from nufed.algorithms.fedsa_lora import FedSALoRA
from nufed.algorithms.gmeta import FedAvg, GMeta, PerFedAvg, fedavg, gmeta, per_fedavg
from nufed.algorithms.ifca import IFCA
from nufed.algorithms.knn_per import KNNPer
from nufed.algorithms.lg_fedavg import LGFedAvg
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.moon import MOON
from nufed.algorithms.pfedme import PFedMe
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    AgentUpdate,
    Algorithm,
    Context,
    Cost,
    Draw,
    Notes,
    Personal,
    State,
)
from nufed.algorithms.reptile import Reptile
from nufed.algorithms.scaffold import Scaffold
from nufed.algorithms.scalefl import ScaleFL
from nufed.registry import Registry


def _refuse(candidate: object) -> str | None:
    if isinstance(candidate, type) and issubclass(candidate, Algorithm):
        return None
    return "is no algorithm: it must be a subclass of nufed.algorithms.Algorithm"


ALGORITHMS: Registry[type[Algorithm]] = Registry(
    {
        "fedavg": FedAvg,
        "per_fedavg": PerFedAvg,
        "gmeta": GMeta,
        "anil": ANIL,
        "reptile": Reptile,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "feddyn": FedDyn,
        "fednova": FedNova,
        "moon": MOON,
        "feddbe": FedDBE,
        "fedproto": FedProto,
        "fedavgm": FedAvgM,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedyogi": FedYogi,
        "ditto": Ditto,
        "pfedme": PFedMe,
        "apfl": APFL,
        "fedper": FedPer,
        "fedrep": FedRep,
        "fedbabu": FedBABU,
        "lg_fedavg": LGFedAvg,
        "fedbn": FedBN,
        "fedsa_lora": FedSALoRA,
        "fedala": FedALA,
        "fedrod": FedRoD,
        "knn_per": KNNPer,
        "fedl2p": FedL2P,
        "scalefl": ScaleFL,
        "fedamp": FedAMP,
        "fedfomo": FedFomo,
        "fedpac": FedPAC,
        "ifca": IFCA,
        "fedem": FedEM,
    },
    "nufed.algorithms",
    "Class",
    _refuse,
)

__all__ = [
    "ALGORITHMS",
    "ANIL",
    "APFL",
    "IFCA",
    "MOON",
    "AgentContext",
    "AgentResult",
    "AgentUpdate",
    "Algorithm",
    "Context",
    "Cost",
    "Ditto",
    "Draw",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedDBE",
    "FedDyn",
    "FedEM",
    "FedFomo",
    "FedL2P",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedYogi",
    "GMeta",
    "KNNPer",
    "LGFedAvg",
    "LocalTraining",
    "Notes",
    "PFedMe",
    "PerFedAvg",
    "Personal",
    "Reptile",
    "Scaffold",
    "ScaleFL",
    "State",
    "fedavg",
    "gmeta",
    "per_fedavg",
]
