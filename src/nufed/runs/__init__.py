"""The run directory: records, checkpoints, results."""

from nufed.runs.directory import RunDirectory
from nufed.runs.finished_run import Run
from nufed.runs.read_run import load_run
from nufed.runs.results import Estimate, Row

__all__ = ["Estimate", "Row", "Run", "RunDirectory", "load_run"]
