"""One-sentence error messages for invalid settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nufed.errors import shown
from nufed.registry import closest

_BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


def sentence(error: ValidationError, known: Iterable[str], fields: Mapping[str, FieldInfo]) -> str:
    """The first of pydantic's validation errors as a sentence.

    ``known`` are candidates for a misspelt key; ``fields`` give the allowed ranges.
    """
    errors = [(_key(e), e) for e in error.errors(include_url=False)]
    key, first = errors[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {shown(key)}" + (
            suggest_key(key, known) or "; `nufed list` shows all keys"
        )
    if first["type"] in ("invalid_key", "string_unicode"):
        return f"{shown(first['input'])} in {shown(key) if key else 'the settings'} is not text"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    # a union reports one error per member: any of them is allowed
    reasons = [_reason(e, fields.get(key)) for k, e in errors if k == key]
    name = key if key.isprintable() and len(key) < 200 else shown(key)
    return f"{name} = {shown(first['input'])}: must be {' or '.join(dict.fromkeys(reasons))}"


def suggest_key(given: str, known: Iterable[str]) -> str:
    """The known key that a misspelt one likely means, as the end of a sentence; empty if none is
    close.

    Looks for a close last part in the same table (of a key without one: at the top, then in all),
    or in all if it names no known one; then for the same last part in another table.

    >>> suggest_key("data.agent", ["rounds", "data.agents"])
    "; did you mean 'data.agents'?"
    >>> suggest_key("data.qqq", ["rounds", "data.agents"])
    ''
    """
    keys, (table, _, last) = list(known), given.rpartition(".")
    inside = [key for key in keys if key.startswith(f"{table}.")] if table else keys
    top = closest(last, [key for key in keys if "." not in key]) if not table else None
    by_last: dict[str, list[str]] = {}
    for key in inside or keys:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    close = [top] if top else by_last.get(closest(last, by_last) or "", [])
    close = close or [key for key in keys if key.rpartition(".")[2] == last]
    nearest = difflib.get_close_matches(given, close, n=1, cutoff=0)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _key(error: Any) -> str:
    """The dotted key of an error, without the member of a union that pydantic appends."""
    *outer, last = (str(p) for p in error["loc"] or ("",))
    members = ("float", "int", "constrained-int", "[key]")
    is_key = error["type"] in ("extra_forbidden", "invalid_key") or outer == ["methods"]
    member = last in members or last.startswith("literal[")
    return ".".join(outer if member and not is_key else [*outer, last])


def _reason(error: Any, field: FieldInfo | None) -> str:
    limits = field.metadata if field else []
    bounds = [_BOUNDS[k].format(getattr(m, k)) for m in limits for k in _BOUNDS if hasattr(m, k)]
    match error["type"]:
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" if bounds:
            return "a number " + " and ".join(bounds)
        case "string_pattern_mismatch":
            return "made of letters, digits, '.', '-' and '_'"
        case "model_type" | "dict_type":
            return "a table"
        case "too_short":
            return "a list of at least one value"
        case "value_error":
            return str(error["ctx"]["error"])
    return str(error["msg"]).removeprefix("Input should be ")
