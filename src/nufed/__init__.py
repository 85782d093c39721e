"""nufed: meta federated learning, for models that are good after ν fine-tuning steps.

Names are imported when they are first used (PEP 562): ``import nufed`` alone does not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nufed.algorithms import GMeta, fedavg, gmeta, per_fedavg
    from nufed.data import Federation, Samples, Split
    from nufed.errors import InputError, NufedError, NumericalWarning
    from nufed.lab.bundle import Bundle, load_adapted, load_bundle
    from nufed.lab.bundle.from_run import make_bundle, make_personal
    from nufed.lab.experiment import Event, Observer, resume, resume_sweep, run, sweep
    from nufed.lab.readers.hugging_face import from_datasets
    from nufed.lab.report.notebook import ShownRun as Run, load as load_run
    from nufed.lab.runs.sweep_record import Sweep, load_sweep
    from nufed.lab.tuning import Tuning, tune
    from nufed.meta.curvature import Exact, FirstOrder, HessianFree
    from nufed.meta.fine_tuning import adapt, trajectory
    from nufed.meta.meta_gradient import MetaBatch, meta_gradient, meta_gradient_with_rates
    from nufed.objective import Batch, Objective

__version__ = "0.1.0"

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
    "from_datasets",
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

_HOMES = {  # the modules of the names above
    "nufed.algorithms": "GMeta fedavg gmeta per_fedavg",
    "nufed.lab.bundle": "Bundle load_adapted load_bundle",
    "nufed.lab.bundle.from_run": "make_bundle make_personal",
    "nufed.data": "Federation Samples Split",
    "nufed.errors": "InputError NufedError NumericalWarning",
    "nufed.lab.experiment": "Event Observer resume resume_sweep run sweep",
    "nufed.lab.tuning": "Tuning tune",
    "nufed.meta.curvature": "Exact FirstOrder HessianFree",
    "nufed.meta.fine_tuning": "adapt trajectory",
    "nufed.meta.meta_gradient": "MetaBatch meta_gradient meta_gradient_with_rates",
    "nufed.objective": "Batch Objective",
    "nufed.lab.readers.hugging_face": "from_datasets",
    "nufed.lab.runs.sweep_record": "Sweep load_sweep",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
_RENAMED = {"Run": "ShownRun", "load_run": "load"}  # names in nufed.lab.report.notebook

if not TYPE_CHECKING:  # or mypy accepts every name

    def __getattr__(name: str) -> Any:
        if name in _RENAMED:
            value = getattr(import_module("nufed.lab.report.notebook"), _RENAMED[name])
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        elif find_spec(f"{__name__}.{name}"):
            value = import_module(f"{__name__}.{name}")
        elif not name.startswith("_") and find_spec(f"{__name__}.lab.{name}"):
            value = import_module(f"{__name__}.lab.{name}")  # nufed.export, as in lab
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
