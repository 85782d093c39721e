"""The run directory: records, checkpoints, results."""

from nufed.lab.runs.directory import RunDirectory as RunDirectory
from nufed.lab.runs.finished_run import Run as Run
from nufed.lab.runs.read_run import load_run as load_run
from nufed.lab.runs.results import Estimate as Estimate, Row as Row
