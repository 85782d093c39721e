"""Named parts of a model (head, body, layers) as index sets of the flat vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from nufed.errors import InputError

HEAD, BODY, NORM, ALL, NONE = PARTS = "head", "body", "norm", "all", "none"
FEW_SPANS = 512
LAST = "last:"  # followed by a number of layers


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

    def take(self, w: Tensor) -> Tensor:
        """The values of this part; for a stack, row by row."""
        if self._spans:
            return torch.cat([w[..., span] for span in self._spans], dim=-1)
        return w[..., self.index]

    def keep(self, w: Tensor) -> Tensor:
        """The same to be kept when w is not: a copy, unless they are most of w."""
        own = self.take(w)
        return own.clone() if self.contiguous and 2 * self.size < w.shape[-1] else own

    def put(self, w: Tensor, values: Tensor) -> Tensor:
        """A copy of w with these values in this part."""
        changed = w.clone()
        self.fill(changed, values)
        return changed

    def fill(self, w: Tensor, values: Tensor) -> None:
        """Replace the values of this part in w itself."""
        if not self._spans:
            w[..., self.index] = values
            return
        parts = torch.split(values, [span.stop - span.start for span in self._spans], dim=-1)
        for span, part in zip(self._spans, parts, strict=True):
            w[..., span] = part

    @classmethod
    def where(cls, mask: Tensor) -> Part:
        """The coordinates at which a mask is true.

        >>> Part.where(torch.tensor([False, True, True])).index
        slice(1, 3, None)
        """
        places = mask.nonzero().flatten()
        return cls("", _compact(places), len(places))

    @cached_property
    def _spans(self) -> list[slice]:
        """The slices that it consists of, if these are few but more than one: faster to copy."""
        if isinstance(self.index, slice):
            return []
        ends = (self.index.diff() > 1).nonzero().flatten().tolist()
        if len(ends) >= FEW_SPANS:
            return []
        bounds = [-1, *ends, len(self.index) - 1]
        return [slice(int(self.index[a + 1]), int(self.index[b]) + 1) for a, b in pairwise(bounds)]

    def only(self, w: Tensor) -> Tensor:
        """A copy of w with zeros outside this part."""
        return self.put(torch.zeros_like(w), self.take(w))

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
    found = [n for n in places if fnmatchcase(n, name)]
    if not found:
        raise InputError(
            f"part = {name!r}: no parameter of the model is in it; there are "
            f"{', '.join(places)}, and the parts {', '.join(PARTS)} and {LAST}2"
        )
    return found


def _compact(places: Tensor) -> slice | Tensor:
    """Ascending indices, as a slice if they are contiguous."""
    if not len(places):
        return slice(0, 0)
    start, stop = int(places[0]), int(places[-1]) + 1
    return slice(start, stop) if stop - start == len(places) else places
