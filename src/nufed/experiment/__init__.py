"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.experiment.observers import Event, Observer
from nufed.experiment.runner import resume, run

__all__ = ["Event", "Observer", "resume", "run"]
