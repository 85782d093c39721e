"""The run directory: records, checkpoints, results."""

from nufed.lab.runs.directory import RunDirectory
from nufed.lab.runs.finished_run import Run
from nufed.lab.runs.read_run import load_run
from nufed.lab.runs.results import Estimate, Row

__all__ = ["Estimate", "Row", "Run", "RunDirectory", "load_run"]
