"""What arrived at the server of a round's updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from flwr.app import RecordDict
from pydantic import Field, TypeAdapter, ValidationError

from nufed.algorithms.protocol import Cost, State, SummedUpdates
from nufed.errors import RunError, UpdateError, shown
from nufed.flower.app.payload import NoReply, PayloadError, Reply, read_update
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Account, implausible
from nufed.server import Incoming


@dataclass
class Collected:
    """What arrived of a round; ``began`` is by agent the round of the state it started from."""

    updates: SummedUpdates | Incoming
    dropped: list[int] = field(default_factory=list)
    failed: list[UpdateError] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


class Collector:
    """Reads the replies of a round as they arrive; of each only its update is kept, if any.

    Noisy updates are charged to the privacy account.
    """

    def __init__(
        self, plan: Plan, server: State, round: int, incoming: Incoming, account: Account | None
    ) -> None:
        self._plan, self._round, self._account = plan, round, account
        self._expected = {name: server[name] for name in plan.algorithm.sent_in(round)}
        self._found = Collected(incoming)
        self._incoming = incoming

    def take(self, agent: int, reply: RecordDict) -> RecordDict:
        """Pass on the update of an agent's reply; returns what remains of the reply."""
        found, privacy = self._found, self._plan.privacy
        try:
            records: Mapping[str, object] = reply
            if self._account:
                records = self._account.charge(agent, records)
            update, spent, began = read_update(
                records, agent, self._expected, self._plan.rules.codec, self._plan.counted
            )
            wrong = privacy and implausible(update.vectors, self._expected, privacy)
            if wrong:
                raise PayloadError(wrong)
            self._incoming.add(update)
            found.began[agent] = began
            found.cost += spent
        except PayloadError as error:
            found.failed.append(UpdateError(agent, self._round, str(error), error.fault))
        return RecordDict()

    def close(self, replies: Mapping[int, Reply], dropped: list[int]) -> Collected:
        """What was collected, in the order of agents; ``replies`` has the reasons of the others."""
        found = self._found
        found.failed += [
            UpdateError(agent, self._round, reply.reason, reply.fault)
            for agent, reply in replies.items()
            if isinstance(reply, NoReply)
        ]
        found.failed.sort(key=lambda error: error.agent)
        found.began = dict(sorted(found.began.items()))
        found.dropped = dropped
        return found


def read_taken(record: object) -> dict[int, int]:
    """Each agent's last accepted round, from the notes of a checkpoint."""
    try:
        return TypeAdapter(dict[int, Annotated[int, Field(strict=True, ge=0)]]).validate_python(
            record
        )
    except ValidationError:
        raise RunError(f"the checkpoint's notes are invalid: taken = {shown(record)}") from None
