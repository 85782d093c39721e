"""What :mod:`nufed.lab.export` exports, under the name that users import."""

from nufed.lab.export import TARGETS, MLflow, TensorBoard, WandB

__all__ = ["TARGETS", "MLflow", "TensorBoard", "WandB"]
