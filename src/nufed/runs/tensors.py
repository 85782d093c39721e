"""Tensors as a safetensors file without a copy of them: its bytes in pieces, one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from safetensors.torch import save
from torch import Tensor

from nufed.runs.durable import Pieces


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Pieces:
    """The very bytes that ``safetensors.torch.save`` gives; tensors may share memory.

    >>> tensors = {"b": torch.ones(2), "a": torch.zeros(3, 1, dtype=torch.int64)}
    >>> b"".join(tensor_pieces(tensors)) == save(tensors)
    True
    """
    # safetensors itself says in which order it writes which dtype under which name
    empty = save({name: torch.empty(0, dtype=t.dtype) for name, t in tensors.items()})
    header = json.loads(empty[8:])
    parts = [_bytes_of(tensors[name]) for name in header]
    ends = accumulate((part.nbytes for part in parts), initial=0)
    for (name, about), offsets in zip(header.items(), pairwise(ends), strict=True):
        about["shape"], about["data_offsets"] = list(tensors[name].shape), list(offsets)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
