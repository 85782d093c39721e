"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.lab.experiment.observers import Event as Event, Observer as Observer
from nufed.lab.experiment.runner import resume as resume, run as run
from nufed.lab.experiment.sweeping import resume_sweep as resume_sweep, sweep as sweep
