"""Message payloads: vectors as arrays, and plain numbers, all validated before use.

An array is read only if its dtype, shape and header bytes are exactly those of numpy's file format
for the expected array, so that nothing untrusted is parsed or unpickled.
:mod:`nufed.flower.app.replies` has limited the size of the whole message before.

Releases of one minor series (0.1.0, 0.1.3) work together in a federation: they exchange the same
messages, and read each other's run directories and sites' folders. Other versions (development
versions, release candidates) work only with themselves.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeAlias, cast, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from nufed.algorithms.compression import (
    NO_STATISTICS,
    Codec,
    CodeError,
    Counted,
    codes_like,
    decompress,
)
from nufed.algorithms.protocol import AgentUpdate, Cost, State
from nufed.data import ScoredOn
from nufed.errors import Fault, InputError, UpdateError, shown
from nufed.evaluate import GROUPS, RESAMPLES, AgentScores
from nufed.server.checks import MOST_SAMPLES, Unreadable

VERSION = version("nufed")
NUMBERS = re.compile(r"(\d+)\.(\d+)\.\d+")


def works_with(one: str, other: str) -> bool:
    """Whether a server and a site with these versions work together.

    >>> works_with("0.1.0", "0.1.3"), works_with("0.1.3", "0.2.0"), works_with("0.1.0", "0.1.0rc1")
    (True, False, False)
    """
    series = [match.groups() for match in map(NUMBERS.fullmatch, (one, other)) if match]
    return one == other or (len(series) == 2 and series[0] == series[1])


ARRAYS, ABOUT, SCORES, RELEASE = "arrays", "about", "scores", "release"
OWN = "own"  # the arrays of a request that are for this site alone
METHOD = "method"  # the record of a request that names its method, if the app has several
BASELINE = "baseline"  # the action of a message that asks for the scores of a null baseline
UNTRAINED, LOCAL = "untrained", "local"  # the null baselines that sites compute
CURVATURE = "curvature"  # the record of a request with the curvature that step sizes come from
LOOK = "look"  # the action of a message that asks for the curvature of first gradients
KEEP = "keep"  # the action of a message on which a site writes its personal model
STORED_AS = "numpy.ndarray"
DTYPES = {torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
# of compressed vectors
CODE_DTYPES = {torch.int8: "int8", torch.int16: "int16", torch.int32: "int32"}
ARRAY_DTYPES = DTYPES | CODE_DTYPES
MAX_GRADIENTS = 10**15  # gradients that a site may report
MAX_NAME_LENGTH = 100
SAME = "install releases of one minor series at both, as 0.1.0 and 0.1.3"
MAX_RELEASES = 10**6  # noisy updates that a site may report


class PayloadError(Exception):
    """A message can't be used; says why."""

    def __init__(self, reason: str, fault: Fault = Fault.INVALID) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(frozen=True)
class NoReply:
    """Why a site sent no usable reply.

    Args:
        reason: in words.
        fault: its kind.
        refused: the site can't take part because of its own data or settings, in its own words.
        excluded: the site is sent no further request of this run.
    """

    reason: str
    fault: Fault = Fault.INVALID
    refused: bool = False
    excluded: bool = False

    def error(self, agent: int, round: int, who: str = "") -> UpdateError:
        """The same for the update or the scores of a round; ``who`` names the agent."""
        return UpdateError(agent, round, self.reason, self.fault, who)


OFFLINE = NoReply("its site is offline", Fault.OFFLINE)
Reply: TypeAlias = RecordDict | NoReply


def size_of(content: RecordDict) -> int:
    """The bytes of a message's arrays, numbers and texts, without Flower's envelope."""
    counted = (ArrayRecord, ConfigRecord, MetricRecord)
    return sum(each.count_bytes() for each in content.values() if isinstance(each, counted))


def usable(reply: Reply) -> RecordDict:
    """A reply; raises the reason why there is none."""
    if isinstance(reply, NoReply):
        raise PayloadError(reply.reason, reply.fault)
    return reply


def content(vectors: State | None = None, **about: int | str | list[float]) -> RecordDict:
    """The content of a message: vectors and metadata."""
    records = RecordDict({ABOUT: ConfigRecord(cast(Any, dict(about)))})
    if vectors is not None:
        records[ARRAYS] = to_arrays(vectors)
    return records


def to_arrays(vectors: State) -> ArrayRecord:
    """Vectors as Flower arrays."""
    for name, vector in vectors.items():
        if vector.dtype not in ARRAY_DTYPES:
            raise InputError(
                f"{name!r} has dtype {vector.dtype}, which can't be sent: use a model of dtype "
                f"{', '.join(DTYPES.values())}"
            )
    return ArrayRecord({n: Array(v.detach().cpu().numpy()) for n, v in vectors.items()})


def read_array(array: object, like: Tensor) -> Tensor | Unreadable:
    """The vector of an array with the dtype and shape of ``like``, or why it can't be read."""
    if not isinstance(array, Array):
        return Unreadable("is not an array")
    if array.stype != STORED_AS:
        return Unreadable(f"is stored as {shown(array.stype)}; must be {STORED_AS!r}")
    for what, wanted in (("dtype", ARRAY_DTYPES[like.dtype]), ("shape", tuple(like.shape))):
        if getattr(array, what) != wanted:
            return Unreadable(f"has {what} {shown(getattr(array, what))} instead of {wanted}")
    dtype = np.dtype(ARRAY_DTYPES[like.dtype])
    header = npy_header(dtype, tuple(like.shape))
    if len(array.data) != len(header) + like.numel() * dtype.itemsize:
        return Unreadable(f"has {len(array.data)} bytes, which does not fit its shape")
    if not array.data.startswith(header):
        return Unreadable("has a header that does not match its dtype and shape")
    numbers = np.frombuffer(array.data, dtype, offset=len(header)).reshape(tuple(like.shape))
    return torch.from_numpy(numbers.copy()).to(like.device)


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header of numpy's file format for such an array."""
    file = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, cast(Any, header))
    return file.getvalue()


def read_vectors(records: Mapping[str, object], like: State, key: str = ARRAYS) -> State:
    """Vectors with exactly the names, dtypes and shapes of ``like``."""
    arrays = get_record(records, key, ArrayRecord)
    if arrays.keys() != like.keys():
        raise PayloadError(f"it has vectors {shown(sorted(arrays))} instead of {sorted(like)}")
    vectors = {}
    for name, example in like.items():
        vector = read_array(arrays[name], example)
        if isinstance(vector, Unreadable):
            raise PayloadError(f"{name!r} {vector.reason}")
        vectors[name] = vector
    return vectors


def read_about(records: Mapping[str, object], *keys: str) -> list[Any]:
    """A message's metadata: the values of exactly ``keys``, of any type."""
    about = get_record(records, ABOUT, ConfigRecord)
    if about.keys() != set(keys):
        raise PayloadError(
            f"its metadata has keys {shown(sorted(about))} instead of {sorted(keys)}"
        )
    return [about[key] for key in keys]


def read_run(run: object) -> str:
    """The id of a run, also used as a folder name."""
    return _read_id(run, "run")


def method_record(method: str) -> dict[str, ConfigRecord]:
    """Names the method of a request; empty if the app has only one."""
    return {METHOD: ConfigRecord({"name": method})} if method else {}


def curvature_record(curvature: float | None) -> dict[str, ConfigRecord]:
    """States the curvature from which step sizes come that are not given; empty if none do."""
    return {} if curvature is None else {CURVATURE: ConfigRecord({"largest": curvature})}


def read_curvature(request: Mapping[str, object]) -> float | None:
    """The curvature that a request states; None if it states none."""
    if CURVATURE not in request:
        return None
    return _positive(get_record(request, CURVATURE, ConfigRecord).get("largest"))


def read_look(reply: Mapping[str, object], agent: int) -> float:
    """The curvature that a site measured."""
    check_keys(reply, ABOUT)
    claimed, measured = read_about(reply, "agent", "curvature")
    if claimed != agent:
        raise PayloadError(f"it is of agent {shown(claimed)} instead of {agent}")
    return _positive(measured[0] if isinstance(measured, list) and len(measured) == 1 else measured)


def _positive(curvature: object) -> float:
    if isinstance(curvature, float) and 0 < curvature < math.inf:
        return curvature
    raise PayloadError(f"its curvature is {shown(curvature)}: must be a finite number above 0")


def read_method(request: Mapping[str, object]) -> str | None:
    """The method that a request names; None if it names none."""
    if METHOD not in request:
        return None
    name = get_record(request, METHOD, ConfigRecord).get("name")
    if not isinstance(name, str):
        raise PayloadError(f"its method is {shown(name)}, not a name")
    return name


def release_record(store: str, count: int) -> ConfigRecord:
    """Identifies the noisy update in a reply: the ``count``-th from a site's ``store``."""
    return ConfigRecord({"store": store, "count": count})


def read_release(records: Mapping[str, object]) -> tuple[str, int]:
    """The store and the count of a noisy update."""
    release = get_record(records, RELEASE, ConfigRecord)
    if release.keys() != {"store", "count"}:
        raise PayloadError(f"its release record has keys {shown(sorted(release))}")
    count = read_int(release["count"], "its number of noisy updates", MAX_RELEASES)
    if count == 0:
        raise PayloadError("its number of noisy updates is 0, but it sent one")
    return _read_id(release["store"], "store"), count


def _read_id(value: object, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise PayloadError(f"{what} = {shown(value)}: must be an id of 32 hexadecimal digits")
    return value


def read_update(
    records: Mapping[str, object],
    agent: int,
    expected: State,
    codec: Codec | None = None,
    counted: Counted = NO_STATISTICS,
) -> tuple[AgentUpdate, Cost, int]:
    """An agent's update (not checked yet, :mod:`nufed.server.incoming`), its cost, and the round
    of the state that the agent started from."""
    check_keys(records, ARRAYS, ABOUT)
    claimed, round, samples, gradients, hvps, began = read_about(
        records, "agent", "round", "samples", "gradients", "hvps", "began"
    )
    check_agent(claimed, agent)
    vectors: Mapping[str, Tensor | Unreadable]
    if codec is not None:
        vectors = _read_codes(records, expected, codec, counted)
    else:
        arrays = get_record(records, ARRAYS, ArrayRecord)
        vectors = {
            n: read_array(a, expected[n]) if n in expected else Unreadable("is unexpected")
            for n, a in arrays.items()
        }
    cost = Cost(*(read_int(value, "gradients", MAX_GRADIENTS) for value in (gradients, hvps)))
    update = AgentUpdate(agent, round, samples, cast(State, vectors))
    return update, cost, read_int(began, "began", 10**9)


def _read_codes(
    records: Mapping[str, object], expected: State, codec: Codec, counted: Counted
) -> State:
    """The vectors of a compressed update."""
    try:
        codes = read_vectors(records, codes_like(codec, expected, counted))
        return decompress(codec, codes, expected, counted)
    except CodeError as error:
        raise PayloadError(str(error)) from error


def read_identity(records: Mapping[str, object], agents: int) -> tuple[int, str]:
    """A site's number and name; its version of nufed must work with the server's."""
    installed = read_version(records)  # first: another version may send other fields
    if not works_with(installed, VERSION):
        raise PayloadError(f"it has nufed {shown(installed)} and the server {VERSION!r}: {SAME}")
    check_keys(records, ABOUT)
    agent, name, _ = read_about(records, "agent", "name", "version")
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        raise PayloadError(
            f"its name {shown(name)} is not one line of up to {MAX_NAME_LENGTH} characters"
        )
    return read_int(agent, "its number", agents - 1), name


def read_version(records: Mapping[str, object]) -> str:
    """The version of nufed that a server or a site reports."""
    installed = get_record(records, ABOUT, ConfigRecord).get("version")
    if not isinstance(installed, str):
        raise PayloadError(f"it reports nufed {shown(installed)}, which is not a version")
    return installed


def read_int(value: object, name: str, most: int, least: int = 0) -> int:
    """``value``, if it is a whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PayloadError(f"{name} is {shown(value)}, not a whole number in {least} … {most}")
    return value


def check_agent(claimed: object, agent: int) -> None:
    if claimed != agent or isinstance(claimed, bool):
        raise PayloadError(f"it claims to be site {shown(claimed)}")


def check_keys(records: Mapping[str, object], *keys: str) -> None:
    if records.keys() != set(keys):
        raise PayloadError(f"it sent the records {shown(sorted(records))} instead of {keys}")


def get_record(records: Mapping[str, object], key: str, kind: type[Any]) -> Any:
    record = records.get(key)
    if not isinstance(record, kind):
        raise PayloadError(f"it sent no {kind.__name__} called {key!r}")
    return record


BY_CLASS = ("balanced", "minority", "majority")
GLOBAL = "global"  # loss and score of the global model, if there is one
GROUP_LOSS = "group_loss"  # of groups of validation samples, if the site sends it
RESAMPLED = "resampled"  # deviations of scores on resamples, if sites are few
MAJORITY_RESAMPLED = "majority_resampled"  # the same of the majority class
OPTIONAL = {GROUP_LOSS, RESAMPLED, MAJORITY_RESAMPLED}
MAX_SCALES = 64  # step sizes per request


# the counts among an agent's scores, with the least and the largest value that a site may report
COUNTS = {
    "train_samples": (1, MOST_SAMPLES),
    "test_samples": (1, MOST_SAMPLES),
    "minority_samples": (0, MOST_SAMPLES),
    "personal_gradients": (0, 10**9),
    "personal_hvps": (0, 10**9),
}


def scores_content(
    by_scale: Sequence[AgentScores], majority: AgentScores | None, round: int
) -> RecordDict:
    """An agent's scores as plain numbers, with those of always predicting its majority class.

    ``by_scale`` are its scores for every requested scale of the step size, sent concatenated.
    """
    scores = by_scale[0]
    about = {name: getattr(scores, name) for name in (*COUNTS, "newcomer")}
    names = ("loss", "score", *(("balanced", "minority") if scores.balanced else ()))
    lists = {name: [x for each in by_scale for x in getattr(each, name)] for name in names}
    for key in (RESAMPLED, GROUP_LOSS):
        if getattr(scores, key):
            lists[key] = [x for each in by_scale for row in getattr(each, key) for x in row]
    if majority is not None and majority.resampled:
        lists[MAJORITY_RESAMPLED] = list(majority.resampled[0])
    if scores.global_score is not None and scores.global_loss is not None:
        lists[GLOBAL] = [scores.global_loss, scores.global_score]
    if majority is not None:
        lists["majority"] = [majority.score[0], majority.balanced[0], majority.minority[0]]
    records = content(agent=scores.agent, round=round, **about)
    records[SCORES] = MetricRecord(cast(Any, lists))
    return records


@dataclass(frozen=True)
class ExpectedScores:
    """The form of an agent's scores that the server expects.

    Args:
        agent, name, seen: whose they are.
        round: of the model.
        steps: maximum number of fine-tuning steps.
        scales: number of step sizes.
        by_class: whether they are accuracies, also per class; otherwise any numbers.
        has_global: whether there is a global model.
        diverged: whether they may be non-finite.
    """

    agent: int
    name: str
    seen: bool
    round: int
    steps: int
    scales: int
    by_class: bool
    has_global: bool
    diverged: bool


def read_scores(
    records: Mapping[str, object], expected: ExpectedScores
) -> tuple[list[AgentScores], AgentScores | None]:
    """An agent's validated scores by scale, and those of its majority class."""
    check_keys(records, ABOUT, SCORES)
    about = _read_about_scores(records, expected)
    lists, by_class = get_record(records, SCORES, MetricRecord), expected.by_class
    keys = {"loss", "score", *(BY_CLASS if by_class else ())}
    keys |= {GLOBAL} if expected.has_global else set()
    if lists.keys() - OPTIONAL != keys:
        raise PayloadError(f"its scores have keys {shown(sorted(lists))} instead of {sorted(keys)}")
    each, diverged = expected.steps + 1, expected.diverged  # numbers per scale
    length, no_minority = expected.scales * each, about["minority_samples"] == 0

    def curves(key: str, share: bool = False, none: bool = False) -> list[tuple[float, ...]]:
        """The numbers after 0, 1, … steps, by scale."""
        return _rows(_numbers(lists[key], key, length, share, none, diverged), each)

    def optional(key: str, width: int, number: int = length) -> list[tuple[float, ...]]:
        """``number`` rows of numbers, if the site sends them."""
        if key not in lists:
            return []
        return _rows(_numbers(lists[key], key, number * width, diverged=True), width)

    absent: list[tuple[float, ...]] = [()] * expected.scales
    by_steps: dict[str, list[Any]] = {
        "loss": curves("loss"),
        "score": curves("score", share=by_class),
        "balanced": curves("balanced", share=True) if by_class else absent,
        "minority": curves("minority", share=True, none=no_minority) if by_class else absent,
    }
    group_loss = optional(GROUP_LOSS, min(about["test_samples"], GROUPS))
    resampled = optional(RESAMPLED, RESAMPLES)
    if expected.has_global:
        both = lists[GLOBAL] if isinstance(lists[GLOBAL], list) else []
        (about["global_loss"],) = _numbers(both[:1], GLOBAL, 1, diverged=diverged)
        (about["global_score"],) = _numbers(both[1:], GLOBAL, 1, by_class, diverged=diverged)
    scores = [
        AgentScores(
            **about,
            **{key: by_scale[scale] for key, by_scale in by_steps.items()},
            group_loss=tuple(group_loss[scale * each : (scale + 1) * each]),
            resampled=tuple(resampled[scale * each : (scale + 1) * each]),
        )
        for scale in range(expected.scales)
    ]
    if not by_class:
        return scores, None
    resamples = tuple(optional(MAJORITY_RESAMPLED, RESAMPLES, 1))
    return scores, _majority(lists["majority"], scores[0], resamples)


def _read_about_scores(records: Mapping[str, object], expected: ExpectedScores) -> dict[str, Any]:
    """The fields of an agent's scores that are the same for every scale."""
    claimed, of, newcomer, *values = read_about(records, "agent", "round", "newcomer", *COUNTS)
    check_agent(claimed, expected.agent)
    if read_int(of, "round", 10**9) != expected.round:
        raise PayloadError(f"its scores are of round {of}")
    if not isinstance(newcomer, bool):
        raise PayloadError(f"newcomer is {shown(newcomer)}, not true or false")
    counts = {
        name: read_int(value, name, most, least)
        for (name, (least, most)), value in zip(COUNTS.items(), values, strict=True)
    }
    largest = counts["test_samples"] if expected.by_class else 0
    read_int(counts["minority_samples"], "minority_samples", largest)
    about = {"agent": expected.agent, "name": expected.name, "seen": expected.seen}
    return {**about, **counts, "newcomer": newcomer}


def _rows(numbers: tuple[float, ...], width: int) -> list[tuple[float, ...]]:
    return [numbers[at : at + width] for at in range(0, len(numbers), width)]


def _majority(
    numbers: object, scores: AgentScores, resampled: tuple[tuple[float, ...], ...]
) -> AgentScores:
    """The scores of the majority class of an agent, the same after any number of steps."""
    first, last = (numbers[:2], numbers[2:]) if isinstance(numbers, list) else (numbers, numbers)
    constants = (
        *_numbers(first, "majority", 2, share=True),
        *_numbers(last, "majority", 1, share=True, none=scores.minority_samples == 0),
    )
    each = len(scores.score)
    score, balanced, minority = ((number,) * each for number in constants)
    return replace(
        scores,
        loss=(math.nan,) * each,
        score=score,
        global_loss=None,
        global_score=None,
        balanced=balanced,
        minority=minority,
        personal_gradients=0,
        personal_hvps=0,
        newcomer=False,
        group_loss=(),
        resampled=resampled * each,
    )


def read_scales(scales: object) -> list[float]:
    """The requested scales of the step size."""
    ok = isinstance(scales, list) and 1 <= len(scales) <= MAX_SCALES
    if not ok or not all(isinstance(s, float) and 0 <= s < math.inf for s in cast(Any, scales)):
        raise PayloadError(f"scales is {shown(scales)}, not up to {MAX_SCALES} numbers, 0 or more")
    return cast(list[float], scales)


def read_part(part: object) -> ScoredOn:
    """The requested part of the samples."""
    if part not in get_args(ScoredOn):
        raise PayloadError(f"part is {shown(part)}, not one of {get_args(ScoredOn)}")
    return cast(ScoredOn, part)


def _numbers(
    values: object,
    name: str,
    length: int,
    share: bool = False,
    none: bool = False,
    diverged: bool = False,
) -> tuple[float, ...]:
    """``length`` finite numbers; a ``share`` is in 0 … 1, or NaN without samples (``none``).

    With ``diverged`` they may be non-finite.
    """
    if not isinstance(values, list) or len(values) != length:
        raise PayloadError(f"{name!r} is not a list of {length} numbers")
    if none:
        return (math.nan,) * length
    if not all(isinstance(v, float) and (diverged or math.isfinite(v)) for v in values):
        raise PayloadError(f"{name!r} is {shown(values)}: every number must be finite")
    if share and not all(0 <= v <= 1 for v in values if math.isfinite(v)):
        raise PayloadError(f"{name!r} is {shown(values)}: every number must be in 0 … 1")
    return tuple(values)
