"""``nufed tune``: a search for every method's settings with the same budget."""

from nufed.lab.tuning.trials import TuneEvent
from nufed.lab.tuning.tune import Tuning, tune

__all__ = ["TuneEvent", "Tuning", "tune"]
