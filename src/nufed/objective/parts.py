"""Named parts of a model (head, body, layers) as index sets of the flat vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nufed.errors import InputError

HEAD, BODY, NORM, ALL, NONE = PARTS = "head", "body", "norm", "all", "none"
FEW_BLOCKS, MANY_ROWS, LONG = 256, 2**16, 2**15
LAST = "last:"  # followed by a number of layers
SHOWN = 12  # names of parameters in a message


class Block(NamedTuple):
    """Equally long rows of contiguous coordinates at equal distances, as columns of a matrix."""

    start: int
    rows: int
    length: int
    stride: int

    def with_row(self, start: int, length: int) -> Block | None:
        """The block with one more row; None if that is no block."""
        stride = start - self.start if self.rows == 1 else self.stride
        fits = length == self.length and start == self.start + self.rows * stride
        return Block(self.start, self.rows + 1, length, stride) if fits else None


@dataclass(frozen=True)
class Part:
    """Some coordinates of the flat vector: a slice where they are contiguous, else their indices.

    >>> part = Part("bias", slice(1, 3), size=2)
    >>> part.take(torch.arange(4.0)), part.put(torch.arange(4.0), torch.zeros(2))
    (tensor([1., 2.]), tensor([0., 0., 0., 3.]))
    """

    name: str
    index: slice | Tensor
    size: int

    @property
    def contiguous(self) -> bool:
        """Whether it is one slice, of which :meth:`take` gives a view."""
        return isinstance(self.index, slice)

    def below(self, number: int) -> int:
        """How many of its coordinates are among the first ``number`` of the vector."""
        if isinstance(self.index, slice):
            return len(range(self.size)[: max(0, number - self.index.start)])
        return int((self.index < number).sum())

    def take(self, w: Tensor) -> Tensor:
        """The values of this part; for a stack, row by row."""
        if not self._blocks:
            return w[..., self._index_on(w.device)]
        if self._bounds:
            return torch.cat(self._views(w), dim=-1)
        values = w.new_empty(*w.shape[:-1], self.size)
        torch._foreach_copy_(self._split(values), self._views(w))
        return values

    def keep(self, w: Tensor) -> Tensor:
        """The values of this part, copied where a view would keep a much larger w in memory."""
        values = self.take(w)
        return values.clone() if self.contiguous and 2 * self.size < w.shape[-1] else values

    def put(self, w: Tensor, values: Tensor) -> Tensor:
        """A copy of w with these values in this part."""
        if isinstance(self.index, slice) and values.shape[:-1] == w.shape[:-1]:
            before, after = w[..., : self.index.start], w[..., self.index.stop :]
            return torch.cat([before, values, after], dim=-1)
        changed = w.clone()
        self.fill(changed, values)
        return changed

    def fill(self, w: Tensor, values: Tensor) -> None:
        """Replace the values of this part in w itself."""
        if not self._blocks:
            w[..., self._index_on(w.device)] = values
            return
        torch._foreach_copy_(self._views(w), self._split(values))

    @classmethod
    def where(cls, mask: Tensor) -> Part:
        """The coordinates at which a mask is true.

        >>> Part.where(torch.tensor([False, True, True])).index
        slice(1, 3, None)
        """
        places = mask.cpu().nonzero().flatten()
        return cls("", _compact(places), len(places))

    @cached_property
    def pieces(self) -> list[Part]:
        """Its long contiguous pieces, of which :meth:`take` gives views, and the rest of it."""
        long = [b for b in self._blocks if b.rows == 1 and b.length >= LONG]
        if not long or isinstance(self.index, slice):
            return [self]
        inside = torch.zeros(int(self.index[-1]) + 1, dtype=torch.bool)
        inside[self.index] = True
        parts = []
        for block in long:
            span = slice(block.start, block.start + block.length)
            inside[span] = False
            parts.append(Part("", span, block.length))
        return [*parts, Part.where(inside)]

    def _index_on(self, device: torch.device) -> slice | Tensor:
        """Its index on the device of a vector, copied there once."""
        if isinstance(self.index, slice) or device.type == "cpu":
            return self.index
        if device not in self._copies:
            self._copies[device] = self.index.to(device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def _blocks(self) -> list[Block]:
        """The blocks that it consists of, if these are few: faster to copy than by index."""
        if isinstance(self.index, slice):
            return []
        first = torch.cat([torch.tensor([True]), self.index.diff() > 1])
        if int(first.sum()) > MANY_ROWS:
            return []
        starts = self.index[first].tolist()
        lengths = torch.bincount(first.cumsum(0) - 1).tolist()
        blocks: list[Block] = []
        for start, length in zip(starts, lengths, strict=True):
            if blocks and (longer := blocks[-1].with_row(start, length)):
                blocks[-1] = longer
            else:
                blocks.append(Block(start, 1, length, length))
        return blocks if len(blocks) < FEW_BLOCKS else []

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Where its blocks start and end, if each is one row."""
        if any(block.rows > 1 for block in self._blocks):
            return ()
        return tuple(n for block in self._blocks for n in (block.start, block.start + block.length))

    def _split(self, values: Tensor) -> list[Tensor]:
        """The numbers of each block in values of this part."""
        parts = torch.split(values, [block.rows * block.length for block in self._blocks], dim=-1)
        if self._bounds:
            return list(parts)
        pairs = zip(parts, self._blocks, strict=True)
        return [part.view(*part.shape[:-1], block.rows, block.length) for part, block in pairs]

    def _views(self, w: Tensor) -> list[Tensor]:
        """The blocks in w."""
        if self._bounds:
            return list(torch.tensor_split(w, self._bounds, dim=-1)[1::2])
        *others, along = w.stride()
        return [
            w.as_strided(
                (*w.shape[:-1], block.rows, block.length),
                (*others, along * block.stride, along),
                w.storage_offset() + along * block.start,
            )
            for block in self._blocks
        ]

    def only(self, w: Tensor) -> Tensor:
        """A copy of w with zeros outside this part."""
        masked = torch.zeros_like(w)
        self.fill(masked, self.take(w))
        return masked

    def rest(self, size: int) -> Part:
        """All other coordinates of a vector of length ``size``.

        >>> Part("bias", slice(1, 3), size=2).rest(4).take(torch.arange(4.0))
        tensor([0., 3.])
        """
        others = torch.ones(size, dtype=torch.bool)
        others[self.index] = False
        places = others.nonzero().flatten()
        return Part(f"all but {self.name}", _compact(places), len(places))


def find_part(
    name: str, places: Mapping[str, slice], layers: Sequence[str], norms: Collection[str]
) -> Part:
    """The part given by a name or a pattern of parameter names.

    Args:
        name: one of ``PARTS``, ``"last:2"`` for the last two layers with parameters, a pattern of
            parameter names with ``*`` and ``?``, such as ``"layers.0.*"``, or several of these,
            separated by commas.
        places: the slice of every tensor in the vector, by name, in order; tied parameters have
            the same slice under several names.
        layers: the layers with parameters, in order; the last is the head.
        norms: the normalisation layers.
    """
    chosen = {n for each in name.split(",") for n in _names(each.strip(), places, layers, norms)}
    return part_of(name, sorted({(places[n].start, places[n].stop) for n in chosen}))


def support(vector: Tensor, sizes: Sequence[int]) -> Part | None:
    """The tensors of these sizes in which a vector is not 0 everywhere; None if these are all.

    >>> support(torch.tensor([0.0, 0.0, 1.0]), sizes=[2, 1]).index
    slice(2, 3, None)
    """
    ends = list(accumulate(sizes, initial=0))
    pieces = torch.split(vector, list(sizes))
    moved = [i for i, piece in enumerate(pieces) if bool(piece.any())]
    if len(moved) == len(sizes):
        return None
    return part_of("", [(ends[i], ends[i + 1]) for i in moved])


def part_of(name: str, spans: Sequence[tuple[int, int]]) -> Part:
    """The part that holds these spans of the vector, given in ascending order."""
    every = [torch.arange(start, stop) for start, stop in spans]
    index = _compact(torch.cat(every)) if every else slice(0, 0)
    return Part(name, index, sum(map(len, every)))


def _names(
    name: str, places: Mapping[str, slice], layers: Sequence[str], norms: Collection[str]
) -> list[str]:
    """The names of the tensors that one name or pattern selects."""
    layer_of = {n: n.rpartition(".")[0] for n in places}
    if name in (HEAD, BODY) or (name.startswith(LAST) and name.removeprefix(LAST).isdecimal()):
        number = int(name.removeprefix(LAST)) if name.startswith(LAST) else 1
        last = layers[max(0, len(layers) - number) :]
        held = {places[n].start for n in places if layer_of[n] in last}
        return [n for n in places if (places[n].start in held) != (name == BODY)]
    if name == NORM:
        return [n for n in places if layer_of[n] in norms]
    if name in (ALL, NONE):
        return list(places) if name == ALL else []
    chosen = [n for n in places if fnmatchcase(n, name)]
    if not chosen:
        few = [*places] if len(places) <= SHOWN else [*list(places)[:SHOWN], "…"]
        raise InputError(
            f"part = {name!r}: no parameter of the model is in it; there are "
            f"{', '.join(few)}, and the parts {', '.join(PARTS)} and {LAST}2"
        )
    return chosen


def _compact(places: Tensor) -> slice | Tensor:
    """Ascending indices, as a slice if they are contiguous."""
    if not len(places):
        return slice(0, 0)
    start, stop = int(places[0]), int(places[-1]) + 1
    return slice(start, stop) if stop - start == len(places) else places
