"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.lab.experiment.observers import Event, Observer
from nufed.lab.experiment.runner import resume, run
from nufed.lab.experiment.sweeping import resume_sweep, sweep

__all__ = ["Event", "Observer", "resume", "resume_sweep", "run", "sweep"]
