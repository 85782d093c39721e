"""Networks with early exits: the outputs of each exit, and narrower and shallower sub-networks.

A module has exits if it has two ``nn.ModuleList`` s of equal length, ``stages`` and ``exits``: with
h₀ the inputs, stage j computes features hⱼ = stageⱼ(hⱼ₋₁) and exit j outputs exitⱼ(hⱼ); the
module's own outputs are those of the last exit. Any other module has one exit, its output.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import torch
from torch import Tensor, nn

from nufed.errors import InputError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FirstExits(nn.Module):
    """The outputs of the first ``depth`` exits of a module, stacked: (exits, samples, …).

    Later stages are not computed.
    """

    draws_nothing = True  # its layers may

    def __init__(self, module: nn.Module, depth: int) -> None:
        super().__init__()
        self.module, self.depth = module, depth

    def forward(self, inputs: Tensor) -> Tensor:
        lists = exit_lists(self.module)
        if lists is None:
            return torch.stack([self.module(inputs)])
        features, found = inputs, []
        for stage, leave in islice(zip(*lists, strict=True), self.depth):
            features = stage(features)
            found.append(leave(features))
        return torch.stack(found)


def exit_lists(module: nn.Module) -> tuple[nn.ModuleList, nn.ModuleList] | None:
    """The stages and exits of a module; None if it has none."""
    stages, exits = getattr(module, "stages", None), getattr(module, "exits", None)
    if not isinstance(stages, nn.ModuleList) or not isinstance(exits, nn.ModuleList):
        return None
    if len(stages) != len(exits) or not exits:
        raise InputError(
            f"the model has {len(stages)} stages and {len(exits)} exits: each stage must have one "
            "exit"
        )
    return stages, exits


def exit_number(module: nn.Module) -> int:
    """How many exits a module has."""
    lists = exit_lists(module)
    return 1 if lists is None else len(lists[1])


def first_levels(
    module: nn.Module,
    names: Mapping[str, int],
    shapes: Sequence[Sequence[int]],
    widths: Sequence[Fraction],
    depths: Sequence[int],
) -> Tensor:
    """For every coordinate of the flat vector the first level, from 0, whose sub-network holds it.

    Level l holds the first ⌈widths[l]·n⌉ of the n units of each hidden layer up to exit
    depths[l]; inputs and outputs are never narrowed. No level may be smaller than the one before,
    and the last is the whole network.

    Args:
        module: the network.
        names: the index in ``shapes`` of each tensor of the flat vector.
        shapes: their shapes, in order.
        widths: the share of units, by level; the last is 1.
        depths: the number of exits, by level; the last is that of the module.
    """
    last = len(widths) - 1
    if set(widths) == {Fraction(1)} and len(set(depths)) == 1:
        return torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int8)
    if len(names) > len(shapes):
        raise InputError("the model has tied weights: no layer of it can be made narrower alone")
    layers = _layers(module, dict.fromkeys(name.rpartition(".")[0] for name in names))
    found = []
    for name, place in names.items():
        layer, shape = layers[name.rpartition(".")[0]], shapes[place]
        level = torch.full(tuple(shape), last, dtype=torch.int8)
        for number in reversed(range(last)):
            if layer.stage < depths[number]:
                level[layer.held(shape, widths[number])] = number
        found.append(level.flatten())
    return torch.cat(found)


def narrow_module(module: nn.Module, width: Fraction, depth: int) -> nn.Module:
    """The sub-network of one capacity level: fewer units, and the first exits alone.

    Its parameters are those that :func:`first_levels` says, in the same order.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    names = dict.fromkeys(name.rpartition(".")[0] for name, _ in tensors)
    layers = {} if width == 1 else _layers(module, names)
    module = copy.deepcopy(module)
    for name, own in layers.items():
        layer = module.get_submodule(name)
        for key, p in layer.named_parameters(recurse=False):
            value = p.detach()[own.held(p.shape, width)].clone()
            layer.register_parameter(key, nn.Parameter(value, p.requires_grad))
        for key, b in layer.named_buffers(recurse=False):
            if b.ndim:
                layer.register_buffer(key, b[own.held(b.shape, width)].clone())
    for each in exit_lists(module) or ():
        del each[depth:]
    return FirstExits(module, depth)


@dataclass(frozen=True)
class _StageLayer:
    """A layer with parameters: its stage, and which of its dimensions are units of hidden layers.

    Args:
        stage: its stage, or that of its exit.
        last: whether its units are outputs.
        before: the number of units of the layer before it; 0: it takes the inputs.
    """

    stage: int
    last: bool
    before: int

    def held(self, shape: Sequence[int], width: Fraction) -> tuple[slice, ...]:
        """The part of a tensor of this layer that a network of this width holds."""
        rows = slice(None if self.last else math.ceil(width * shape[0]))
        if len(shape) == 1 or not self.before:
            return (rows,)
        # a linear layer on flattened channels has several columns per channel
        flat = len(shape) == 2 and shape[1] % self.before == 0
        each = shape[1] // self.before if flat else 1
        return rows, slice(math.ceil(width * (shape[1] // each)) * each)


def _layers(module: nn.Module, names: Collection[str]) -> dict[str, _StageLayer]:
    """All layers with parameters by name."""
    one = exit_lists(module) is None
    chains: dict[tuple[str, int], list[str]] = {}
    for name in names:
        kind, number = ("stages", "0") if one else [*name.split("."), "", ""][:2]
        if kind not in ("stages", "exits"):
            raise InputError(
                f"the model's parameters of {name or 'the model itself'} are in none of its "
                "stages and exits, so that it is unknown which exits need them"
            )
        chains.setdefault((kind, int(number)), []).append(name)
    found: dict[str, _StageLayer] = {}
    units = {-1: 0}  # after each stage; before the first one there are inputs
    for kind, stage in sorted(chains, key=lambda key: (key[0] == "exits", key[1])):
        chain = chains[kind, stage]
        before = units[max(n for n in units if n < stage + (kind == "exits"))]
        for name in chain:
            layer = module.get_submodule(name)
            _check(name, layer)
            found[name] = _StageLayer(stage, name == chain[-1] and (one or kind == "exits"), before)
            if isinstance(layer, nn.Linear):
                before = layer.out_features
            elif isinstance(layer, CONVOLUTIONS):
                before = layer.out_channels
        if kind == "stages":
            units[stage] = before
    return found


def _check(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose units can't be removed one by one."""
    fine = isinstance(layer, (nn.Linear, nn.modules.batchnorm._BatchNorm))
    fine = fine or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1)
    if not fine:
        raise InputError(
            f"the model's layer {name or 'that is the model itself'} is a {type(layer).__name__}: "
            "only linear, convolution (without groups) and BatchNorm layers can be made narrower"
        )
