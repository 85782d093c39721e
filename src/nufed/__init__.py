"""nufed: meta federated learning, for models that are good after ν fine-tuning steps."""

from nufed.algorithms import GMeta, fedavg, gmeta, per_fedavg
from nufed.bundle import Bundle, load_adapted, load_bundle
from nufed.bundle.from_run import make_bundle
from nufed.bundle.personal import make_personal
from nufed.data import Federation, Samples, Split
from nufed.errors import InputError, NufedError, NumericalWarning
from nufed.experiment import Tuning, resume, run, tune
from nufed.meta.fine_tuning import adapt, trajectory
from nufed.meta.meta_gradient import (
    Exact,
    FirstOrder,
    HessianFree,
    MetaBatch,
    meta_gradient,
    meta_gradient_with_rates,
)
from nufed.objective import Batch, Objective
from nufed.runs import Run, load_run

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "Bundle",
    "Exact",
    "Federation",
    "FirstOrder",
    "GMeta",
    "HessianFree",
    "InputError",
    "MetaBatch",
    "NufedError",
    "NumericalWarning",
    "Objective",
    "Run",
    "Samples",
    "Split",
    "Tuning",
    "adapt",
    "fedavg",
    "gmeta",
    "load_adapted",
    "load_bundle",
    "load_run",
    "make_bundle",
    "make_personal",
    "meta_gradient",
    "meta_gradient_with_rates",
    "per_fedavg",
    "resume",
    "run",
    "trajectory",
    "tune",
]
