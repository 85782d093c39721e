"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.experiment.observers import Event, Observer
from nufed.experiment.runner import resume, run
from nufed.experiment.sweeping import resume_sweep, sweep
from nufed.experiment.tuning import Tuning, tune

__all__ = ["Event", "Observer", "Tuning", "resume", "resume_sweep", "run", "sweep", "tune"]
