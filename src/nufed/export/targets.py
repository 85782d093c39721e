"""What ``nufed export RUN --to NAME`` can write: the targets by name.

A target is one function in a file of its own. It imports the package that it needs itself, inside
:func:`nufed.export.packages.needed`, so that nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nufed.errors import InputError, shown
from nufed.export.mlflow_store import FOLDER as MLFLOW
from nufed.export.mlflow_store import write_mlflow
from nufed.export.model_files import export_of_run
from nufed.export.table_files import write_csv, write_parquet
from nufed.export.target import Chosen, Target
from nufed.export.tensorboard_files import FOLDER as TENSORBOARD
from nufed.export.tensorboard_files import write_tensorboard
from nufed.export.wandb_runs import write_wandb
from nufed.registry import suggest
from nufed.runs import Run

TARGETS: Mapping[str, Target] = {
    "tensorboard": Target(write_tensorboard, lambda run: run.path / TENSORBOARD),
    "mlflow": Target(write_mlflow, lambda run: Path(MLFLOW)),
    "wandb": Target(write_wandb, lambda run: Path()),
    "csv": Target(
        lambda run, out, chosen: write_csv(run, out),
        lambda run: Path(f"{run.path.name}.csv"),
    ),
    "parquet": Target(
        lambda run, out, chosen: write_parquet(run, out),
        lambda run: Path(f"{run.path.name}.parquet"),
    ),
    "onnx": Target(
        lambda run, out, chosen: export_of_run(run, "onnx", out, chosen),
        lambda run: Path(f"{run.path.name}.onnx"),
        chooses=True,
    ),
    "state_dict": Target(
        lambda run, out, chosen: export_of_run(run, "state_dict", out, chosen),
        lambda run: Path(f"{run.path.name}.safetensors"),
        chooses=True,
    ),
}


def export(run: Run, to: str, out: Path | None = None, chosen: Chosen | None = None) -> list[str]:
    """Write a finished run for another tool.

    Args:
        run: from :func:`nufed.load_run`.
        to: the name of a target.
        out: where to write; by default a place of the target's own.
        chosen: method and seed, for targets that write one model.

    Returns:
        What was written, one line each.
    """
    if to not in TARGETS:
        raise InputError(
            f"--to {shown(to)}: must be one of {', '.join(TARGETS)}{suggest(to, TARGETS)}"
        )
    target, chosen = TARGETS[to], chosen or Chosen()
    if not target.chooses and (chosen.method is not None or chosen.seed is not None):
        raise InputError(f"--to {to} writes all methods and seeds: leave out --method and --seed")
    return target.write(run, out or target.default(run), chosen)
