"""Reads folders of LEAF (Caldas et al. 2018): JSON files of users with their samples.

:func:`import_leaf` makes one file of a folder, which is smaller and read without parsing JSON.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nufed.data.samples import Samples, as_samples
from nufed.errors import InputError, in_short, require, shown
from nufed.lab.files import write_durably
from nufed.lab.readers.files import check_size, data_limit, read_bounded, read_npz

# what a value of a JSON file takes in memory, compared with its bytes there (measured:
# tests/lab/readers/test_leaf.py): "[0]," takes 100 bytes, '{"":0},' 240
JSON_GROWTH = 40
ARRAYS = ("inputs", "targets", "owner", "owners", "classes", "unseen")  # of an imported folder


def leaf(path: str = "") -> Samples:
    """A folder of LEAF's JSON files, one agent per user: data.args.path, or "leaf:DIR".

    It may also be a file that ``nufed data import leaf DIR`` made of such a folder.

    The folder holds the files themselves, or folders ``train`` and ``test`` (also in one called
    ``data``). If these have different users, those of ``test`` are held out from training; if they
    have the same, their samples are joined, and nufed cuts the parts itself.

    Inputs are numbers, or texts of one length: characters then become their numbers, in the order
    of all characters of inputs and targets.

    Args:
        path: the folder or file.
    """
    require(isinstance(path, str) and bool(path), "data.args.path", path, "must name a folder")
    folder = Path(path)
    if folder.is_file():
        return _imported(folder)
    parts = [folder / "data", folder]
    folder = next((each for each in parts if (each / "train").is_dir()), folder)
    by_part: dict[str, dict[str, tuple[Any, Any]]] = {}
    left = data_limit()
    for part in [p for p in ("train", "test") if (folder / p).is_dir()] or [""]:
        by_part[part] = {}
        for file in sorted((folder / part).glob("*.json")):
            for user, rows in _users(file).items():
                if user in by_part[part]:
                    raise InputError(f"{file} can't be used: user {shown(user)} is also in another")
                left -= sum(each.nbytes for each in rows)
                check_size(data_limit() - left, f"{path} takes", data_limit())
                by_part[part][user] = rows
        if not by_part[part]:
            raise InputError(f"{folder / part} holds no .json file of users: give a folder of LEAF")
    return _joined(path, by_part)


def import_leaf(folder: str, file: Path) -> Samples:
    """Write the samples of a folder into one NPZ file, which :func:`leaf` reads as the same."""
    samples = leaf(folder)
    assert samples.owners is not None
    owners, owner = np.unique(samples.owners, return_inverse=True)
    arrays: dict[str, Any] = {
        "inputs": np.asarray(samples.inputs),
        "targets": samples.targets.numpy(),
        "owner": owner,
        "owners": owners,
        "classes": np.array(samples.classes, dtype=np.str_),
        "unseen": np.array(samples.unseen_owners, dtype=np.str_),
    }
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_durably(file, [content.getbuffer()])
    return samples


def _imported(file: Path) -> Samples:
    """What :func:`import_leaf` wrote."""
    try:
        arrays = read_npz(read_bounded(file, data_limit()), ARRAYS)
        if missing := [name for name in ARRAYS if name not in arrays]:
            raise ValueError(f"it has no array {missing[0]}")
        owner, *names = (arrays[name] for name in ("owner", "owners", "classes", "unseen"))
        if owner.dtype.kind not in "iu" or owner.ndim != 1 or not len(owner) or owner.min() < 0:
            raise ValueError("owner must hold a number of owners per sample")
        if any(each.ndim != 1 or (each.dtype.kind != "U" and len(each)) for each in names):
            raise ValueError("owners, classes and unseen must hold names")
        owners, classes, unseen = names
        inputs, targets = (torch.from_numpy(arrays[name].copy()) for name in ARRAYS[:2])
        samples = Samples(
            inputs,
            targets,
            tuple(classes.tolist()),
            owners[owner],
            unseen_owners=tuple(unseen.tolist()),
        )
        return as_samples(samples)
    except (InputError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} can't be used: {reason}") from None
    except Exception as error:  # of a foreign file
        raise InputError(
            f"{file} can't be used: it was not made by `nufed data import leaf` ({in_short(error)})"
        ) from None


def _users(file: Path) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """The inputs and targets of every user of a file."""
    try:
        content = json.loads(read_bounded(file, data_limit() // JSON_GROWTH))
        users, of = content["users"], content["user_data"]
        if not isinstance(users, list) or len(set(map(str, users))) < len(users):
            raise ValueError("users must be a list of different names")
        return {str(user): _rows(of[user], str(user)) for user in users}
    except InputError as error:
        raise InputError(f"{file} can't be used: {error}") from None
    except OSError as error:
        raise InputError(f"{file} can't be used: {error.strerror}") from None
    except Exception as error:  # of a foreign file
        raise InputError(
            f"{file} can't be used: it does not have the layout of LEAF ({in_short(error)})"
        ) from None


def _rows(of: Any, user: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = of["x"], of["y"]
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise ValueError(f"x and y of user {user} must be lists of the same length")
    arrays = _array(x, "x", user), _array(y, "y", user)
    if arrays[0].dtype.kind == "f":
        return arrays[0].astype(np.float32), arrays[1]
    return arrays


def _array(rows: list[Any], name: str, user: str) -> np.ndarray[Any, Any]:
    """Numbers, or texts as arrays of their characters."""
    if rows and all(isinstance(row, str) for row in rows):
        if len({len(row) for row in rows}) > 1 or not rows[0]:
            raise ValueError(f"the texts of {name} of user {user} have different lengths: pad them")
        return np.array([list(row) for row in rows])
    values = np.asarray(rows)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} of user {user} must hold numbers in equal shapes, or texts")
    return values


def _joined(path: str, by_part: dict[str, dict[str, tuple[Any, Any]]]) -> Samples:
    """The samples of all users; those of ``test`` alone are unseen."""
    pairs = [(user, rows) for part in by_part.values() for user, rows in part.items()]
    pairs = [(user, rows) for user, rows in pairs if len(rows[0])]
    kinds = {tuple((each.shape[1:], each.dtype.kind) for each in rows) for _, rows in pairs}
    if len(kinds) != 1:
        raise InputError(
            f"{path} can't be used: "
            + ("its users have samples of different shapes or types" if kinds else "it is empty")
        )
    owners = np.array([user for user, rows in pairs for _ in rows[0]])
    x, y = (np.concatenate(column) for column in zip(*(rows for _, rows in pairs), strict=True))
    if x.dtype.kind == "U":
        return _of_characters(x, y, owners, _unseen(by_part))
    samples = as_samples((x, y.reshape(len(y)) if y.size == len(y) else y, owners))
    return Samples(
        samples.inputs,
        samples.targets,
        samples.classes,
        samples.owners,
        unseen_owners=_unseen(by_part),
    )


def _of_characters(x: Any, y: Any, owners: Any, unseen: tuple[str, ...]) -> Samples:
    """Texts as numbers of characters; the next one is the class, or the next ones are targets."""
    if y.dtype.kind != "U":
        raise InputError("its inputs are texts and its targets are not: give texts of both")
    alphabet = np.unique(np.concatenate([x.reshape(-1), y.reshape(-1)]))
    inputs, targets = (torch.from_numpy(np.searchsorted(alphabet, each)) for each in (x, y))
    if y.shape[1] == 1:
        return Samples(
            inputs, targets[:, 0], tuple(alphabet.tolist()), owners, unseen_owners=unseen
        )
    return Samples(inputs, targets, (), owners, unseen_owners=unseen)


def _unseen(by_part: dict[str, Any]) -> tuple[str, ...]:
    """The users of ``test``, if none of them is in ``train``."""
    train, test = by_part.get("train", {}), by_part.get("test", {})
    return () if train.keys() & test.keys() or not train else tuple(test)
