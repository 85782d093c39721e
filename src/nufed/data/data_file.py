"""Reads a user's data: CSV, Parquet, NPZ or NPY files, and folders of images."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nufed.data.csv_file import read_csv
from nufed.data.image_folder import read_images
from nufed.data.limits import data_limit, read_bounded, read_npy, read_npz
from nufed.data.parquet_file import read_parquet
from nufed.data.sample_table import Data
from nufed.data.samples import as_tensor, check_finite
from nufed.errors import InputError

LABEL = "label"
CSV_GROWTH = 8  # a value takes up to 8 times its bytes in a CSV file: "1," becomes a float64
KINDS = ".csv, .parquet, .npz or .npy, or be a folder of images"


def read_data(
    path: Path,
    label: str = LABEL,
    labelled: bool = True,
    *,
    owner: str | None = None,
    targets: Path | None = None,
    shape: Sequence[int] | None = None,
) -> Data:
    """Read samples from a file or a folder of images; non-finite numbers are refused.

    Args:
        path: a ``.csv`` with a header, one sample per line, all columns numeric except the
            label's and the owner's; a ``.parquet`` with such columns; a ``.npz`` with ``inputs``
            and ``targets``; a ``.npy`` with inputs alone; or a folder with a folder of images per
            class.
        label: the column of labels in a table; text and whole numbers are names of classes.
        labelled: whether labels are required; otherwise they are read if present.
        owner: the column of owners in a table, if any.
        targets: a ``.npy`` with the targets of a ``.npy``.
        shape: of one input that images are resized to; by default all must have one size.
    """
    if targets is not None and path.suffix != ".npy":
        raise InputError(f"{targets}: a file of targets is for inputs in a .npy file alone")
    with _named(path):
        found = _read(path, label, labelled, owner, shape)
        check_finite(as_tensor(found.inputs), "input")
    if targets is not None:
        with _named(targets):
            if targets.suffix != ".npy":
                raise InputError("its name must end in .npy")
            found = found._replace(labels=_from_npy(read_bounded(targets, data_limit())))
    with _named(targets or path):
        if isinstance(found.labels, np.ndarray) and found.labels.dtype.kind == "f":
            check_finite(as_tensor(found.labels), "target")
        if labelled and found.labels is None:
            raise InputError(
                "it holds inputs alone: give labels in another .npy (--targets, data.args.targets)"
            )
    return found


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors in reading a file become one sentence that names it."""
    try:
        yield
    except UnicodeDecodeError:
        raise InputError(
            f"{path} can't be used: it is not text in UTF-8; save it in that encoding"
        ) from None
    except (OSError, csv.Error, InputError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be used: {reason}") from None


def _read(
    path: Path, label: str, labelled: bool, owner: str | None, shape: Sequence[int] | None
) -> Data:
    if path.is_dir():
        return read_images(path, labelled, shape)
    match path.suffix:
        case ".csv":
            content = read_bounded(path, data_limit() // CSV_GROWTH)
            return read_csv(content.decode("utf-8-sig"), label, owner, labelled)
        case ".parquet":
            return read_parquet(read_bounded(path, data_limit()), label, owner, labelled)
        case ".npz":
            return _from_npz(read_bounded(path, data_limit()), labelled)
        case ".npy":
            return Data(_from_npy(read_bounded(path, data_limit())), None)
    raise InputError(f"its name must end in {KINDS}")


def _from_npy(content: bytes) -> np.ndarray[Any, Any]:
    try:
        return read_npy(content)
    except InputError:
        raise
    except Exception as error:  # numpy may raise anything on a foreign file
        raise InputError(f"it is not an NPY file of numbers ({error})") from None


def _from_npz(content: bytes, labelled: bool) -> Data:
    try:
        arrays = read_npz(content, ("inputs", "targets"))
    except InputError:
        raise
    except Exception as error:  # zipfile and numpy may raise anything on a foreign file
        raise InputError(f"it is not an NPZ file of numbers ({error})") from None
    wanted = ("inputs", "targets") if labelled else ("inputs",)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise InputError(f"it has no array {missing[0]!r}: save it with inputs= and targets=")
    return Data(arrays["inputs"], arrays.get("targets"))
