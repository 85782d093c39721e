"""A run on paper: its configuration, its directory, its records and results. Knows no engine."""

from nufed.runs.config import load_config, presets
from nufed.runs.directory import RunDirectory
from nufed.runs.load import load_run
from nufed.runs.results import Estimate, Row, Run
from nufed.runs.schema import Config

__all__ = [
    "Config",
    "Estimate",
    "Row",
    "Run",
    "RunDirectory",
    "load_config",
    "load_run",
    "presets",
]
