"""The server's privacy account: charges rounds and updates, refuses a round over the budget.

Every noisy update that arrives is charged, also one that is then rejected. One that arrives after
the deadline is charged with the next of its site, which reports the site's release count. A site
that reports more updates than it was sent requests is named, and charged with the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from nufed.flower.app.payload import RELEASE, read_release
from nufed.flower.app.privacy import Ledger, Privacy, check_round

LOG = logging.getLogger("nufed")
HOLDS_FOR = {
    "released": "anyone who sees the models of all rounds but not the cohorts; neighbours differ "
    "in the data of one site. Assumes a trusted server, and that every site adds its noise.",
    "server": "the server and anyone who reads its traffic; neighbours differ in the data of one "
    "site, here the one with most updates. Assumes no one else.",
}
SUMMED = (
    "the server, which sees sums of at least {} updates by secure aggregation; neighbours differ "
    "in the data of one site, here the one with most updates. Assumes that every site adds its "
    "noise and none colludes with the server."
)


class Account:
    """The privacy spent by a training.

    Args:
        privacy: clipping, noise and budgets.
        agents: number of agents in training.
        cohort: number of agents picked per round.
        record: :meth:`as_json` from the checkpoint that training resumes from; None: a new run.
        who: names the site of an agent in the log.
    """

    def __init__(
        self,
        privacy: Privacy,
        agents: int,
        cohort: int,
        record: object | None = None,
        who: Callable[[int], str] = "site {}".format,
    ) -> None:
        self._privacy, self._agents, self._cohort, self._who = privacy, agents, cohort, who
        self._ledger = Ledger(privacy.noise) if record is None else Ledger.from_json(record)
        self._ledger.spent(privacy)  # refuses a different noise

    def check_next(self) -> None:
        """Refuse a round that would exceed the budget even if all sites reply."""
        check_round(self._privacy, self._ledger, self._agents, self._cohort, self._cohort)

    def released_by(self, agent: int) -> int:
        """Number of an agent's noisy updates, as its site claims."""
        return self._ledger.released_by(agent)

    def requested(self, agents: Iterable[int]) -> None:
        """Note that each of these agents is sent a request for an update."""
        self._ledger = self._ledger.with_requests(agents)

    def charge(self, agent: int, reply: Mapping[str, object]) -> dict[str, object]:
        """Charge an agent's reply; returns it without its release record."""
        store, count = read_release(reply)
        self._ledger = self._ledger.with_release(agent, store, count)
        claimed, charged = self._ledger.released_by(agent), self._ledger.charged_to(agent)
        if claimed > charged:
            LOG.warning(
                "%s claims %d noisy updates but was sent %d requests for one; epsilon counts "
                "the requests",
                *(self._who(agent), claimed, charged),
            )
        return {name: record for name, record in reply.items() if name != RELEASE}

    def close(self, accepted: int) -> None:
        """Charge a model aggregated from ``accepted`` updates, before anyone sees it."""
        check_round(self._privacy, self._ledger, self._agents, self._cohort, accepted)
        self._ledger = self._ledger.with_round(self._agents, self._cohort, accepted)

    def spent(self) -> dict[str, float]:
        """Both epsilons so far."""
        return asdict(self._ledger.spent(self._privacy))

    def as_json(self) -> dict[str, Any]:
        """The record stored in a checkpoint."""
        return self._ledger.as_json()

    def summary(self) -> dict[str, Any]:
        """The content of ``privacy.json``."""
        privacy = self._privacy
        return {
            "clip": privacy.clip,
            "noise": privacy.noise,
            "delta": privacy.delta,
            "epsilon": self.spent(),
            "updates": self._most_updates(),
            "budget": {"released": privacy.epsilon, "server": privacy.epsilon_server},
            "holds_for": HOLDS_FOR
            | ({"server": SUMMED.format(privacy.summed)} if privacy.summed > 1 else {}),
            "agents": self._agents,
            "cohort": self._cohort,
            "rounds": sum(self._ledger.rounds.values()),
            "scores_sent": privacy.scores,
        }

    def _most_updates(self) -> dict[str, int]:
        """The most noisy updates of any site: as charged, and as claimed by the site itself."""
        ledger = self._ledger
        return {
            "charged": max(map(ledger.charged_to, ledger.releases), default=0),
            "claimed": max(map(ledger.released_by, ledger.releases), default=0),
        }
