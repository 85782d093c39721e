"""The algorithms, by name. One short file each; docs/algorithms.md says how to write one."""

from __future__ import annotations

from nufed.algorithms.anil import ANIL as ANIL
from nufed.algorithms.apfl import APFL as APFL
from nufed.algorithms.ditto import Ditto as Ditto
from nufed.algorithms.fedala import FedALA as FedALA
from nufed.algorithms.fedamp import FedAMP as FedAMP
from nufed.algorithms.fedbabu import FedBABU as FedBABU
from nufed.algorithms.fedbn import FedBN as FedBN
from nufed.algorithms.feddbe import FedDBE as FedDBE
from nufed.algorithms.feddyn import FedDyn as FedDyn
from nufed.algorithms.fedem import FedEM as FedEM
from nufed.algorithms.fedfomo import FedFomo as FedFomo
from nufed.algorithms.fedl2p import FedL2P as FedL2P
from nufed.algorithms.fednova import FedNova as FedNova
from nufed.algorithms.fedopt import (
    FedAdagrad as FedAdagrad,
    FedAdam as FedAdam,
    FedAvgM as FedAvgM,
    FedYogi as FedYogi,
)
from nufed.algorithms.fedpac import FedPAC as FedPAC
from nufed.algorithms.fedper import FedPer as FedPer
from nufed.algorithms.fedproto import FedProto as FedProto
from nufed.algorithms.fedprox import FedProx as FedProx
from nufed.algorithms.fedrep import FedRep as FedRep
from nufed.algorithms.fedrod import FedRoD as FedRoD
from nufed.algorithms.fedsa_lora import FedSALoRA as FedSALoRA
from nufed.algorithms.gmeta import (
    FedAvg as FedAvg,
    GMeta as GMeta,
    PerFedAvg as PerFedAvg,
    fedavg as fedavg,
    gmeta as gmeta,
    per_fedavg as per_fedavg,
)
from nufed.algorithms.ifca import IFCA as IFCA
from nufed.algorithms.knn_per import KNNPer as KNNPer
from nufed.algorithms.lg_fedavg import LGFedAvg as LGFedAvg
from nufed.algorithms.local_training import LocalTraining as LocalTraining
from nufed.algorithms.moon import MOON as MOON
from nufed.algorithms.pfedme import PFedMe as PFedMe
from nufed.algorithms.protocol import (
    AgentContext as AgentContext,
    AgentResult as AgentResult,
    AgentUpdate as AgentUpdate,
    Algorithm as Algorithm,
    Context as Context,
    Cost as Cost,
    Draw as Draw,
    Notes as Notes,
    Personal as Personal,
    State as State,
)
from nufed.algorithms.reptile import Reptile as Reptile
from nufed.algorithms.scaffold import Scaffold as Scaffold
from nufed.algorithms.scalefl import ScaleFL as ScaleFL
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
