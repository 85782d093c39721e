"""The scores and curves of a run as CSV or Parquet files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nufed.data.csv_file import to_cell
from nufed.export.packages import needed
from nufed.export.paths import check_new
from nufed.files import write_durably
from nufed.runs import Run


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
