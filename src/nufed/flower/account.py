"""The server's account of a private training: what its rounds cost, and whether one more may be.

Every noisy update that arrives is charged, also one that is then left out. One that arrives too
late to be looked at is charged with the next of its site, which says how many have left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nufed.flower.payload import RELEASE, read_release
from nufed.flower.privacy import Ledger, Privacy, check_round

HOLDS_FOR = {
    "released": "all who see the models, of all rounds, but not who was asked in which round: with "
    "the data of any one site replaced. It counts on the server, and on every site adding its "
    "noise.",
    "server": "the server and all who read there: with the data of any one site replaced, of the "
    "site that sent most. It counts on nobody else.",
}


class Account:
    """What a training with noisy updates has spent.

    Args:
        privacy: what sites do, and what may be spent.
        agents: how many take part in training.
        cohort: how many of them are asked in a round.
        record: what :meth:`as_json` was when training was interrupted; None: it begins.
    """

    def __init__(
        self, privacy: Privacy, agents: int, cohort: int, record: object | None = None
    ) -> None:
        self._privacy, self._agents, self._cohort = privacy, agents, cohort
        self._ledger = Ledger(privacy.noise) if record is None else Ledger.from_json(record)
        self._ledger.spent(privacy)  # refuses another noise

    def check_next(self) -> None:
        """Refuse to ask for another round that goes over the budget even if all sites answer."""
        check_round(self._privacy, self._ledger, self._agents, self._cohort, self._cohort)

    def released_by(self, agent: int) -> int:
        """How many noisy updates of an agent may have been seen here."""
        return self._ledger.released_by(agent)

    def charge(self, agent: int, reply: Mapping[str, object]) -> dict[str, object]:
        """Charge what arrived from an agent; the reply without what it says of that."""
        store, count = read_release(reply)
        self._ledger = self._ledger.with_release(agent, store, count)
        return {name: record for name, record in reply.items() if name != RELEASE}

    def close(self, accepted: int) -> None:
        """Charge a model made of so many updates, before anyone sees it."""
        check_round(self._privacy, self._ledger, self._agents, self._cohort, accepted)
        self._ledger = self._ledger.with_round(self._agents, self._cohort, accepted)

    def spent(self) -> dict[str, float]:
        """Both epsilons so far."""
        return asdict(self._ledger.spent(self._privacy))

    def as_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return self._ledger.as_json()

    def summary(self) -> dict[str, Any]:
        """What ``privacy.json`` says."""
        privacy = self._privacy
        return {
            "clip": privacy.clip,
            "noise": privacy.noise,
            "delta": privacy.delta,
            "epsilon": self.spent(),
            "budget": {"released": privacy.epsilon, "server": privacy.epsilon_server},
            "holds_for": HOLDS_FOR,
            "agents": self._agents,
            "cohort": self._cohort,
            "rounds": sum(self._ledger.rounds.values()),
            "scores_sent": privacy.scores,
        }
