"""nufed: meta federated learning, for models that are good after ν fine-tuning steps."""

from nufed.algorithms import GMeta, fedavg, gmeta, per_fedavg
from nufed.bundle import Bundle, load_adapted, load_bundle
from nufed.bundle.from_run import make_bundle
from nufed.bundle.personal import make_personal
from nufed.data import Federation, Samples, Split
from nufed.errors import InputError, NufedError, NumericalWarning
from nufed.experiment import (
    Event,
    Observer,
    Tuning,
    resume,
    resume_sweep,
    run,
    sweep,
    tune,
)
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
from nufed.report.shown_run import ShownRun as Run
from nufed.report.shown_run import load as load_run
from nufed.runs.sweep_record import Sweep, load_sweep

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "Bundle",
    "Event",
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
    "Observer",
    "Run",
    "Samples",
    "Split",
    "Sweep",
    "Tuning",
    "adapt",
    "fedavg",
    "gmeta",
    "load_adapted",
    "load_bundle",
    "load_run",
    "load_sweep",
    "make_bundle",
    "make_personal",
    "meta_gradient",
    "meta_gradient_with_rates",
    "per_fedavg",
    "resume",
    "resume_sweep",
    "run",
    "sweep",
    "trajectory",
    "tune",
]
