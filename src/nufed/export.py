"""What :mod:`nufed.lab.export` exports, under the name that users import."""

from nufed.lab.export import (
    TARGETS as TARGETS,
    MLflow as MLflow,
    TensorBoard as TensorBoard,
    WandB as WandB,
)
