"""Writes a run for other tools: a finished one, or, as an observer, while it trains.

What ``nufed export RUN --to NAME`` can write are the targets by name. A target is one function. It
imports the package that it needs itself, inside :func:`nufed.lab.export.target.needed`, so that
nothing is imported before it is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nufed.errors import InputError, shown
from nufed.lab.export.mlflow_store import FOLDER as MLFLOW, MLflow as MLflow, write_mlflow
from nufed.lab.export.model_files import WRITERS, export_model as export_model, export_of_run
from nufed.lab.export.target import Chosen as Chosen, Target as Target, check_new, needed
from nufed.lab.export.tensorboard_files import (
    FOLDER as TENSORBOARD,
    TensorBoard as TensorBoard,
    write_tensorboard,
)
from nufed.lab.export.wandb_runs import WandB as WandB, write_wandb
from nufed.lab.files import write_durably
from nufed.lab.readers.files import to_cell
from nufed.lab.runs import Run
from nufed.registry import suggest


def _table_files(suffix: str, encode: Callable[[Any], bytes]) -> Target:
    return Target(partial(_write, suffix, encode), lambda run: Path(run.path.name + suffix))


def _write(
    suffix: str, encode: Callable[[Any], bytes], run: Run, out: Path, chosen: Chosen
) -> list[str]:
    """Write :meth:`nufed.Run.frame` to ``out`` and :meth:`nufed.Run.history` beside it."""
    curves = out.with_name(f"{out.stem}-history{suffix}")
    check_new(out, suffix)
    check_new(curves, suffix)
    scores, history = encode(run.frame()), encode(run.history())
    write_durably(out, scores)
    write_durably(curves, history)
    return [f"scores: {out}", f"curves by round: {curves}"]


def _csv(frame: Any) -> bytes:
    """Text that a spreadsheet would read as a formula is prefixed with an apostrophe."""
    safe = frame.assign(
        **{
            name: frame[name].map(to_cell, na_action="ignore")
            for name in frame.select_dtypes(include=["object", "string"])
        }
    )
    text: str = safe.to_csv(index=False)
    return text.encode("utf-8", "backslashreplace")


def _parquet(frame: Any) -> bytes:
    with needed("writing Parquet files", "frames"):
        import pyarrow  # type: ignore[import-untyped]  # noqa: F401
    content = io.BytesIO()
    frame.to_parquet(content, index=False)
    return content.getvalue()


def _model_file(kind: str) -> Target:
    suffix = WRITERS[kind][1]
    write = partial(export_of_run, kind)
    return Target(write, lambda run: Path(run.path.name + suffix), chooses=True)


TARGETS: Mapping[str, Target] = {
    "tensorboard": Target(write_tensorboard, lambda run: run.path / TENSORBOARD),
    "mlflow": Target(write_mlflow, lambda run: Path(MLFLOW)),
    "wandb": Target(write_wandb, lambda run: Path()),
    "csv": _table_files(".csv", _csv),
    "parquet": _table_files(".parquet", _parquet),
    "onnx": _model_file("onnx"),
    "state_dict": _model_file("state_dict"),
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
