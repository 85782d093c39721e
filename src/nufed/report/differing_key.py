"""The configuration key by which runs differ, if it is one, and their scores by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nufed.report.by_key import KeyedScore, KeyValue
from nufed.runs import Run

IGNORED = (
    "name",
    "note",
    "workers",
    "threads",
    "engine",
    "checkpoint_every",
    "save_every",
    "eval_every",
)


def one_differing_key(runs: Sequence[Run]) -> str:
    """The only key whose values differ between runs; empty if none or several do.

    Keys that don't change results are ignored. A setting that several methods have, with one value
    in each run, counts as one key.
    """
    flat = [dict(_flat(run.config.model_dump())) for run in runs]
    keys = {key for own in flat for key in own if key.split(".")[0] not in IGNORED}
    differing = {key for key in keys if len({repr(own.get(key)) for own in flat}) > 1}
    shared = {key for key in differing if key.startswith(("method.", "methods."))}
    settings = {key.rpartition(".")[2] for key in shared}
    if len(shared) > 1 and shared == differing and len(settings) == 1:
        single = [len({repr(own[key]) for key in shared if key in own}) == 1 for own in flat]
        return f"method.{settings.pop()}" if all(single) else ""
    return differing.pop() if len(differing) == 1 else ""


def keyed_scores(runs: Sequence[Run], key: str, group: str) -> list[KeyedScore]:
    """The scores of every method and null baseline, with the value of the key in its run."""
    return [
        KeyedScore(
            {key: value_of(run, key)},
            row.name,
            row.personal.mean,
            row.personal.half_width,
            row.kind == "baseline",
        )
        for run in runs
        for row in run.rows()
        if row.group == group
    ]


def value_of(run: Run, key: str) -> KeyValue:
    """The value of a key in a run's configuration; what is not a number is shown as text."""
    flat = dict(_flat(run.config.model_dump()))
    settings = (flat[k] for k in flat if k.endswith("." + key.rpartition(".")[2]))
    value = flat[key] if key in flat else next(settings, None)
    return value if isinstance(value, bool | int | float | str) else str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested tables, joined by dots."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
