"""What ``nufed export RUN --to NAME`` can write: the targets by name.

A target is one function. It imports the package that it needs itself, inside
:func:`nufed.lab.export.target.needed`, so that nothing is imported before it is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nufed.errors import InputError, shown
from nufed.files import write_durably
from nufed.lab.export.mlflow_store import FOLDER as MLFLOW
from nufed.lab.export.mlflow_store import write_mlflow
from nufed.lab.export.model_files import export_of_run
from nufed.lab.export.target import Chosen, Target, check_new, needed
from nufed.lab.export.tensorboard_files import FOLDER as TENSORBOARD
from nufed.lab.export.tensorboard_files import write_tensorboard
from nufed.lab.export.wandb_runs import write_wandb
from nufed.lab.readers.files import to_cell
from nufed.lab.runs import Run
from nufed.registry import suggest


def write_csv(run: Run, out: Path) -> list[str]:
    """Write :meth:`nufed.Run.frame` to ``out`` and :meth:`nufed.Run.history` beside it."""
    return _write(run, out, ".csv", _csv)


def write_parquet(run: Run, out: Path) -> list[str]:
    """The same as Parquet files."""
    return _write(run, out, ".parquet", _parquet)


def _write(run: Run, out: Path, suffix: str, encode: Callable[[Any], bytes]) -> list[str]:
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
