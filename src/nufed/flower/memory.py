"""A site's own state between rounds, for algorithms that keep one.

A site can't know whether the server took its last update: it may have been too late, left out, or
of a round that was tried again. So it keeps two states: the one its last work set out from, and the
one it led to. The server says which round's update of this site it took last, and the site goes on
from the state of that round.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from nufed.algorithm import State
from nufed.errors import TrainingError
from nufed.flower.payload import read_vectors, to_arrays

BEFORE, AFTER, ROUNDS = "nufed.before", "nufed.after", "nufed.rounds"


def recall(records: RecordDict, taken: int, fresh: State) -> State:
    """The state after round ``taken``, or ``fresh`` if the server never took an update (0).

    ``fresh`` is also what tells names and shapes; where it is empty nothing is kept.
    """
    if not fresh or taken == 0:
        return fresh
    place = _place(records, taken)
    if place is None:
        kept = sorted(_rounds(records).values())
        raise TrainingError(
            f"this site has lost its state of round {taken} (it has those of {kept}), as happens "
            "where a SuperNode was started again; without it it can't take part"
        )
    return read_vectors(records, fresh, place)


def keep(records: RecordDict, taken: int, round: int, state: State) -> None:
    """Remember the state that ``round`` led to, and the one it set out from."""
    if not state:
        return
    if _place(records, taken) == AFTER:
        records[BEFORE] = records[AFTER]
    records[AFTER] = to_arrays(state)
    records[ROUNDS] = ConfigRecord({BEFORE: taken, AFTER: round})


def _place(records: RecordDict, round: int) -> str | None:
    return next((place for place, of in _rounds(records).items() if of == round), None)


def _rounds(records: RecordDict) -> dict[str, int]:
    """Which round each kept state is of."""
    record = records.get(ROUNDS)
    if not isinstance(record, ConfigRecord):
        return {}
    return {place: of for place, of in record.items() if isinstance(of, int)}
