"""What the catalogue holds, from the registries, schema and algorithms themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic.fields import FieldInfo
from torch import nn

from nufed.algorithms import ALGORITHMS, Algorithm
from nufed.algorithms.aggregation import AGGREGATIONS
from nufed.algorithms.protocol import defines
from nufed.data import PARTITIONS, SHIFTS
from nufed.data.augmentation import AUGMENTATIONS
from nufed.errors import InputError
from nufed.evaluate import METRICS
from nufed.lab.cli.catalogue import Listing
from nufed.lab.config import presets
from nufed.lab.config.describe import described_by_key, every_setting, known_settings
from nufed.lab.config.load import known_fields
from nufed.lab.config.problem import LOSSES
from nufed.lab.readers.sources import SOURCES
from nufed.meta.curvature import CURVATURES
from nufed.models import MODELS
from nufed.objective import Objective
from nufed.registry import import_named, is_code
from nufed.server import initial_server, to_send
from nufed.simulation import ENGINES
from nufed.simulation.faults import ATTACKS


def listing() -> Listing:
    """All names that a configuration accepts, by kind, with a one-line description."""
    return {
        "presets": presets(),
        "datasets": _lines(SOURCES),
        "partitions": _lines(PARTITIONS),
        "shifts": _lines(SHIFTS),
        "models": _lines(MODELS),
        "algorithms": _lines(ALGORITHMS),
        "curvatures": _lines(CURVATURES),
        "aggregations": _lines(AGGREGATIONS),
        "attacks": _lines(ATTACKS),
        "engines": {str(name): kind.about for name, kind in ENGINES.items()},
        "configuration keys": {
            **{key: _describe(field) for key, field in value_fields().items()},
            "data.partition": _describe(value_fields()["data.partition"], PARTITIONS),
            "faults.attack": _describe(value_fields()["faults.attack"], ATTACKS),
            **{f"method.{key}": text for key, text in known_settings().items()},
        },
    }


def about(name: str) -> Listing:
    """One algorithm with its settings; a ``package.module:Class`` is imported."""
    if is_code(name):
        import_named("algorithm", name)
    cls = ALGORITHMS.find("algorithm", name)
    title = f"{name}: {_first_line(cls)}"
    return {
        title: {
            "a newcomer": cls.notes.newcomer,
            "agents keep": _kept(cls),
            "the optimiser drives": cls.notes.optimized,
            "shown after": "the run's number of fine-tuning steps"
            if cls.notes.shown_steps is None
            else f"{cls.notes.shown_steps} fine-tuning steps",
            "its paper weighs agents": "equally"
            if cls.notes.averaging == "uniform"
            else "by their samples",
        },
        "settings": described_by_key(cls),
    }


def _kept(cls: type[Algorithm]) -> str:
    """The names of the tensors in an agent's state, determined on a tiny model."""
    if not defines(cls, "agent_init"):
        return "nothing between rounds"
    try:
        objective, algorithm = Objective(nn.Linear(1, 1), nn.functional.mse_loss), cls()
        server = initial_server(algorithm, objective, torch.zeros(objective.size))
        state = algorithm.agent_init(objective, to_send(algorithm, server))
    except Exception:  # settings without defaults, or an unsuitable model
        return "a state"
    return ", ".join(state) or "nothing between rounds"


def values() -> dict[str, list[str]]:
    """The values of every configuration key that have names; of numbers the default."""
    by_key = {key: _field_values(field) for key, field in value_fields().items()}
    by_key |= {f"method.{name}": [] for name in known_settings()}
    for cls in ALGORITHMS.working().values():
        for setting, _ in every_setting(cls):
            known = by_key[f"method.{setting.name}"]
            known += [value for value in setting.values() if value not in known]
    return by_key | {key: list(names) for key, names in _names().items()}


def _names() -> dict[str, Iterable[str]]:
    """The values of keys that are names."""
    return {
        "data.source": SOURCES,
        "data.partition": ("auto", *PARTITIONS),
        "data.shift": ("none", *SHIFTS),
        "data.augment": ("none", *AUGMENTATIONS),
        "model.name": MODELS,
        "loss": ("auto", *LOSSES),
        "metric": ("auto", *METRICS),
        "method.algorithm": ALGORITHMS,
        "faults.attack": ATTACKS,
    }


def _field_values(field: FieldInfo) -> list[str]:
    if field.annotation is bool:
        return ["true", "false"]
    default = field.get_default()
    plain = isinstance(default, int | float | str)
    return [str(value) for value in choices_of(field.annotation)] or [str(default)] * plain


def value_fields() -> dict[str, FieldInfo]:
    """The keys of values, without those of tables."""
    fields = dict(known_fields())
    return {
        key: field
        for key, field in fields.items()
        if key != "methods" and not any(k.startswith(f"{key}.") for k in fields)
    }


def _describe(field: FieldInfo, names: Iterable[str] = ()) -> str:
    """What a configuration key means, its choices (or known ``names``) and its default."""
    choices = choices_of(field.annotation) or names
    words = [field.description or "", " | ".join(map(str, choices))]
    return f"{' '.join(w for w in words if w)} (default {field.get_default()!r})".strip()


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, or of a union of nothing else."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if any(get_origin(kind) is not Literal for kind in kinds):
        return ()
    return tuple(value for kind in kinds for value in get_args(kind))


def _lines(known: Mapping[str, Any]) -> dict[str, str]:
    """The first line of each docstring, or the import error."""
    lines = {}
    for name in known:
        try:
            lines[name] = _first_line(known[name])
        except InputError as error:
            lines[name] = str(error)
    return lines


def _first_line(thing: Any) -> str:
    return ((thing.__doc__ or "").strip().splitlines() or [""])[0].replace("``", "")
