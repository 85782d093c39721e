"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.experiment.observers import Event, Observer
from nufed.experiment.runner import resume, run
from nufed.experiment.sweeping import resume_sweep, sweep

__all__ = ["Event", "Observer", "resume", "resume_sweep", "run", "sweep"]
