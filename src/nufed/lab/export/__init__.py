"""Writes a run for other tools: a finished one, or, as an observer, while it trains."""

from nufed.lab.export.mlflow_store import MLflow
from nufed.lab.export.model_files import export_model
from nufed.lab.export.target import Chosen, Target
from nufed.lab.export.targets import TARGETS, export
from nufed.lab.export.tensorboard_files import TensorBoard
from nufed.lab.export.wandb_runs import WandB

__all__ = [
    "TARGETS",
    "Chosen",
    "MLflow",
    "Target",
    "TensorBoard",
    "WandB",
    "export",
    "export_model",
]
