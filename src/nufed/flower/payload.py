"""What travels: vectors as arrays, and plain numbers. All of it is checked before it is used.

An array is read only if it has the dtype, the shape and the very bytes of numpy's own file format
for them, so that nothing is parsed or unpickled at a stranger's word. (Flower has the whole message
in memory by then: how much a registered site sends is not bounded.)
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, cast, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from nufed.aggregate import MOST_SAMPLES, Unreadable
from nufed.algorithm import ClientUpdate, Cost, State
from nufed.data import ScoredOn
from nufed.errors import InputError, shown
from nufed.evaluate import AgentScores

ARRAYS, ABOUT, SCORES, RELEASE = "arrays", "about", "scores", "release"
BY_CLASS = ("balanced", "minority", "majority")
VERSION = version("nufed")
STORED_AS = "numpy.ndarray"
DTYPES = {torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
MOST_SCALES = 32  # of the step size, that a site is scored with at once
MOST_WORK = 10**15  # gradients that a site may say it computed
MOST_LETTERS = 100  # of a site's name
MOST_RELEASES = 10**6  # noisy updates that a site may say it sent


class PayloadError(Exception):
    """Something that was sent can't be used: it says why."""


def content(vectors: State | None = None, **about: int | str | list[float]) -> RecordDict:
    """Vectors, and numbers about them, as the content of a message."""
    records = RecordDict({ABOUT: ConfigRecord(cast(Any, dict(about)))})
    if vectors is not None:
        records[ARRAYS] = to_arrays(vectors)
    return records


def to_arrays(vectors: State) -> ArrayRecord:
    """Vectors as they are sent and stored."""
    for name, vector in vectors.items():
        if vector.dtype not in DTYPES:
            raise InputError(
                f"{name!r} has dtype {vector.dtype}, which can't be sent: use a model in one of "
                f"{', '.join(DTYPES.values())}"
            )
    return ArrayRecord({n: Array(v.detach().cpu().numpy()) for n, v in vectors.items()})


def read_array(array: object, like: Tensor) -> Tensor | Unreadable:
    """The vector of an array that must be like another one, or why it can't be read."""
    if not isinstance(array, Array):
        return Unreadable("is not an array")
    if array.stype != STORED_AS:
        return Unreadable(f"is stored as {shown(array.stype)}; only {STORED_AS!r} is read")
    for what, wanted in (("dtype", DTYPES[like.dtype]), ("shape", tuple(like.shape))):
        if getattr(array, what) != wanted:
            return Unreadable(f"has {what} {shown(getattr(array, what))} instead of {wanted}")
    dtype = np.dtype(DTYPES[like.dtype])
    head = _head(dtype, tuple(like.shape))
    if len(array.data) != len(head) + like.numel() * dtype.itemsize:
        return Unreadable(f"has {len(array.data)} bytes, which does not fit its shape")
    if not array.data.startswith(head):
        return Unreadable("does not begin as an array of its dtype and shape does")
    numbers = np.frombuffer(array.data, dtype, offset=len(head)).reshape(tuple(like.shape))
    return torch.from_numpy(numbers.copy()).to(like.device)


def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """How numpy's file of such an array begins."""
    file = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, cast(Any, header))
    return file.getvalue()


def read_vectors(records: Mapping[str, object], like: State, key: str = ARRAYS) -> State:
    """Vectors that must have the names and shapes of ``like``."""
    arrays = _record(records, key, ArrayRecord)
    if arrays.keys() != like.keys():
        raise PayloadError(f"it holds {shown(sorted(arrays))} instead of {sorted(like)}")
    vectors = {}
    for name, right in like.items():
        vector = read_array(arrays[name], right)
        if isinstance(vector, Unreadable):
            raise PayloadError(f"{name!r} {vector.reason}")
        vectors[name] = vector
    return vectors


def read_about(records: Mapping[str, object], *keys: str) -> list[Any]:
    """What a message says of itself, all of ``keys`` and nothing else, of any type."""
    about = _record(records, ABOUT, ConfigRecord)
    if about.keys() != set(keys):
        raise PayloadError(f"it says {shown(sorted(about))} of itself instead of {sorted(keys)}")
    return [about[key] for key in keys]


def read_run(run: object) -> str:
    """The name of a run, which becomes that of a folder."""
    return _hexadecimal(run, "run")


def release_record(store: str, count: int) -> ConfigRecord:
    """Which noisy update a reply holds: the ``count``-th that was made in a site's ``store``."""
    return ConfigRecord({"store": store, "count": count})


def read_release(records: Mapping[str, object]) -> tuple[str, int]:
    """The store and the count of a noisy update."""
    release = _record(records, RELEASE, ConfigRecord)
    if release.keys() != {"store", "count"}:
        raise PayloadError(f"it says {shown(sorted(release))} of its noisy update")
    count = whole(release["count"], "its number of noisy updates", MOST_RELEASES)
    if count == 0:
        raise PayloadError("its number of noisy updates is 0, and here is one")
    return _hexadecimal(release["store"], "store"), count


def _hexadecimal(name: object, what: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{32}", name):
        raise PayloadError(f"the {what} {shown(name)} is not named by 32 hexadecimal digits")
    return name


def read_update(
    records: Mapping[str, object], agent: int, expected: State
) -> tuple[ClientUpdate, Cost, int]:
    """An agent's update, for :func:`nufed.aggregate.screen` to judge, what it cost, and the round
    of the state that the agent set out from."""
    _only(records, ARRAYS, ABOUT)
    says, round, samples, gradients, hvps, began = read_about(
        records, "agent", "round", "samples", "gradients", "hvps", "began"
    )
    _same_agent(says, agent)
    arrays = _record(records, ARRAYS, ArrayRecord)
    vectors = {
        name: read_array(array, expected[name]) if name in expected else Unreadable("is not asked")
        for name, array in arrays.items()
    }
    cost = Cost(*(whole(value, "gradients", MOST_WORK) for value in (gradients, hvps)))
    update = ClientUpdate(agent, round, samples, cast(State, vectors))
    return update, cost, whole(began, "began", 10**9)


def scores_content(
    by_scale: Sequence[AgentScores], majority: AgentScores | None, round: int
) -> RecordDict:
    """An agent's scores as plain numbers, with those of always answering its majority class.

    ``by_scale`` are its scores for every scale of the step size that was asked for; their lists are
    sent one behind the other.
    """
    scores = by_scale[0]
    records = content(
        agent=scores.agent,
        round=round,
        train_samples=scores.train_samples,
        test_samples=scores.test_samples,
        minority_samples=scores.minority_samples,
    )
    names = ("loss", "score", *(("balanced", "minority") if scores.balanced else ()))
    lists = {name: [x for own in by_scale for x in getattr(own, name)] for name in names}
    if majority is not None:
        first = (majority.score[0], majority.balanced[0], majority.minority[0])
        lists["majority"] = list(first)
    records[SCORES] = MetricRecord(cast(Any, lists))
    return records


def read_scores(
    records: Mapping[str, object],
    agent: int,
    round: int,
    *,
    name: str,
    seen: bool,
    steps: int,
    scales: int,
    by_class: bool,
    diverged: bool,
) -> tuple[list[AgentScores], AgentScores | None]:
    """An agent's scores by scale, every number checked, and those of its majority class.

    With ``by_class`` they are accuracies, also class by class; without, any numbers. They must be
    finite unless ``diverged`` allows others.
    """
    _only(records, ABOUT, SCORES)
    says, of, train, test, minority = read_about(
        records, "agent", "round", "train_samples", "test_samples", "minority_samples"
    )
    _same_agent(says, agent)
    if whole(of, "round", 10**9) != round:
        raise PayloadError(f"it is of round {of}")
    lists = _record(records, SCORES, MetricRecord)
    if lists.keys() != {"loss", "score", *(BY_CLASS if by_class else ())}:
        raise PayloadError(f"it holds {shown(sorted(lists))} instead of scores")
    test_samples = whole(test, "test_samples", MOST_SAMPLES, least=1)
    most = test_samples if by_class else 0
    minority_samples = whole(minority, "minority_samples", most)
    none, length = minority_samples == 0, scales * (steps + 1)

    def read(key: str, share: bool, none: bool = False) -> list[tuple[float, ...]]:
        """The numbers after 0, 1, … steps, by scale."""
        numbers = _numbers(lists[key], key, length, share=share, none=none, diverged=diverged)
        return [numbers[at : at + steps + 1] for at in range(0, length, steps + 1)]

    by_steps: dict[str, list[tuple[float, ...]]] = {
        "loss": read("loss", share=False),
        "score": read("score", share=by_class),
        "balanced": read("balanced", share=True) if by_class else [()] * scales,
        "minority": read("minority", share=True, none=none) if by_class else [()] * scales,
    }
    train_samples = whole(train, "train_samples", MOST_SAMPLES, least=1)
    scores = [
        AgentScores(
            agent=agent,
            name=name,
            seen=seen,
            train_samples=train_samples,
            test_samples=test_samples,
            minority_samples=minority_samples,
            loss=loss,
            score=score,
            balanced=balanced,
            minority=on_minority,
        )
        for loss, score, balanced, on_minority in zip(*by_steps.values(), strict=True)
    ]
    if not by_class:
        return scores, None
    null = lists["majority"]
    first, last = (null[:2], null[2:]) if isinstance(null, list) else (null, null)
    answers = (
        *_numbers(first, "majority", 2, share=True),
        *_numbers(last, "majority", 1, share=True, none=none),
    )
    score, balanced, on_minority = ((number,) * (steps + 1) for number in answers)
    loss = (math.nan,) * (steps + 1)
    constant = {"loss": loss, "score": score, "balanced": balanced, "minority": on_minority}
    return scores, replace(scores[0], **cast(Any, constant))


def read_scales(scales: object) -> list[float]:
    """The scales of the step size that a site is asked to be scored with."""
    ok = isinstance(scales, list) and 1 <= len(scales) <= MOST_SCALES
    if not ok or not all(isinstance(s, float) and 0 < s < math.inf for s in cast(Any, scales)):
        raise PayloadError(f"scales is {shown(scales)}, not up to {MOST_SCALES} numbers above 0")
    return cast(list[float], scales)


def read_part(part: object) -> ScoredOn:
    """The part that a site is asked to be scored on."""
    if part not in get_args(ScoredOn):
        raise PayloadError(f"part is {shown(part)}, not one of {get_args(ScoredOn)}")
    return cast(ScoredOn, part)


def read_who(records: Mapping[str, object], agents: int) -> tuple[int, str]:
    """A site's number and name; its nufed must be the server's."""
    _only(records, ABOUT)
    agent, name, has = read_about(records, "agent", "name", "version")
    if has != VERSION:
        raise PayloadError(
            f"it has nufed {shown(has)} and the server {VERSION!r}: install the same"
        )
    if not isinstance(name, str) or not name.isprintable() or len(name) > MOST_LETTERS:
        raise PayloadError(f"its name {shown(name)} is not one line of text")
    return whole(agent, "its number", agents - 1), name


def whole(value: object, name: str, most: int, least: int = 0) -> int:
    """A whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PayloadError(f"{name} is {shown(value)}, not a whole number in {least} … {most}")
    return value


def _numbers(
    values: object,
    name: str,
    length: int,
    *,
    share: bool = False,
    none: bool = False,
    diverged: bool = False,
) -> tuple[float, ...]:
    """So many finite numbers; a ``share`` is in 0 … 1, and of no samples (``none``) it is NaN.

    With ``diverged`` they need not be finite.
    """
    if not isinstance(values, list) or len(values) != length:
        raise PayloadError(f"{name!r} is not a list of as many numbers as it should be")
    if none:
        return (math.nan,) * length
    if not all(isinstance(v, float) and (diverged or math.isfinite(v)) for v in values):
        raise PayloadError(f"{name!r} is {shown(values)}: every number must be finite")
    if share and not all(0 <= v <= 1 for v in values if math.isfinite(v)):
        raise PayloadError(f"{name!r} is {shown(values)}: every number must be in 0 … 1")
    return tuple(values)


def _same_agent(says: object, agent: int) -> None:
    if says != agent or isinstance(says, bool):
        raise PayloadError(f"it says that it is agent {shown(says)}")


def _only(records: Mapping[str, object], *keys: str) -> None:
    if records.keys() != set(keys):
        raise PayloadError(f"it sent the records {shown(sorted(records))} instead of {keys}")


def _record(records: Mapping[str, object], key: str, kind: type[Any]) -> Any:
    record = records.get(key)
    if not isinstance(record, kind):
        raise PayloadError(f"it sent no {kind.__name__} called {key!r}")
    return record
