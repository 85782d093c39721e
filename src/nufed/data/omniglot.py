"""Omniglot as a natural federation: every agent classifies characters of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nufed.data.limits import read_npz
from nufed.data.samples import Samples
from nufed.data.store import OMNIGLOT, data_directory
from nufed.errors import InputError, require
from nufed.seeding import stream

DRAWN, SIDE = 105, 28  # pixels per side: of a drawing, and of an image
ARRAYS = ("ink", "alphabet", "character", "drawer", "alphabets")


def omniglot(ways: int = 5, seed: int = 0) -> Samples:
    """Omniglot (Lake et al. 2015): 5-way tasks, each agent with 5 characters of one alphabet.

    The characters of every alphabet are shuffled and dealt out, ``ways`` to an agent, without
    overlap; those left over are not used. Labels are 0 … ways − 1, so that the same label is
    another character at every agent: no global model fits all agents without fine-tuning. An agent
    has all drawings of its characters and is called like its alphabet, for example Greek-0.

    Drawings of 105×105 bits become 28×28 bytes, 255 for ink: every pixel is the mean over a window
    of 4 or 5 pixels per side (adaptive average pooling), rounded.

    Args:
        ways: classes per agent.
        seed: of the dealing, independent of the run's seeds.
    """
    whole = isinstance(ways, int) and not isinstance(ways, bool)
    require(whole and ways >= 2, "ways", ways, "must be a whole number, at least 2")
    (file,) = OMNIGLOT.files
    arrays = _read(OMNIGLOT.read(file), data_directory() / file)
    characters = arrays["character"]
    rows, labels, owners = [], [], []
    for number, name in enumerate(arrays["alphabets"]):
        own = np.unique(characters[arrays["alphabet"] == number])
        dealt = stream(seed, "omniglot", agent=number).permutation(own)
        for agent in range(len(dealt) // ways):
            for label, character in enumerate(dealt[agent * ways : (agent + 1) * ways]):
                found = (arrays["alphabet"] == number) & (characters == character)
                rows.append(np.flatnonzero(found))
                labels += [label] * len(rows[-1])
                owners += [f"{name}-{agent}"] * len(rows[-1])
    require(bool(rows), "ways", ways, "must be at most the number of characters of an alphabet")
    return Samples(
        inputs=torch.from_numpy(_images(arrays["ink"][np.concatenate(rows)])),
        targets=torch.tensor(labels),
        classes=tuple(map(str, range(ways))),
        owners=np.array(owners),
        scale=1 / 255,
    )


def check_omniglot(content: bytes, path: Path) -> None:
    """Refuse the bytes of the file ``path`` unless they have the layout of docs/data.md."""
    _read(content, path)


def _read(content: bytes, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        arrays = read_npz(content, ARRAYS)
        if missing := [name for name in ARRAYS if name not in arrays]:
            raise ValueError(f"{missing[0]} is not in it")
        ink, names = arrays["ink"], arrays["alphabets"]
        width = -(-DRAWN * DRAWN // 8)
        if ink.dtype != np.uint8 or ink.shape != (len(ink), width) or not len(ink):
            raise ValueError(f"ink is {ink.dtype} of shape {ink.shape}, not bytes in {width}")
        for key in ("alphabet", "character", "drawer"):
            if arrays[key].dtype.kind not in "iu" or arrays[key].shape != (len(ink),):
                raise ValueError(f"{key} must hold one whole number per drawing")
        if names.dtype.kind != "U" or names.ndim != 1 or len(set(names)) < len(names):
            raise ValueError("alphabets must hold different names")
        if not 0 <= arrays["alphabet"].min() <= arrays["alphabet"].max() < len(names):
            raise ValueError("alphabet must hold places in alphabets")
    except Exception as error:  # zipfile and numpy may raise anything on an invalid file
        raise InputError(
            f"{path} does not have the layout of Omniglot ({error}): docs/data.md says how to "
            "make it"
        ) from error
    return arrays


def _images(ink: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Packed drawings as small images; in whole numbers, so that all machines agree."""
    drawings = np.unpackbits(ink, axis=1, count=DRAWN * DRAWN).reshape(-1, DRAWN, DRAWN)
    places = np.arange(SIDE)
    starts, ends = places * DRAWN // SIDE, -(-(places + 1) * DRAWN // SIDE)
    images = np.empty((len(drawings), SIDE, SIDE), np.uint8)
    for y, (top, bottom) in enumerate(zip(starts, ends, strict=True)):
        band = drawings[:, top:bottom].sum(axis=1, dtype=np.int64)
        for x, (left, right) in enumerate(zip(starts, ends, strict=True)):
            area = (bottom - top) * (right - left)
            images[:, y, x] = (255 * band[:, left:right].sum(axis=1) + area // 2) // area
    return images
