"""Placeholder for an algorithm that was given in Python, when a run is only read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nufed.algorithms.protocol import AgentContext, AgentResult, Algorithm, State
from nufed.errors import InputError
from nufed.objective import AnyObjective


@dataclass(frozen=True)
class GivenInPython(Algorithm):
    """An algorithm of which only the settings are known."""

    settings: Mapping[str, Any]

    newcomer: ClassVar[str] = "does what its class defines, which was given in Python"

    def __getattr__(self, name: str) -> Any:
        """A setting, as the algorithm itself would give it."""
        if name.startswith("_") or name not in self.settings:
            raise AttributeError(name)
        return self.settings[name]

    @property
    def batch_size(self) -> int:
        return int(self.settings.get("batch_size", 1))

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        raise InputError("this method was given in Python: pass its algorithm again (methods=…)")

    def shipped(self, objective: AnyObjective, received: State) -> None:
        return None

    def describe(self) -> dict[str, str]:
        return {"algorithm": "given in Python", **{k: str(v) for k, v in self.settings.items()}}
