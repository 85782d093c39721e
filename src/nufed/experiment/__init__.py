"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.experiment.run_parts import Event
from nufed.experiment.runner import resume, run
from nufed.experiment.tuning import Tuning, tune

__all__ = ["Event", "Tuning", "resume", "run", "tune"]
