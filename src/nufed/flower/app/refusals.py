"""Sites that can't take part because of their own data or settings, which no retry changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import RecordDict

from nufed.errors import TrainingError
from nufed.flower.app.plan import Plan

LISTED = 10  # sites named for each reason


class Refusal(str):
    """Why a site can't take part, in its own words: its data or settings can't be used."""

    __slots__ = ()


class TooFewSitesError(TrainingError):
    """Too few sites can take part, whatever method is trained."""


class Refusals:
    """The sites that have refused every request so far, and why."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reasons: dict[int, str] = {}
        self._worked: set[int] = set()

    def note(self, replies: Mapping[int, RecordDict | str]) -> None:
        """Note the replies of agents."""
        for agent, reply in replies.items():
            if not isinstance(reply, str):
                self._worked.add(agent)
                self._reasons.pop(agent, None)
            elif isinstance(reply, Refusal) and agent not in self._worked:
                self._reasons[agent] = reply

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
