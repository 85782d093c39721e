"""What arrived at the server of a round's updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import RecordDict

from nufed.algorithms.protocol import AgentUpdate, Cost, State
from nufed.errors import UpdateError
from nufed.flower.app.payload import PayloadError, read_update
from nufed.flower.app.plan import Plan
from nufed.flower.app.plausibility import implausible
from nufed.flower.app.privacy_account import Account


@dataclass
class Collected:
    """What arrived of a round; ``began`` is by agent the round of the state it started from."""

    updates: Sequence[AgentUpdate]
    dropped: list[int]
    failed: list[UpdateError] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


def collect_updates(
    plan: Plan,
    server: State,
    round: int,
    replies: Mapping[int, RecordDict | str],
    dropped: list[int],
    account: Account | None,
) -> Collected:
    """The updates in the replies of agents; noisy ones are charged to the privacy account."""
    expected = {name: server[name] for name in plan.algorithm.sent_in(round)}
    updates: list[AgentUpdate] = []
    found = Collected(updates, dropped)
    for agent, reply in replies.items():
        try:
            records: Mapping[str, object] = usable(reply)
            if account:
                records = account.charge(agent, records)
            update, spent, began = read_update(records, agent, expected)
            wrong = plan.privacy and implausible(update.vectors, expected, plan.privacy)
            if wrong:
                raise PayloadError(wrong)
            updates.append(update)
            found.began[agent] = began
            found.cost += spent
        except PayloadError as error:
            found.failed.append(UpdateError(agent, round, str(error)))
    return found


def usable(reply: RecordDict | str) -> RecordDict:
    """A reply; raises the reason why there is none."""
    if isinstance(reply, str):
        raise PayloadError(reply)
    return reply
