"""Recurrent models, for sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor, nn

from nufed.errors import InputError, require, require_whole


def lstm(
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (256, 256),
    vocabulary: int | None = None,
    embedding: int = 8,
    next_token: bool = False,
) -> nn.Module:
    """LSTM for sequences of tokens or of vectors; the last step's state gives the outputs.

    With ``vocabulary``, inputs are token identifiers 0 … vocabulary − 1 (whole numbers) of shape
    (length,), which are embedded first; the defaults are then the layers of McMahan et al. (2017)
    for characters. Without, they are floating-point: (length, features), or (length,) with one
    feature. An image (height, width) is a sequence of its rows.

    Args:
        input_shape: of one input.
        outputs: of the last, linear layer.
        hidden: units of every layer.
        vocabulary: the number of tokens.
        embedding: numbers per token.
        next_token: every step's state gives one output per token of the vocabulary.

    >>> lstm((80,), 90, vocabulary=90)(torch.zeros(2, 80, dtype=torch.long)).shape
    torch.Size([2, 90])
    >>> lstm((80,), 80, vocabulary=90, next_token=True)(torch.zeros(2, 80, dtype=torch.long)).shape
    torch.Size([2, 80, 90])
    """
    return _recurrent(
        "lstm", _LSTMLayer, input_shape, outputs, hidden, vocabulary, embedding, next_token
    )


def gru(
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (64,),
    vocabulary: int | None = None,
    embedding: int = 16,
    next_token: bool = False,
) -> nn.Module:
    """GRU (Cho et al. 2014) for sequences of tokens or of vectors; arguments as of ``lstm``.

    >>> gru((80,), 80, vocabulary=65, next_token=True)(torch.zeros(2, 80, dtype=torch.long)).shape
    torch.Size([2, 80, 65])
    """
    return _recurrent(
        "gru", _GRULayer, input_shape, outputs, hidden, vocabulary, embedding, next_token
    )


def _recurrent(
    name: str,
    layer: Callable[[int, int], nn.Module],
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int],
    vocabulary: int | None,
    embedding: int,
    next_token: bool,
) -> nn.Module:
    """A model of recurrent layers; a shape that is no sequence is refused."""
    shape = tuple(input_shape)
    require(len(hidden) > 0, "hidden", hidden, "must list the units of at least one layer")
    if len(shape) not in (1, 2) or (vocabulary is not None and len(shape) != 1):
        raise InputError(
            f"model {name} needs sequences, and the data has shape {shape}: give (length,) or "
            "(length, features) of floating-point numbers or, with model.args.vocabulary, "
            "(length,) of token identifiers"
        )
    if vocabulary is None:
        if next_token:
            raise InputError(
                f"model {name} with next_token needs the number of tokens: set "
                "model.args.vocabulary"
            )
        features = shape[1] if len(shape) == 2 else 1
        return _Sequences(layer, None, features, hidden, outputs)
    require_whole(vocabulary=vocabulary)
    if next_token:
        return _Sequences(layer, vocabulary, embedding, hidden, vocabulary, every_step=True)
    return _Sequences(layer, vocabulary, embedding, hidden, outputs)


class _Sequences(nn.Module):
    """An embedding if there are tokens, recurrent layers, a linear layer on the last state or, with
    ``every_step``, on all of them."""

    def __init__(
        self,
        layer: Callable[[int, int], nn.Module],
        vocabulary: int | None,
        features: int,
        hidden: Sequence[int],
        outputs: int,
        every_step: bool = False,
    ) -> None:
        super().__init__()
        self.every_step = every_step
        self.embed = None if vocabulary is None else nn.Embedding(vocabulary, features)
        self.layers = nn.ModuleList(layer(i, o) for i, o in pairwise([features, *hidden]))
        self.head = nn.Linear(hidden[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self._embedded(self.embed, x)
        elif x.ndim == 2:
            x = x.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x if self.every_step else x[:, -1])
        return y

    def _embedded(self, embed: nn.Embedding, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise InputError(
                f"a recurrent model with a vocabulary needs token identifiers (whole numbers), and "
                f"the inputs are {x.dtype}: give int64 inputs, or leave vocabulary out"
            )
        try:
            vectors: Tensor = embed(x.long())
        except IndexError:
            raise InputError(
                f"an input has a token outside of the vocabulary, 0 … {embed.num_embeddings - 1}: "
                "set model.args.vocabulary to the number of tokens"
            ) from None
        return vectors


class _GRULayer(nn.Module):
    """A GRU over (samples, length, features), from plain operations as :class:`_LSTMLayer`.

    Weights are initialised as in ``nn.GRU``, whose formulas these are.
    """

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.input = nn.Linear(features, 3 * units)
        self.state = nn.Linear(units, 3 * units)
        bound = 1 / sqrt(units)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        inputs, states = self.input(x), []
        hidden = x.new_zeros(len(x), self.units)
        for step in range(x.shape[1]):
            new, old = (each.chunk(3, dim=1) for each in (inputs[:, step], self.state(hidden)))
            reset, keep = ((a + b).sigmoid() for a, b in zip(new[:2], old[:2], strict=True))
            candidate = (new[2] + reset * old[2]).tanh()
            hidden = candidate + keep * (hidden - candidate)
            states.append(hidden)
        return torch.stack(states, dim=1)


class _LSTMLayer(nn.Module):
    """An LSTM over (samples, length, features), from plain operations.

    ``nn.LSTM`` has no second derivatives where it is fused, which the exact meta-gradient needs.
    The bias of the forget gate starts at 1, other weights as in ``nn.LSTM``.
    """

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.input = nn.Linear(features, 4 * units)
        self.state = nn.Linear(units, 4 * units, bias=False)
        bound = 1 / sqrt(units)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        nn.init.ones_(self.input.bias.data[units : 2 * units])

    def forward(self, x: Tensor) -> Tensor:
        inputs, states = self.input(x), []
        hidden = cell = x.new_zeros(len(x), self.units)
        for step in range(x.shape[1]):
            gates = inputs[:, step] + self.state(hidden)
            admit, forget, change, show = gates.chunk(4, dim=1)
            cell = forget.sigmoid() * cell + admit.sigmoid() * change.tanh()
            hidden = show.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, dim=1)
