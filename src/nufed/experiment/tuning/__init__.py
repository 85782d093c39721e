"""``nufed tune``: a search for every method's settings with the same budget."""

from nufed.experiment.tuning.trainer import TuneEvent
from nufed.experiment.tuning.tune import Tuning, tune

__all__ = ["TuneEvent", "Tuning", "tune"]
