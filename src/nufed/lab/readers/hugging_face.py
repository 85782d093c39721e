"""Data sets of the package ``datasets`` and partitioners of Flower Datasets (extra ``hf``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nufed.data.samples import Samples, as_samples
from nufed.errors import InputError, in_short, require, require_whole, shown
from nufed.lab.pretrained import tokens as padded_tokens
from nufed.lab.readers.files import check_size, data_limit
from nufed.lab.readers.text import read_tokenizer
from nufed.registry import suggest


def hugging_face(
    path: str = "", name: str | None = None, split: str = "train", **columns: Any
) -> Samples:
    """A Hugging Face data set from a folder or the local cache, "hf:PATH" or "hf:NAME".

    Nothing is downloaded: get a data set of the Hub first, for example with
    ``datasets.load_dataset(NAME)``.

    Args:
        path: a folder (saved by ``save_to_disk``, or with Parquet, CSV, JSON or image files), or
            the name of a cached data set.
        name: of the data set's configuration, if it has several.
        split: of the data set.
        columns: ``inputs``, ``target``, ``owner``, ``tokenizer``, ``length`` and ``mask``, as for
            :func:`from_datasets`.
    """
    named = isinstance(path, str) and bool(path)
    require(named, "data.args.path", path, "must name a folder or a cached data set")
    try:
        import datasets
    except ImportError:
        raise InputError('data sets of Hugging Face need: pip install "nufed[hf]"') from None
    try:
        with _offline():
            if (Path(path) / "dataset_dict.json").exists():
                data = datasets.load_from_disk(path)[split]
            elif (Path(path) / "dataset_info.json").exists():
                single = "must be left out: the folder holds a single data set"
                require(split == "train", "data.args.split", split, single)
                data = datasets.load_from_disk(path)
            else:
                data = datasets.load_dataset(path, name, split=split)
    except InputError:
        raise
    except Exception as error:  # datasets may raise anything
        raise InputError(
            f"= {shown(f'hf:{path}')}: can't be read as split {shown(split)} ({in_short(error)}); "
            "give the folder of a data set, or download it before with the package datasets",
            "data.source",
        ) from None
    return from_datasets(data, **columns)


def from_datasets(
    data: Any,
    *,
    inputs: str | list[str] | None = None,
    target: str | None = None,
    owner: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    mask: bool = False,
    split: str = "train",
) -> Samples:
    """A ``datasets.Dataset``, or a partitioner or ``FederatedDataset`` of Flower Datasets.

    Args:
        data: partitions become agents, called like their natural identifiers if there are any.
        inputs: columns of images, numbers or texts; by default all but target and owner.
        target: the column of classes or numbers; by default the only ``ClassLabel``, or ``label``.
        owner: the column that names the agent of a sample.
        tokenizer: of texts: the folder of a tokenizer, or its name in the local cache.
        length: tokens per text; longer ones are cut, shorter ones padded.
        mask: inputs are ``input_ids`` and ``attention_mask``, as models of transformers take them,
            with the tokenizer's special tokens; otherwise identifiers alone.
        split: of a ``FederatedDataset``.

    >>> import nufed
    >>> nufed.run("mine.toml", data=from_datasets(partitioner))  # doctest: +SKIP
    """
    owners = None
    if hasattr(data, "load_partition"):
        require(owner is None, "owner", owner, "must not be given: partitions are the agents")
        data, owners = _together(data, split)
    if not hasattr(data, "column_names") or not hasattr(data, "features"):
        raise InputError(
            f"{type(data).__name__} can't be used: give a datasets.Dataset (one split), or a "
            "partitioner or FederatedDataset of Flower Datasets"
        )
    check_size(data.data.nbytes, "the data set takes", data_limit())
    target = _column(data, target, "target") or _usual_target(data)
    owner = _column(data, owner, "owner")
    if isinstance(inputs, str):
        inputs = [inputs]
    columns = [_column(data, each, "inputs") for each in inputs or ()] or [
        each for each in data.column_names if each not in (target, owner)
    ]
    if owner is not None:
        owners = np.array([str(each) for each in data[owner]])
    texts = None if tokenizer is None else Texts(tokenizer, length, mask)
    x = _inputs(data, [str(each) for each in columns], texts)
    kind = data.features[target]
    if names := getattr(kind, "names", None):
        y = torch.tensor(data[target])
        if int(y.min()) < 0:
            raise InputError(f"column {shown(target)} has samples without a class: remove them")
        samples = Samples(x, y, tuple(names), owners)
    else:
        samples = as_samples((x, list(data[target]), owners))
    is_image = isinstance(x, torch.Tensor) and x.dtype == torch.uint8
    return Samples(
        samples.inputs, samples.targets, samples.classes, owners, 1 / 255 if is_image else 1.0
    )


@contextmanager
def _offline() -> Iterator[None]:
    """The packages of Hugging Face contact nobody."""
    import datasets.config
    import huggingface_hub.constants as hub

    places = [(hub, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    places += [(datasets.config, "HF_DATASETS_OFFLINE")]
    before = [(module, key, getattr(module, key)) for module, key in places if hasattr(module, key)]
    try:
        for module, key, _ in before:
            setattr(module, key, True)
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)


def _together(data: Any, split: str) -> tuple[Any, Any]:
    """The partitions of Flower Datasets as one data set, and the owner of each sample."""
    import datasets

    partitioner = data
    if hasattr(data, "partitioners"):
        if split not in data.partitioners:
            known = ", ".join(data.partitioners)
            require(False, "split", split, f"must be one that is partitioned: {known}")
        data.load_partition(0, split)  # loads the split, and gives it to the partitioner
        partitioner = data.partitioners[split]
    count = partitioner.num_partitions
    parts = [partitioner.load_partition(number) for number in range(count)]
    natural = getattr(partitioner, "partition_id_to_natural_id", {})  # known after loading
    width = len(str(count - 1))
    names = [str(natural.get(number, f"{number:0{width}}")) for number in range(count)]
    owners = [name for name, part in zip(names, parts, strict=True) for _ in range(len(part))]
    return datasets.concatenate_datasets(parts), np.array(owners)


def _column(data: Any, name: str | None, argument: str) -> str | None:
    if name is None or name in data.column_names:
        return name
    raise InputError(
        f"= {shown(name)}: the data set has the columns {', '.join(map(shown, data.column_names))}"
        + suggest(str(name), data.column_names),
        f"data.args.{argument}",
    )


def _usual_target(data: Any) -> str:
    classes = [name for name, kind in data.features.items() if hasattr(kind, "names")]
    usual = [name for name in ("label", "labels", "target") if name in data.column_names]
    if len(classes) == 1 or usual:
        return classes[0] if len(classes) == 1 else usual[0]
    raise InputError(
        "name the column of targets with data.args.target: the columns are "
        + ", ".join(map(shown, data.column_names))
    )


class Texts(NamedTuple):
    """How texts become tokens: see :func:`from_datasets`."""

    tokenizer: str
    length: int
    mask: bool


def _inputs(data: Any, columns: Sequence[str], texts: Texts | None) -> Any:
    """Images as bytes, texts as tokens, or numbers side by side."""
    if not columns:
        raise InputError("no column is left for inputs: name them with data.args.inputs")
    kinds = {type(data.features[name]).__name__ for name in columns}
    text = [name for name in columns if _is_text(data.features[name])]
    if "Image" in kinds and len(columns) == 1:
        return _images(data, columns[0])
    if text and len(columns) == 1 and texts is not None:
        return _tokens(list(data[columns[0]]), *texts)
    if "Image" in kinds or text:
        odd = text[0] if text else next(n for n in columns if hasattr(data.features[n], "decode"))
        raise InputError(
            f"column {shown(odd)} holds {'text' if text else 'images'}: name one column with "
            "data.args.inputs" + (", and data.args.tokenizer for its tokens" if text else "")
        )
    arrays = []
    for name in columns:
        try:
            array = np.asarray(list(data[name]))
            if array.dtype.kind not in "biuf":
                raise ValueError(f"they are {array.dtype}")
        except Exception as error:  # numpy may raise anything on uneven lists
            raise InputError(
                f"column {shown(name)} does not hold numbers in equal shapes ({in_short(error)}): "
                "name other columns with data.args.inputs"
            ) from None
        arrays.append(array)
    if len(arrays) == 1 and arrays[0].ndim > 1:
        whole = arrays[0]
    else:
        whole = np.concatenate([each.reshape(len(each), -1) for each in arrays], axis=1)
    floats = whole.dtype.kind == "f" or len(columns) > 1
    return torch.from_numpy(whole.astype(np.float32) if floats else whole)


def _is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", "") in ("string", "large_string")


def _images(data: Any, column: str) -> torch.Tensor:
    """Grey images as (height, width), coloured ones as (3, height, width)."""
    first = data[0][column]
    grey = first.mode in ("1", "L")
    check_size(len(data) * prod(first.size) * (1 if grey else 3), "its images take", data_limit())
    pixels = []
    for row, image in enumerate(data[column]):
        if image.size != first.size:
            raise InputError(
                f"the image of sample {row} (counted from 0) has {image.size[0]}×{image.size[1]} "
                f"pixels, the first has {first.size[0]}×{first.size[1]}: resize them to one size"
            )
        array = np.asarray(image.convert("L" if grey else "RGB"))
        pixels.append(array if grey else np.moveaxis(array, -1, 0))
    return torch.from_numpy(np.stack(pixels))


def _tokens(
    texts: Sequence[str], tokenizer: str, length: int, mask: bool
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Token identifiers, cut to ``length`` or padded with 0; or with a mask of what is padding."""
    require_whole(**{"data.args.length": length})
    if mask:
        names = ("input_ids", "attention_mask")
        encoded = padded_tokens(texts, tokenizer, length)
        return {name: encoded[name] for name in names}
    encode = read_tokenizer(tokenizer)
    tokens = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        of_text = encode(text)[:length]
        tokens[row, : len(of_text)] = of_text
    return torch.from_numpy(tokens)
