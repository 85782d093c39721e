"""An ``nn.Module`` as a function of one flat parameter vector."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from itertools import accumulate
from typing import get_args

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from nufed.errors import InputError, require
from nufed.objective.batch import AnyBatch, Batch, Inputs
from nufed.objective.exits import exit_number, first_levels
from nufed.objective.modules import (
    ModuleFacts,
    MovedStatistics,
    RunningStats,
    batch_counters,
    call_arguments,
    check_parameters,
    check_tensors,
    holding,
    layers_with_running_stats,
    norm_layers,
    tracked_statistics,
    watched,
)
from nufed.objective.parts import Part, find_part
from nufed.objective.stack import stacked_outputs


class FlatModule:
    """The outputs of a module as a function of its flat parameters w, and the layout of w.

    Arguments and conventions are those of :class:`~nufed.objective.Objective`, which adds the loss
    and its derivatives.
    """

    def __init__(self, module: nn.Module, running_stats: RunningStats = "refuse") -> None:
        require(
            running_stats in get_args(RunningStats),
            "running_stats",
            running_stats,
            f"must be one of {', '.join(get_args(RunningStats))}",
        )
        check_tensors(module)
        self._keepers = layers_with_running_stats(module)
        if self._keepers and running_stats == "refuse":
            raise InputError(
                f"the module has layers with running statistics ({', '.join(self._keepers)}), "
                "which averaging over agents would silently corrupt; use nn.GroupNorm, or pass "
                'running_stats="frozen" to keep the stored statistics fixed, or "tracked" to '
                "train and send them with the parameters"
            )
        self._module = copy.deepcopy(module)
        self._running_stats = running_stats
        parameters = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        check_parameters(module, list(parameters.values()))
        # every name of every parameter (tied weights have several) and its index
        places = {id(p): i for i, p in enumerate(parameters.values())}
        every = self._module.named_parameters(remove_duplicate=False)
        self._names = {n: places[id(p)] for n, p in every if id(p) in places}
        statistics = tracked_statistics(self._module) if running_stats == "tracked" else {}
        self._statistics = {n: len(parameters) + i for i, n in enumerate(statistics)}
        self._names |= self._statistics
        values = [*parameters.values(), *statistics.values()]
        self._shapes = [p.shape for p in values]
        self._sizes = [p.numel() for p in values]
        self._initial = torch.cat([p.detach().reshape(-1) for p in values])
        # tensors of the same shapes that take no memory, for views of a vector
        self._shaped = [self._initial[:0].new_empty(()).expand(shape) for shape in self._shapes]
        for parameter, view in zip(parameters.values(), self._views(self._initial), strict=False):
            parameter.data = view  # the module's parameters take no memory of their own
        self._like = self._initial[:0]
        self._parts: dict[str, Part] = {}
        self._tensors: dict[str, list[int]] = {}
        self._exits: dict[int, nn.Module] = {}
        self._levels: dict[tuple[tuple[Fraction, ...], tuple[int, ...]], Tensor] = {}
        # buffers of the module itself; tracked statistics are passed to it in every call
        buffers = {name for name, _ in self._module.named_buffers()}
        passed = {*statistics, *batch_counters(self._module)} if statistics else set()
        self._has_buffers = bool(buffers - passed)
        self._last_statistics: list[Tensor] = []
        self._moved = MovedStatistics()
        self._known: ModuleFacts | None = None
        # layers that stay in evaluation mode: those with statistics, and those the user froze
        chosen = [n for n, m in module.named_modules() if module.training and not m.training]
        self._always_evaluated = chosen if self._statistics else [*self._keepers, *chosen]
        self._set_training(False)

    @property
    def size(self) -> int:
        """The length of the flat vector."""
        return self._initial.numel()

    @property
    def sizes(self) -> list[int]:
        """The numbers of elements of its parameter tensors, in order."""
        return list(self._sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat vector."""
        return self._like.dtype

    @property
    def names(self) -> list[str]:
        """The names of all tensors of the flat vector; tied ones have several."""
        return list(self._names)

    @property
    def tracks_statistics(self) -> bool:
        """Whether running statistics are coordinates of the flat vector."""
        return bool(self._statistics)

    def counted(self, part: Part | None = None) -> int:
        """How many coordinates of a vector, or of a part of it, are parameters: the first ones.

        Tracked statistics follow them. Batches move these and not gradients, so no norm, clipping,
        proximal term, aggregation rule or codec counts them; all of these ask here.
        """
        number = self.size - sum(self._sizes[i] for i in self._statistics.values())
        return number if part is None else part.below(number)

    def of_parameters(self, direction: Tensor) -> Tensor:
        """A direction in which tracked statistics do not move."""
        if not self._statistics:
            return direction
        own = direction.clone()
        own[..., self.counted() :] = 0
        return own

    def part(self, name: str) -> Part:
        """A named part of the model as an index set of the flat vector.

        ``"head"`` is the last layer with parameters, ``"body"`` the rest, ``"norm"`` all
        normalisation layers, ``"last:2"`` the last two layers with parameters, ``"all"`` everything
        and ``"none"`` nothing; any other name is a pattern of parameter names, such as
        ``"layers.0.*"``. Several may be given, separated by commas; the part is their union.
        Tracked statistics belong to their layers.

        >>> from nufed import Objective
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> objective = Objective(net)
        >>> objective.part("head"), objective.part("0.bias").size
        (Part(name='head', index=slice(8, 11, None), size=3), 2)
        """
        if name not in self._parts:
            ends = list(accumulate(self._sizes, initial=0))
            places = {n: slice(ends[i], ends[i + 1]) for n, i in self._names.items()}
            self._parts[name] = find_part(name, places, self._layers, norm_layers(self._module))
        return self._parts[name]

    def divide(self, name: str) -> tuple[Part, Part]:
        """A part of the model, and the rest of it.

        >>> from nufed import Objective
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> [part.size for part in Objective(net).divide("*.bias")]
        [3, 8]
        """
        part = self.part(name)
        rest = f"all but {name}"
        if rest not in self._parts:
            self._parts[rest] = part.rest(self.size)
        return part, self._parts[rest]

    @property
    def _layers(self) -> list[str]:
        """The names of the layers with parameters; that of the module itself is empty."""
        parameters = [n for n in self._names if n not in self._statistics]
        return list(dict.fromkeys(n.rpartition(".")[0] for n in parameters))

    @property
    def _head_name(self) -> str:
        return self._layers[-1]

    @property
    def head(self) -> nn.Module:
        """The last layer with parameters; its type is valid, its parameter values are not."""
        return self.layer(self._head_name)

    def layer(self, name: str) -> nn.Module:
        """A layer by name; its type is valid, its parameter values are not."""
        return self._module.get_submodule(name)

    @property
    def head_is_shared(self) -> bool:
        """Whether the head shares parameters with other layers (tied weights)."""
        layers = [(place, name.rpartition(".")[0]) for name, place in self._names.items()]
        held = {place for place, layer in layers if layer == self._head_name}
        return any(place in held and layer != self._head_name for place, layer in layers)

    @property
    def exits(self) -> int:
        """The number of exits of the module (:mod:`nufed.objective.exits`)."""
        return exit_number(self._module)

    def first_levels(self, widths: Sequence[Fraction], depths: Sequence[int]) -> Tensor:
        """The first capacity level that holds each coordinate of the vector.

        See :func:`nufed.objective.exits.first_levels`.
        """
        key = tuple(widths), tuple(depths)
        if key not in self._levels:
            levels = first_levels(self._module, self._names, self._shapes, *key)
            self._levels[key] = levels.to(self._like.device)
        return self._levels[key]

    def initial_part(self, part: Part) -> Tensor:
        """A copy of the numbers of a part in the module's parameters."""
        return part.take(self._initial).to(self.dtype, copy=True)

    def initial(self) -> Tensor:
        """A copy of the module's parameters as one flat vector."""
        return self._initial.to(self.dtype, copy=True)

    def module(self, w: Tensor) -> nn.Module:
        """A copy of the module that holds the parameters w, in evaluation mode."""
        self._check_vector(w)
        module = copy.deepcopy(self._module).eval()
        parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        parameters |= dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self._unflatten(w).items():
                parameters[name].copy_(value)
        return module

    def predict(self, w: Tensor, inputs: Inputs) -> Tensor:
        """The module's outputs for ``inputs`` in evaluation mode."""
        self._check_vector(w)
        with torch.no_grad(), self._mode(seed=None):
            return self._outputs(self._views(w), inputs, w.ndim > 1)

    def features(self, w: Tensor, inputs: Inputs) -> Tensor:
        """The head's inputs for ``inputs`` in evaluation mode; not defined for a stack."""
        found = self.layer_inputs(w, inputs, [self._head_name])[self._head_name]
        if len(found) != 1:
            raise InputError(
                f"the model's last layer ({self._head_name or 'the model itself'}) is called "
                f"{len(found)} times: features need a layer that is called once"
            )
        return found[0]

    def layer_inputs(
        self, w: Tensor, inputs: Inputs, layers: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """The inputs of these layers for ``inputs`` in evaluation mode, one tensor per call.

        Not defined for a stack.

        >>> from nufed import Objective
        >>> objective = Objective(nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> x = torch.tensor([[1.0, -1.0]])
        >>> objective.layer_inputs(objective.initial(), x, ["1"])
        {'1': [tensor([[1., 0.]])]}
        """
        found: dict[str, list[Tensor]] = {name: [] for name in layers}
        hooks = [
            self.layer(name).register_forward_pre_hook(
                lambda _, arguments, own=own: own.extend(arguments[:1])
            )
            for name, own in found.items()
        ]
        try:
            self.predict(w, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def track(
        self, w: Tensor, batch: AnyBatch, at: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """w with running statistics updated by a training batch; w itself if it tracks none.

        As in torch: r ← (1 − momentum)·r + momentum·(the batch's statistic), with the parameters
        and statistics r of ``at``, the vector before the step that led to w (w itself by default).
        The statistics in w are ignored. With ``overwrite`` they are written into w itself.
        """
        batch = Batch(*batch)
        if not self._statistics:
            return w
        at = w if at is None else at
        statistics = self._moved.of(at, batch)
        if statistics is None:
            views = [view.clone() for view in self._views(at)]
            if batch.seed is not None:
                with torch.no_grad(), self._mode(batch.seed):
                    self._outputs(views, batch.inputs, stacked=False, moving=True)
            statistics = views[-len(self._statistics) :]
        moved = w if overwrite else w.clone()
        for view, statistic in zip(self._views(moved)[-len(statistics) :], statistics, strict=True):
            view.copy_(statistic)
        return moved

    def _outputs(
        self, views: Sequence[Tensor], inputs: Inputs, stacked: bool, moving: bool = False
    ) -> Tensor:
        facts = self._facts()
        parameters = {name: views[place] for name, place in self._names.items()}
        if self._statistics:  # no gradient flows into them, and layers update them in place
            own = {} if moving else {n: parameters[n].detach().clone() for n in self._statistics}
            self._last_statistics = list(own.values())
            parameters |= own | facts.counters
        arguments, keywords = call_arguments(inputs, self._like)
        if stacked:
            return stacked_outputs(self._module, parameters, arguments, keywords)
        with holding(facts.slots, parameters):
            outputs: Tensor = self._module(*arguments, **keywords)
        return outputs

    def _draws_nothing(self) -> bool:
        """Whether a training pass is known to draw no random numbers."""
        return self._facts().draws_nothing

    def _facts(self) -> ModuleFacts:
        """What calls of the module need to know about it."""
        if self._known is None or self._known.module is not self._module:
            self._known = ModuleFacts.of(self._module, bool(self._statistics))
        return self._known

    def _unflatten(self, w: Tensor) -> dict[str, Tensor]:
        views = self._views(w)
        return {name: views[place] for name, place in self._names.items()}

    def _views(self, w: Tensor) -> list[Tensor]:
        """The parameters in w (or in every row of a stack), as views."""
        if w.ndim == 1 and not w.requires_grad and all(self._sizes):
            return list(_unflatten_dense_tensors(w, self._shaped))  # type: ignore[no-untyped-call]
        # split, not slicing: its backward pass is one concatenation
        parts = torch.split(w, self._sizes, dim=-1)
        shapes = [(*w.shape[:-1], *shape) for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _check_vector(self, w: Tensor) -> None:
        if w.ndim not in (1, 2) or w.shape[-1] != self.size or w.dtype != self.dtype:
            raise InputError(
                f"w has shape {tuple(w.shape)} and dtype {w.dtype}: this objective takes a flat "
                f"vector of {self.size} numbers of dtype {self.dtype}, as initial() gives"
            )

    def _mode(self, seed: int | None) -> AbstractContextManager[None]:
        """Evaluation mode without a seed; with one, training mode with random draws from it."""
        if self._module.training != (seed is not None):
            self._set_training(seed is not None)
        plain = seed is None or self._draws_nothing()
        if plain and not self._has_buffers:
            return nullcontext()
        return watched(self._module, self._has_buffers, None if plain else seed, self._like.device)

    def _set_training(self, training: bool) -> None:
        self._module.train(training)
        for name in self._always_evaluated:
            self._module.get_submodule(name).training = False
