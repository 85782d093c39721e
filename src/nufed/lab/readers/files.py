"""The data source ``file``: a user's own table, arrays or images, read with a limit on memory.

CSV, Parquet (extra ``frames``), NPZ and NPY files, and folders of images (extra ``images``). Sizes
are checked before unpacking.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import stat
import warnings
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from nufed.data.samples import Samples, Table, as_samples, as_tensor, check_finite
from nufed.errors import InputError, in_short, require, shown
from nufed.registry import suggest

MOST_BYTES = 2**31  # that the arrays of a file may take in memory
LIMIT = "NUFED_DATA_LIMIT"  # environment variable that overrides it
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of np.savez; others are unbounded


def data_limit() -> int:
    """The maximum size in bytes of a file's data: ``NUFED_DATA_LIMIT``, or ``MOST_BYTES``."""
    given = os.environ.get(LIMIT)
    if not given:
        return MOST_BYTES
    if not given.isdecimal() or not int(given):
        raise InputError(f"{LIMIT} = {shown(given)}: must be a number of bytes, above 0")
    return int(given)


def check_size(size: int, what: str, limit: int) -> None:
    """Refuse a size above the limit."""
    if size > limit:
        raise InputError(
            f"{what} {size:,} bytes, and {limit:,} is the limit: to allow it, set {LIMIT} to the "
            "number of bytes that data may take in memory"
        )


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file within the limit."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise InputError("it is not a regular file")
    check_size(about.st_size, "it has", limit)
    with path.open("rb") as file:
        return file.read(about.st_size)


def read_npz(content: bytes, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The named arrays that an NPZ file holds; their sizes are checked before unpacking.

    Only arrays of numbers, booleans and strings are read.
    """
    left, arrays = data_limit(), {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for name in names:
            entry = entries.get(f"{name}.npy")
            if entry is None:
                continue
            if entry.compress_type not in _COMPRESSIONS:
                raise ValueError(f"{name} has a compression that np.savez does not use")
            with archive.open(entry) as file:
                arrays[name] = _read_array(file, name, left)
            left -= arrays[name].nbytes
    return arrays


def read_npy(content: bytes) -> np.ndarray[Any, Any]:
    """The array of an NPY file; its size is checked before it is read."""
    return _read_array(io.BytesIO(content), "its array", data_limit())


def _read_array(file: IO[bytes], name: str, limit: int) -> np.ndarray[Any, Any]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} has version {version} of the NPY format")
    read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
    shape, by_columns, dtype = read_header(file)
    if dtype.kind not in "biufUS" or min(shape, default=0) < 0:
        raise ValueError(f"{name} is of {dtype} and shape {shape}, not of numbers or strings")
    count = prod(shape)  # Python integers do not overflow
    size = count * dtype.itemsize
    check_size(size, f"{name} unpacks to", limit)
    unpacked = file.read(size)
    if len(unpacked) != size or file.read(1):
        raise ValueError(f"{name} does not have the size that its header states")
    array = np.frombuffer(unpacked, dtype, count)
    return array.reshape(shape, order="F" if by_columns else "C")


FIRST = 12  # columns named in a message, and the last


class Data(NamedTuple):
    """Inputs, one per row, their labels and owners, if any; of images the names of the files.

    Several inputs are arrays by name.
    """

    inputs: np.ndarray[Any, Any] | Table | Mapping[str, Any] | tuple[Any, ...]
    labels: Sequence[str] | np.ndarray[Any, Any] | None
    owners: Sequence[str] | None = None
    images: Sequence[str] = ()


class Places(NamedTuple):
    """The columns of labels and owners."""

    label: int | None
    owner: int | None

    def features(self, columns: int) -> list[int]:
        """The other columns."""
        return [place for place in range(columns) if place not in self]


def places_of(header: Sequence[str], label: str, owner: str | None, labelled: bool) -> Places:
    """The columns of labels and owners; a missing or repeated column is refused."""
    for name, needed in ((label, labelled), (owner, owner is not None)):
        if header.count(str(name)) > 1:
            raise InputError(f"it has {header.count(str(name))} columns {shown(name)}: give one")
        if needed and name not in header:
            some = [*header[:FIRST], "…", header[-1]] if len(header) > FIRST + 1 else header
            option = "--label or data.args.label" if name == label else "data.args.owner"
            raise InputError(
                f"it has no column {shown(name)} (its first line is {', '.join(map(shown, some))}):"
                f" name the columns in the first line, or name another column with {option}"
                + suggest(str(name), header)
            )
    place = {name: place for place, name in enumerate(header)}
    return Places(place.get(label), None if owner is None else place[owner])


# cells that spreadsheets interpret as formulas, and as numbers
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def to_cell(name: str) -> str:
    """A class name as a CSV cell that no spreadsheet interprets as a formula.

    One that begins with =, +, -, @, a tab or a line break and is not a number is prefixed with '.

    >>> to_cell("=1+1"), to_cell("-0.5"), to_cell("'-x")
    ("'=1+1", '-0.5', "''-x")
    """
    return f"'{name}" if _FORMULA.match(name) and not _NUMBER.fullmatch(name) else name


def from_cell(cell: str) -> str:
    """The class name written by :func:`to_cell`; of other cells the text, stripped of whitespace.

    >>> from_cell("'=1+1"), from_cell("-0.5"), from_cell("'tis")
    ('=1+1', '-0.5', "'tis")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell.strip()


def read_csv(text: str, label: str, owner: str | None, labelled: bool) -> Data:
    """Samples of a CSV file; the separator is the one that gives its header the most columns.

    With semicolons or tabs, numbers may have a decimal comma.
    """
    separator = separator_of(text)
    reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    header = next((row for row in reader if row), [])
    header = [name.strip() for name in header]
    places = places_of(header, label, owner, labelled) if header else Places(None, None)
    numbers, labels, owners, count = array("d"), [], [], 0
    for row in (row for row in reader if row):
        line, count = reader.line_num, count + 1
        if len(row) != len(header):
            raise InputError(f"line {line} has {len(row)} values, the header has {len(header)}")
        if places.label is not None:
            labels.append(from_cell(row[places.label]))
            if labelled and not labels[-1]:
                raise InputError(f"line {line} has an empty {shown(label)}: give every label")
        if places.owner is not None:
            owners.append(row[places.owner].strip())
        numbers.extend(_numbers(row, places.features(len(header)), header, line, separator))
    if not count:
        raise InputError("it is empty: give a line of column names, then one line per sample")
    inputs = np.array(numbers).reshape(count, -1) if numbers else np.empty((count, 0))
    return Data(inputs, labels if any(labels) else None, owners or None)


def separator_of(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")

    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader([line], delimiter=separator, strict=True), []))
        except csv.Error:
            return 0

    return max(",;\t", key=columns)  # the comma, if others do no better


def _numbers(
    row: Sequence[str], places: Sequence[int], header: Sequence[str], line: int, separator: str
) -> Iterator[float]:
    for place in places:
        word = row[place]
        try:
            value = float(word if separator == "," else word.replace(",", "."))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            what = f"has {shown(word)}, not a finite number" if word.strip() else "is empty"
            raise InputError(
                f"line {line}, column {shown(header[place])} {what}: every feature must be a "
                "number; remove that line or column, or train on missing values and text with "
                'data.source = "table"'
            )
        yield value


# the most that reading takes in memory (measured: tests/lab/readers/test_limits.py)
NUMBER_BYTES = 16  # for a feature of a row
TEXT_BYTES = 200  # for the label or the owner of a row, besides its characters
TEXT_COPIES = 4  # of its characters, at the same time


def opened_parquet(content: bytes, dictionaries: Sequence[str] = ()) -> Any:
    """A Parquet file, of which nothing but its header is read yet."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise InputError('Parquet needs pyarrow: pip install "nufed[frames]"') from None
    try:
        return pq.ParquetFile(pa.BufferReader(content), read_dictionary=list(dictionaries))
    except Exception as error:  # of a foreign file
        raise InputError(f"it is not a Parquet file ({in_short(error)})") from None


def read_parquet(content: bytes, label: str, owner: str | None, labelled: bool) -> Data:
    """Samples of a Parquet file; its size in memory is checked before it is unpacked."""
    # text stays as numbers of distinct values, so that repeated ones take no memory
    file = opened_parquet(content, [name for name in (label, owner) if name is not None])
    import pyarrow as pa

    names = list(file.schema_arrow.names)
    places = places_of(names, label, owner, labelled)
    features = [names[place] for place in places.features(len(names))]
    for name in features:
        kind = file.schema_arrow.field(name).type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (is_number or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
            raise InputError(
                f"column {shown(name)} is of type {kind}: every feature must be a number; remove "
                'that column, encode it as numbers, or train on text with data.source = "table"'
            )
    rows = file.metadata.num_rows
    if not rows:
        raise InputError("it is empty: give one row per sample")
    places_of_text = [place for place in places if place is not None]
    size = rows * (len(features) * NUMBER_BYTES + len(places_of_text) * TEXT_BYTES)
    for group in range(file.metadata.num_row_groups):
        columns = file.metadata.row_group(group)
        for place in places_of_text:
            size += TEXT_COPIES * columns.column(place).total_uncompressed_size
    check_size(size, "reading it takes up to", data_limit())
    try:
        inputs = np.empty((rows, len(features)))
        for place, name in enumerate(features):
            inputs[:, place] = file.read([name]).column(name).cast(pa.float64()).to_numpy()
        labels = None if places.label is None else parquet_values(file, label)
        owners = None if owner is None else parquet_values(file, owner)
    except Exception as error:  # of a damaged file
        raise InputError(f"it can't be read as Parquet ({in_short(error)})") from None
    for row, place in np.argwhere(~np.isfinite(inputs))[:1]:
        raise InputError(
            f"row {row} (counted from 0), column {shown(features[place])} is missing or not "
            "finite: remove that row or column, or train on missing values with data.source = "
            '"table"'
        )
    named = None if owners is None else [str(name) for name in owners]
    return Data(inputs, label_values(labels, label, labelled), named)


def parquet_values(file: Any, name: str) -> list[Any]:
    """Floating-point numbers or text by row, None if missing; rows with equal text share it."""
    import pyarrow as pa

    column = file.read([name]).column(name)
    if pa.types.is_floating(column.type):
        return list(column.to_pylist())
    texts: list[str | None] = []
    for chunk in column.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        values = (each.as_py() for each in coded.dictionary)
        distinct = [None if value is None else str(value) for value in values] + [None]
        texts += [distinct[place] for place in coded.indices.fill_null(-1).to_numpy()]
    return texts


def label_values(values: list[Any] | None, name: str, labelled: bool) -> Any:
    """Names of classes; numbers, if they are floating-point; None, if all are missing."""
    if values is None or (not labelled and all(value is None for value in values)):
        return None
    if None in values:
        raise InputError(
            f"row {values.index(None)} (counted from 0) has no {shown(name)}: give every label"
        )
    if all(isinstance(value, float) for value in values):
        return np.array(values)
    return values


FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of 8 bits per channel


def read_images(folder: Path, labelled: bool, shape: Sequence[int] | None = None) -> Data:
    """Images as bytes (uint8): grey ones are height × width, coloured ones 3 × height × width.

    Args:
        folder: holds a folder per class with its images; without labels, also the images alone.
        labelled: whether labels are required.
        shape: of one input, (height, width) or (1 or 3, height, width), which images are resized
            and converted to; by default all must have one size.
    """
    files, labels = _files(folder, labelled)
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InputError('images need Pillow: pip install "nufed[images]"') from None

    def opened(path: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                with Image.open(path, formats=FORMATS) as image:
                    if image.mode not in MODES:
                        raise ValueError(f"it has mode {image.mode}, not 8 bits per channel")
                    return ImageOps.exif_transpose(image)  # a copy
            except Exception as error:  # of a foreign or damaged file
                raise InputError(f"{path.relative_to(folder)} is no image ({error})") from None

    if shape is None:
        heads = [(image.size, image.mode) for image in map(opened, files)]
        sizes = dict(heads)
        if len(sizes) > 1:
            (a, b), (c, d) = list(sizes)[:2]
            raise InputError(
                f"its images have several sizes ({a}×{b}, {c}×{d} …): resize them to one, or set "
                "data.args.size to [height, width]"
            )
        width, height = next(iter(sizes))
        grey = all(mode in ("1", "L", "LA") for _, mode in heads)
        shape = (height, width) if grey else (3, height, width)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)):
        raise InputError(
            f"images can't be inputs of shape {tuple(shape)}: they are (height, width), or with 1 "
            "or 3 channels first"
        )
    check_size(len(files) * prod(shape), "its images take", data_limit())
    inputs = np.empty((len(files), *shape), np.uint8)
    for row, path in enumerate(files):
        image, colour = opened(path), len(shape) == 3 and shape[0] == 3
        try:
            image = image.convert("RGB" if colour else "L")
            size = (shape[-1], shape[-2])
            pixels = np.asarray(image if image.size == size else image.resize(size))
        except Exception as error:  # of a damaged file
            raise InputError(
                f"{path.relative_to(folder)} can't be read ({in_short(error)})"
            ) from None
        inputs[row] = np.moveaxis(pixels, -1, 0) if colour else pixels
    return Data(inputs, labels, images=[str(path.relative_to(folder)) for path in files])


def _files(folder: Path, labelled: bool) -> tuple[list[Path], list[str] | None]:
    """The images in the order of their names, and the names of their folders, if any."""
    inside = [path for path in sorted(folder.iterdir()) if _counts(path)]
    classes = [path for path in inside if path.is_dir()]
    loose = [path for path in inside if not path.is_dir()]
    if classes and loose:
        raise InputError(
            f"{loose[0].name} lies beside the folders of classes: give a folder per class, with "
            "its images in it"
        )
    if labelled and not classes:
        raise InputError(
            "it has no folder per class: put the images of every class into a folder with its name"
        )
    by_class = {each: [p for p in sorted(each.iterdir()) if _counts(p)] for each in classes}
    files = [path for paths in by_class.values() for path in paths] if classes else loose
    for path in files:
        if not path.is_file() or path.suffix.lower() not in SUFFIXES:
            raise InputError(
                f"{shown(str(path.relative_to(folder)))} is not an image: names must end in "
                f"{', '.join(SUFFIXES)}"
            )
    if not files:
        raise InputError("it holds no images")
    labels = [each.name for each, paths in by_class.items() for _ in paths]
    return files, labels if classes else None


def _counts(path: Path) -> bool:
    """Not a hidden file, nor one that Windows writes beside images."""
    return not path.name.startswith(".") and path.name not in ("Thumbs.db", "desktop.ini")


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
    with named_file(path):
        data = _read(path, label, labelled, owner, shape)
        check_finite(as_tensor(data.inputs), "input")
    if targets is not None:
        with named_file(targets):
            if targets.suffix != ".npy":
                raise InputError("its name must end in .npy")
            data = data._replace(labels=_from_npy(targets))
    with named_file(targets or path):
        if isinstance(data.labels, np.ndarray) and data.labels.dtype.kind == "f":
            check_finite(as_tensor(data.labels), "target")
        if labelled and data.labels is None:
            raise InputError(
                "it holds inputs alone: give labels in another .npy (--targets, data.args.targets)"
            )
    return data


@contextmanager
def named_file(path: Path) -> Iterator[None]:
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
            return Data(_from_npy(path), None)
    raise InputError(f"its name must end in {KINDS}")


@contextmanager
def _numbers_of(kind: str) -> Iterator[None]:
    """Errors in reading a foreign file, which zipfile and numpy may raise any of."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"it is not an {kind} file of numbers ({error})") from None


def _from_npy(path: Path) -> np.ndarray[Any, Any]:
    content = read_bounded(path, data_limit())
    with _numbers_of("NPY"):
        return read_npy(content)


def _from_npz(content: bytes, labelled: bool) -> Data:
    with _numbers_of("NPZ"):
        arrays = read_npz(content, ("inputs", "targets"))
    wanted = ("inputs", "targets") if labelled else ("inputs",)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise InputError(f"it has no array {missing[0]!r}: save it with inputs= and targets=")
    return Data(arrays["inputs"], arrays.get("targets"))


def read_several(path: Path, names: Sequence[str], labelled: bool = True) -> Data:
    """Several inputs and the targets from a ``.npz`` with an array of each name and ``targets``."""
    with named_file(path):
        if path.suffix != ".npz":
            raise InputError("its name must end in .npz, with an array for each input")
        content = read_bounded(path, data_limit())
        with _numbers_of("NPZ"):
            arrays = read_npz(content, (*names, "targets"))
        wanted = (*names, "targets") if labelled else names
        if missing := [name for name in wanted if name not in arrays]:
            raise InputError(f"it has no array {missing[0]!r}, and needs {', '.join(wanted)}")
    targets = arrays.pop("targets", None)
    return Data(arrays, targets)


def own_file(
    path: str = "",
    label: str = LABEL,
    owner: str | None = None,
    targets: str | None = None,
    regression: bool | None = None,
    scale: float | None = None,
    size: Sequence[int] | None = None,
) -> Samples:
    """Your own CSV, Parquet, NPZ or NPY file, or folder of images: data.args.path.

    Args:
        path: as for :func:`nufed.lab.readers.files.read_data`.
        label: the column of labels.
        owner: the column that names the agent of a sample; by default samples are dealt out.
        targets: a ``.npy`` with the targets of a ``.npy``.
        regression: whether labels are numbers to predict; by default whether some have fractions.
        scale: for whole numbers 0 … 255: stored as bytes, which models see multiplied by it;
            images by default with 1/255.
        size: height and width that images are resized to; by default all must have one size.
    """
    texts = {"path": path, "label": label, "owner": owner, "targets": targets}
    for name, value in texts.items():
        is_text = isinstance(value, str) or (value is None and name not in ("path", "label"))
        require(is_text, f"data.args.{name}", value, "must be text")
    require(bool(path), "data.args.path", path, "must name a file, or a folder of images")
    shape = None if size is None else _image_shape(Path(path), size)
    further = None if targets is None else Path(targets)
    data = read_data(Path(path), label, owner=owner, targets=further, shape=shape)
    inputs: Any = torch.from_numpy(np.ascontiguousarray(data.inputs))
    samples = as_samples((inputs, targets_of(data.labels, regression), data.owners))
    if scale is None and not data.images:
        return samples
    if not data.images:
        inputs = _bytes(inputs)
    scale = 1 / 255 if scale is None else float(scale)
    return Samples(inputs, samples.targets, samples.classes, samples.owners, scale=scale)


def _image_shape(folder: Path, size: Sequence[int]) -> tuple[int, ...]:
    whole = isinstance(size, Sequence) and all(isinstance(x, int) and x > 0 for x in size)
    name = "data.args.size"
    require(whole and len(size) == 2, name, size, "must be [height, width] of images")
    require(folder.is_dir(), name, size, f"is for a folder of images, which {folder} is not")
    return (3, *size)


def targets_of(labels: Any, regression: bool | None) -> Any:
    """Class names, class numbers or numbers to predict."""
    if isinstance(labels, np.ndarray):
        return labels.astype(float) if regression else labels
    assert labels is not None
    numbers = [_number(word) for word in labels]
    if regression is None:
        regression = None not in numbers and not all(float(x).is_integer() for x in numbers if x)
    if not regression:
        return labels
    if None in numbers:
        place = numbers.index(None)
        raise InputError(
            f"data.args.regression = true: the label {labels[place]!r} of sample {place} (counted "
            "from 0) is not a finite number"
        )
    return np.array(numbers, dtype=float)


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _bytes(inputs: torch.Tensor) -> torch.Tensor:
    stored = inputs.to(torch.uint8)
    if not bool((stored == inputs).all()):
        low, high = inputs.aminmax()
        raise InputError(
            "data.args.scale is for whole numbers in 0 … 255, and inputs range from "
            f"{float(low):g} to {float(high):g}: remove it"
        )
    return stored
