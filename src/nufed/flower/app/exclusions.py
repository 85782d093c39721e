"""Agents that are excluded from the rest of a run, kept in a sealed file of the run directory.

The file is written as soon as an agent is excluded, not with the next checkpoint: a run that is
killed or fails in the same round does not send it another request when it is resumed.

Sites that can't take part because of their own data or settings, which no retry changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from nufed.errors import TrainingError
from nufed.files import read_sealed, write_sealed
from nufed.flower.app.payload import NoReply, Reply
from nufed.flower.app.plan import Plan
from nufed.lab.runs.federation_records import Exclusion, ExclusionsRecord
from nufed.lab.runs.json_files import checked

LOG = logging.getLogger("nufed")
EXCLUDED = "excluded.json"


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

    def note(self, round: int, replies: Mapping[int, Reply], names: Mapping[int, str]) -> None:
        """Exclude the agents whose reply requires it."""
        for agent, reply in replies.items():
            if isinstance(reply, NoReply) and reply.excluded:
                who = site_label(agent, names)
                LOG.error("%s is excluded from this run: %s", who, reply.reason)
                self.add(agent, round, reply.reason)

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


LISTED = 10  # sites named for each reason


class TooFewSitesError(TrainingError):
    """Too few sites can take part, whatever method is trained."""


class Refusals:
    """The sites that have refused every request so far, and why."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reasons: dict[int, str] = {}
        self._worked: set[int] = set()

    def note(self, replies: Mapping[int, Reply]) -> None:
        """Note the replies of agents."""
        for agent, reply in replies.items():
            if not isinstance(reply, NoReply):
                self._worked.add(agent)
                self._reasons.pop(agent, None)
            elif reply.refused and agent not in self._worked:
                self._reasons[agent] = reply.reason

    def check(self, names: Mapping[int, str]) -> None:
        """Stop the training if the sites that are left can't reach a quorum."""
        plan = self._plan
        needed = max(1, plan.rules.min_updates)
        left = [agent for agent in plan.seen if agent not in self._reasons]
        if len(left) >= needed:
            return
        said = by_reason((site_label(a, names), why) for a, why in sorted(self._reasons.items()))
        raise TooFewSitesError(
            f"{len(left)} of {len(plan.seen)} sites can train, and a round needs {needed} "
            f"({said}); correct the data at these sites, or the configuration, and check each "
            "with `nufed federate check`"
        )


def site_label(agent: int, names: Mapping[int, str]) -> str:
    """A site's number, with its name if it has one.

    >>> site_label(3, {3: "Ward 3"}), site_label(4, {4: "4"})
    ('site 3 (Ward 3)', 'site 4')
    """
    name = names.get(agent, "")
    return f"site {agent}" + (f" ({name})" if name not in ("", str(agent)) else "")


def by_reason(reasons: Iterable[tuple[str, str]]) -> str:
    """Sites with their reasons, each named once; without a reason a site is only named.

    >>> by_reason([("site 0", "late"), ("site 1", ""), ("site 2", "late")])
    'site 0, site 2: late; site 1'
    """
    sites: dict[str, list[str]] = {}
    for who, reason in reasons:
        sites.setdefault(reason, []).append(who)
    return "; ".join(f"{_listed(own)}{reason and f': {reason}'}" for reason, own in sites.items())


def _listed(sites: list[str]) -> str:
    more = len(sites) - LISTED
    return ", ".join(sites[:LISTED]) + (f" and {more} more" if more > 0 else "")
