"""The settings of a run and one of its methods as text, for tools that list parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nufed.config import Config
from nufed.settings import settings_of, text_of


def settings_of_method(config: Config, method: str) -> dict[str, str]:
    """The configuration by dotted key, and the method's own settings under ``method.``.

    >>> from nufed.config import load_config
    >>> found = settings_of_method(load_config({"methods": {"fedavg": {}}}), "fedavg")
    >>> found["method"], found["rounds"], found["data.source"], found["method.local_steps"]
    ('fedavg', '100', 'digits', '4')
    """
    algorithm = config.algorithms()[method]
    own = {
        f"method.{field.name}": text_of(field, getattr(algorithm, field.name))
        for field in settings_of(type(algorithm))
    }
    shared = _flat(config.model_dump(exclude={"method", "methods", "workers"}, exclude_none=True))
    return {"method": method, "method.algorithm": type(algorithm).__name__, **dict(shared), **own}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)
