"""``nufed tune``: a search for every method's settings with the same budget."""

from nufed.lab.tuning.trials import TuneEvent as TuneEvent
from nufed.lab.tuning.tune import Tuning as Tuning, tune as tune
