"""Compression of what agents send: codecs of a change, with error feedback.

An agent sends the codes of its change y − w of each of the server's vectors w, and the server
decodes w + D(E(y − w)). A codec with error feedback adds what was lost before:

    c = y − w + r;   send E(c);   r ← c − D(E(c)),      r = 0 at the start,

so that the sum of all that was decoded, plus r, is the sum of all changes (Seide et al., 2014;
Karimireddy et al., 2019). r is a part of the agent's state and takes effect, like the rest of it,
once the server has accepted the update. Running statistics are sent as they are: a variance that
is rounded, or sent late, may become negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.algorithms.protocol import State

STATISTICS = "statistics"
RESIDUAL = "residual/"  # begins the names of r in an agent's state
BLOCK = 1024  # numbers that share a scale in int8


Counted: TypeAlias = Mapping[str, int]
"""Of vectors that end in running statistics, how many numbers are parameters (``Context``)."""
NO_STATISTICS: Counted = MappingProxyType({})


class CodeError(ValueError):
    """Codes that can't be decoded."""


class Codec(Protocol):
    """Encodes a change, a flat vector in float32 or float64, as smaller tensors."""

    @property
    def feedback(self) -> bool:
        """Whether what is lost is added to the agent's next change."""

    def encode(self, change: Tensor) -> dict[str, Tensor]:
        """The tensors that are sent."""

    def decode(self, codes: State, like: Tensor) -> Tensor:
        """The change, with the length and dtype of ``like``; raises :class:`CodeError`."""


@dataclass(frozen=True)
class Bfloat16:
    """Each number in 2 bytes, rounded to 8 significant bits: an error of at most 2⁻⁸ of it."""

    feedback: ClassVar[bool] = False

    def encode(self, change: Tensor) -> dict[str, Tensor]:
        return {"codes": change.bfloat16().view(torch.int16)}

    def decode(self, codes: State, like: Tensor) -> Tensor:
        return codes["codes"].view(torch.bfloat16).to(like.dtype)


@dataclass(frozen=True)
class Int8:
    """Each number in 1 byte, as a multiple of the largest of its block of 1,024 divided by 127: an
    error of at most half of that, which error feedback sends later."""

    feedback: ClassVar[bool] = True

    def encode(self, change: Tensor) -> dict[str, Tensor]:
        blocks = F.pad(change, (0, -len(change) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        codes = torch.where(scales > 0, blocks / scales, 0).round_().to(torch.int8)
        return {"codes": codes.view(-1)[: len(change)].clone(), "scales": scales.view(-1)}

    def decode(self, codes: State, like: Tensor) -> Tensor:
        blocks = F.pad(codes["codes"], (0, -len(like) % BLOCK)).view(-1, BLOCK).to(like.dtype)
        return blocks.mul_(codes["scales"].unsqueeze(1)).view(-1)[: len(like)]


@dataclass(frozen=True)
class TopK:
    """The largest numbers alone, a ``share`` of all, each with its place in 4 bytes; error feedback
    sends the others later."""

    share: float = 0.01

    feedback: ClassVar[bool] = True

    def encode(self, change: Tensor) -> dict[str, Tensor]:
        number = min(len(change), math.ceil(self.share * len(change)))
        places = torch.topk(change.abs(), number, sorted=False).indices.sort().values
        return {"places": places.to(torch.int32), "values": change[places]}

    def decode(self, codes: State, like: Tensor) -> Tensor:
        places = codes["places"].long()
        ascending = bool((places.diff() > 0).all())
        if len(places) and (not ascending or places[0] < 0 or places[-1] >= len(like)):
            raise CodeError(f"places of numbers must ascend within 0 … {len(like) - 1}")
        return torch.zeros_like(like).index_copy_(0, places, codes["values"])


CODECS: Mapping[str, type[Codec]] = {"bfloat16": Bfloat16, "int8": Int8, "top_k": TopK}


class Sent(NamedTuple):
    """The codes sent, the vectors that the server decodes, and the agent's next residuals."""

    codes: State
    vectors: State
    residuals: State


def compress(
    codec: Codec, vectors: State, before: State, state: State, counted: Counted = NO_STATISTICS
) -> Sent:
    """Encode an agent's vectors.

    Args:
        codec: encodes a change.
        vectors: to be sent.
        before: the server's vectors that they replace.
        state: the agent's, with its residuals if it has any yet.
        counted: as in the server's context.
    """
    codes, residuals = dict[str, Tensor](), dict[str, Tensor]()
    for name, vector in vectors.items():
        change = _wide(vector) - _wide(before[name])
        residual = state.get(RESIDUAL + name) if codec.feedback else None
        if residual is not None:
            change = change + residual
        first = counted.get(name, len(change))
        code = _encode(codec, torch.cat([change[:first], _wide(vector)[first:]]), counted.get(name))
        codes |= {f"{name}/{part}": tensor for part, tensor in code.items()}
        if codec.feedback:
            lost = change[:first] - codec.decode(code, change[:first])
            residuals[RESIDUAL + name] = F.pad(lost, (0, len(change) - first))
    sent = {name: before[name] for name in vectors}
    kept = {name: r for name, r in state.items() if name.startswith(RESIDUAL)}
    return Sent(codes, decompress(codec, codes, sent, counted), {**kept, **residuals})


def decompress(
    codec: Codec, codes: State, before: State, counted: Counted = NO_STATISTICS
) -> dict[str, Tensor]:
    """The vectors that replace the server's ``before``; raises :class:`CodeError`."""
    vectors = {}
    for name, vector in before.items():
        start, wide = f"{name}/", _wide(vector)
        of_vector = {
            key.removeprefix(start): code
            for key, code in codes.items()
            if key.rpartition("/")[0] == name
        }
        first = wide[: counted.get(name)]
        after = first + codec.decode(of_vector, first)
        after = torch.cat([after, of_vector[STATISTICS]]) if name in counted else after
        vectors[name] = after.to(vector.dtype)
    return vectors


def codes_like(codec: Codec, before: State, counted: Counted = NO_STATISTICS) -> State:
    """Tensors with the names, shapes and dtypes of the codes of such vectors."""
    return {
        f"{name}/{part}": code
        for name, vector in before.items()
        for part, code in _encode(codec, torch.zeros_like(_wide(vector)), counted.get(name)).items()
    }


def update_bytes(codec: Codec | None, before: State, counted: Counted = NO_STATISTICS) -> int:
    """The size in bytes of an update that replaces these vectors."""
    sent = before if codec is None else codes_like(codec, before, counted)
    return sum(tensor.nbytes for tensor in sent.values())


def initial_residuals(codec: Codec | None, before: State) -> State:
    """An agent's residuals before its first update; empty without error feedback."""
    if codec is None or not codec.feedback:
        return {}
    return {RESIDUAL + name: torch.zeros_like(_wide(vector)) for name, vector in before.items()}


def without_residuals(state: State | None) -> State | None:
    """The part of an agent's state that its algorithm knows; None if there is none."""
    kept = {n: t for n, t in (state or {}).items() if not n.startswith(RESIDUAL)}
    return kept or None


def _encode(codec: Codec, change: Tensor, counted: int | None) -> dict[str, Tensor]:
    """The codes of a change; behind ``counted`` numbers it has statistics instead of changes."""
    if counted is None:
        return codec.encode(change)
    return {**codec.encode(change[:counted]), STATISTICS: change[counted:].clone()}


def _wide(vector: Tensor) -> Tensor:
    return vector.detach().to(torch.promote_types(vector.dtype, torch.float32))
