"""Writes a run for other tools: a finished one, or, as an observer, while it trains."""

from nufed.export.mlflow_store import MLflow
from nufed.export.model_files import export_model
from nufed.export.target import Chosen, Target
from nufed.export.targets import TARGETS, export
from nufed.export.tensorboard_files import TensorBoard
from nufed.export.wandb_runs import WandB

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
