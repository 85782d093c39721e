"""Reads a folder of images, with a folder for every class (extra ``images``)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nufed.data.limits import check_size, data_limit
from nufed.data.sample_table import Data
from nufed.errors import InputError, in_short, shown

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
