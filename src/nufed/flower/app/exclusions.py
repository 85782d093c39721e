"""Agents that are excluded from the rest of a run, kept in a sealed file of the run directory.

The file is written as soon as an agent is excluded, not with the next checkpoint: a run that is
killed or fails in the same round does not send it another request when it is resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from flwr.app import RecordDict

from nufed.files import read_sealed, write_sealed
from nufed.flower.app.refusals import site_label
from nufed.runs.federation_records import Exclusion, ExclusionsRecord
from nufed.runs.records import checked

LOG = logging.getLogger("nufed")
EXCLUDED = "excluded.json"


class Excluding(str):
    """A reason for which a site is excluded from the rest of a run."""

    __slots__ = ()


class Exclusions:
    """Why agents are excluded.

    Args:
        folder: the run directory; None: kept in memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder and folder / EXCLUDED
        self._agents: dict[int, Exclusion] = {}
        if self._path and self._path.exists():
            record = checked(ExclusionsRecord, read_sealed(self._path).about, self._path)
            self._agents = {int(agent): found for agent, found in record.agents.items()}

    def note(
        self, round: int, replies: Mapping[int, RecordDict | str], names: Mapping[int, str]
    ) -> None:
        """Exclude the agents whose reply requires it."""
        for agent, reply in replies.items():
            if isinstance(reply, Excluding):
                LOG.error("%s is excluded from this run: %s", site_label(agent, names), reply)
                self.add(agent, round, reply)

    def add(self, agent: int, round: int, reason: str) -> None:
        """Exclude an agent from now on."""
        self._agents[agent] = Exclusion(round=round, reason=reason)
        if self._path:
            agents = {str(agent): found for agent, found in sorted(self._agents.items())}
            write_sealed(self._path, ExclusionsRecord(agents=agents).model_dump())

    def reason(self, agent: int) -> str | None:
        """Why an agent is excluded; None if it is not."""
        found = self._agents.get(agent)
        return f"excluded since round {found.round}: {found.reason}" if found else None
