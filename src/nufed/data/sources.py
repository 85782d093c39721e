"""The data sets that nufed can load by name."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from nufed.data.limits import read_npz
from nufed.data.omniglot import omniglot
from nufed.data.own_file import own_file
from nufed.data.samples import Samples
from nufed.data.sinusoid import sinusoid
from nufed.data.store import (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    MNIST_WRITERS,
    Stored,
    data_directory,
)
from nufed.errors import InputError, require

Pixels: TypeAlias = Literal["unit", "symmetric", "standardised"]
# scale and shift of bytes; the last gives CIFAR mean about 0 and standard deviation about 1
PIXELS: dict[Pixels, tuple[float, float]] = {
    "unit": (1 / 255, 0.0),
    "symmetric": (2 / 255, -1.0),
    "standardised": (1 / (255 * 0.25), -0.475 / 0.25),
}
SIDE = 32  # pixels of a CIFAR image


def digits() -> Samples:
    """1,797 handwritten digits of 8×8 pixels, shipped with nufed (UCI, 10 classes).

    >>> samples = digits()
    >>> len(samples), samples.input_shape, samples.outputs
    (1797, (8, 8), 10)
    """
    with as_file(files("nufed.data") / "digits.npz") as path, np.load(path) as archive:
        images, labels = archive["images"], archive["labels"]
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(labels).long(),
        classes=tuple(str(digit) for digit in range(10)),
        scale=1 / 16,
    )


def cifar10(pixels: Pixels = "unit") -> Samples:
    """The 50,000 training images of CIFAR-10: 3×32×32 pixels, 10 classes.

    ``pixels``: inputs in 0 … 1 (``unit``), in −1 … 1 (``symmetric``), or ``standardised``.
    """
    return _cifar(CIFAR10, 1, _lines("cifar10"), pixels)


def cifar100(pixels: Pixels = "unit") -> Samples:
    """The 50,000 training images of CIFAR-100: 3×32×32 pixels, 100 classes.

    ``pixels``: inputs in 0 … 1 (``unit``), in −1 … 1 (``symmetric``), or ``standardised``.
    """
    return _cifar(CIFAR100, 2, _lines("cifar100"), pixels)


def fashion_mnist(
    part: Literal["train", "test", "all"] = "train", pixels: Pixels = "unit"
) -> Samples:
    """Fashion-MNIST (Xiao et al. 2017): 28×28 pixels, 10 classes of clothing.

    ``part``: the 60,000 training images, the 10,000 test images, or all. ``pixels`` as for
    :func:`cifar10`; ``standardised`` uses the mean and standard deviation of CIFAR.
    """
    require(part in ("train", "test", "all"), "part", part, "must be train, test or all")
    require(pixels in PIXELS, "pixels", pixels, f"must be one of {', '.join(PIXELS)}")
    files = list(FASHION_MNIST.files)  # images and labels for training, then for test
    chosen = {"train": files[:2], "test": files[2:], "all": files}[part]
    arrays = [_idx(FASHION_MNIST.read(file), file) for file in chosen]
    scale, shift = PIXELS[pixels]
    return Samples(
        inputs=torch.from_numpy(np.concatenate(arrays[::2])),
        targets=torch.from_numpy(np.concatenate(arrays[1::2])).long(),
        classes=_lines("fashion-mnist"),
        scale=scale,
        shift=shift,
    )


def mnist_writers(part: Literal["train", "test", "all"] = "train") -> Samples:
    """MNIST with the person who wrote each digit: 28×28 pixels, one agent per writer.

    ``part``: the 539 writers of MNIST's training images, the 297 of its test images, or all.
    """
    require(part in ("train", "test", "all"), "part", part, "must be train, test or all")
    parts = ("train", "test") if part == "all" else (part,)
    (file,) = MNIST_WRITERS.files
    content, path = MNIST_WRITERS.read(file), data_directory() / file
    read = [_writers(content, name, path) for name in parts]
    images, labels, owners = (np.concatenate(column) for column in zip(*read, strict=True))
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(labels).long(),
        classes=tuple(str(digit) for digit in range(10)),
        owners=owners,
        scale=1 / 255,
    )


def check_writers(content: bytes, path: Path) -> None:
    """Refuse the bytes of the file ``path`` unless they are MNIST by writer."""
    for part in ("train", "test"):
        _writers(content, part, path)


def _cifar(stored: Stored, labels: int, classes: tuple[str, ...], pixels: Pixels) -> Samples:
    """Records of ``labels`` label bytes, the last of them the class, and a channel-major image."""
    require(pixels in PIXELS, "pixels", pixels, f"must be one of {', '.join(PIXELS)}")
    width = labels + 3 * SIDE * SIDE
    records = [np.frombuffer(stored.read(f), np.uint8).reshape(-1, width) for f in stored.files]
    images = np.empty((sum(map(len, records)), 3, SIDE, SIDE), np.uint8)
    np.concatenate([r[:, labels:] for r in records], out=images.reshape(len(images), -1))
    scale, shift = PIXELS[pixels]
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(np.concatenate([r[:, labels - 1] for r in records])).long(),
        classes=classes,
        scale=scale,
        shift=shift,
    )


def _lines(name: str) -> tuple[str, ...]:
    """The class names of a data set, in the order of their numbers."""
    return tuple((files("nufed.data") / f"{name}.txt").read_text("utf-8").splitlines())


def _idx(content: bytes, file: str) -> np.ndarray[Any, Any]:
    """The bytes of a verified idx.gz file: two zeros, type 8, dimensions, their sizes, the data."""
    unpacked = gzip.decompress(content)
    if unpacked[:3] != b"\0\0\x08":
        raise InputError(f"{file} is not an idx file of bytes: get the data set again")
    shape = np.frombuffer(unpacked, ">i4", count=unpacked[3], offset=4)
    return np.frombuffer(unpacked, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _writers(content: bytes, part: str, path: Path) -> tuple[np.ndarray[Any, Any], ...]:
    """Images, labels and writers of one part of MNIST; writers are called train-0, test-326."""
    try:
        names = [f"{key}_{part}" for key in ("x", "y", "writer")]
        arrays = read_npz(content, names)
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"{missing[0]} is not in it")
        images, labels, writers = (arrays[name] for name in names)
        if images.dtype != np.uint8 or images.shape != (len(images), 28, 28):
            raise ValueError(f"x_{part} is {images.dtype} of shape {images.shape}")
        for key, column in (("y", labels), ("writer", writers)):
            if column.dtype.kind not in "iu" or column.shape != (len(images),):
                raise ValueError(f"{key}_{part} must hold one whole number per image")
        if not 0 <= labels.min() <= labels.max() <= 9:
            raise ValueError(f"y_{part} must hold digits")
    except Exception as error:  # zipfile and numpy may raise anything on an invalid file
        raise InputError(
            f"{path} does not have the layout of MNIST by writer ({error}): docs/data.md says how "
            "to make it"
        ) from error
    return images, labels, np.array([f"{part}-{writer}" for writer in writers])


SOURCES: dict[str, Callable[..., Samples]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion-mnist": fashion_mnist,
    "mnist-writers": mnist_writers,
    "omniglot": omniglot,
    "sinusoid": sinusoid,
    "file": own_file,
}
