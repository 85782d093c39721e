"""Where methods stand on the board: ranks and differences, by a bootstrap over agents within seeds.

A method's record has a dictionary for each seed, with the packed scores of agents: a row for each,
with a column for each number of fine-tuning steps, and one for the global model.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from nufed.seeding import stream

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Record: TypeAlias = Mapping[str, Any]
Group: TypeAlias = Literal["seen", "unseen"]
Resampled: TypeAlias = Mapping[str, Mapping[int, Array] | None]
NOT_RESAMPLED: Resampled = {}
DRAWS = 10_000  # of the bootstrap
LEVEL = 0.05


def pack(values: Any) -> str:
    """An array as compact text: numbers in float16, compressed, in base 64.

    >>> unpack(pack([[0.5, 0.25], [1.0, 0.0]])).tolist()
    [[0.5, 0.25], [1.0, 0.0]]
    """
    array = np.asarray(values, np.float64)
    array = array.reshape(len(array), -1) if array.size else array.reshape(0, 1)
    with np.errstate(over="ignore"):  # of diverged models
        content = array.T.astype("<f2").tobytes()
    return f"{array.shape[1]}:{base64.b64encode(zlib.compress(content, 9)).decode()}"


def unpack(text: str) -> Array:
    """The inverse of :func:`pack`: a row per agent."""
    columns, _, content = text.partition(":")
    values = np.frombuffer(zlib.decompress(base64.b64decode(content)), "<f2").astype(np.float64)
    return values.reshape(int(columns), -1).T


def scores_of(records: Sequence[Record], group: Group, column: int) -> dict[int, Array]:
    """Scores by seed, of a method's records in all folds; only seeds that all of them have."""
    by_fold = [
        {
            seed["seed"]: unpack(seed[group])[:, column]
            for seed in record.get("seeds", [])
            if "failure" not in seed
        }
        for record in records
    ]
    common = set.intersection(*(set(each) for each in by_fold)) if by_fold else set()
    return {seed: np.concatenate([each[seed] for each in by_fold]) for seed in sorted(common)}


def resamples_of(records: Sequence[Record], group: Group) -> dict[int, Array] | None:
    """By seed, how far agents' scores on resamples of their test samples are from those on all of
    them: a row per agent. None if that was not recorded, because agents are many."""
    known = [seed for record in records for seed in record.get("seeds", []) if group in seed]
    if not known or not all("resampled" in seed for seed in known):
        return None
    by_fold = [
        {s["seed"]: unpack(s["resampled"][group]) for s in record["seeds"] if group in s}
        for record in records
    ]
    common = set.intersection(*(set(each) for each in by_fold))
    return {seed: np.concatenate([each[seed] for each in by_fold]) for seed in sorted(common)}


def mean(by_seed: Mapping[int, Array], seeds: Sequence[int]) -> float:
    """The mean over agents, then over seeds."""
    return float(np.mean([by_seed[seed].mean() for seed in seeds]))


def worst_tenth(by_seed: Mapping[int, Array], seeds: Sequence[int], higher: bool) -> float:
    """The mean of the worst tenth of agents, averaged over seeds."""
    sign = 1 if higher else -1
    ranked = [np.sort(sign * by_seed[seed])[: -(-len(by_seed[seed]) // 10)] for seed in seeds]
    return sign * float(np.mean([each.mean() for each in ranked]))


def harmed(
    personal: Mapping[int, Array],
    shared: Mapping[int, Array],
    seeds: Sequence[int],
    higher: bool,
) -> float:
    """The share of agents whose personal model is worse than the global one; NaN without one."""
    sign = 1 if higher else -1
    if any(np.isnan(shared[seed]).all() for seed in seeds):
        return float("nan")
    return float(np.mean([(sign * personal[s] < sign * shared[s]).mean() for s in seeds]))


@dataclass(frozen=True)
class Place:
    """Where a method stands: its rank with a 95 % interval, and its difference to the best one.

    ``p`` is corrected by Holm's method over all others; the best itself has no difference.
    """

    rank: int
    ranks: tuple[int, int]
    difference: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None

    @property
    def tied(self) -> bool:
        """Whether it can't be told apart from the best."""
        return self.p is None or self.p >= LEVEL


def places(
    scores: Mapping[str, Mapping[int, Array]], higher: bool, resampled: Resampled = NOT_RESAMPLED
) -> dict[str, Place]:
    """The places of methods with these scores, on the seeds that all have, the best first.

    ``resampled`` has those of methods that have any (:func:`resamples_of`).
    """
    if not scores:
        return {}
    seeds = sorted(set.intersection(*(set(each) for each in scores.values())))
    names, sign = list(scores), 1 if higher else -1
    means = np.array([mean(scores[name], seeds) for name in names])
    order = np.argsort(-sign * means, kind="stable")
    names = [names[i] for i in order]
    means = means[order]
    drawn = _drawn(scores, resampled, names, seeds)
    ranks = 1 + (sign * drawn[:, None, :] > sign * drawn[:, :, None]).sum(axis=2)
    low, high = np.quantile(ranks, [0.025, 0.975], axis=0, method="nearest").astype(int)
    gaps = drawn - drawn[:, :1]
    raw = [_two_sided(gaps[:, k]) for k in range(1, len(names))]
    corrected = holm(raw)
    standing = {names[0]: Place(1, (int(low[0]), int(high[0])))}
    for k, name in enumerate(names[1:], 1):
        standing[name] = Place(
            k + 1,
            (int(low[k]), int(high[k])),
            float(means[k] - means[0]),
            _interval(gaps[:, k]),
            corrected[k - 1],
        )
    return standing


def _drawn(
    scores: Mapping[str, Mapping[int, Array]],
    resampled: Resampled,
    names: Sequence[str],
    seeds: Sequence[int],
) -> Array:
    """Draws of the methods' means: over the samples of few agents, else over agents."""
    values = [[scores[name][seed] for seed in seeds] for name in names]
    deviations = [resampled.get(name) for name in names]
    if any(each is None for each in deviations):
        return bootstrap(values)
    return over_samples(values, [[each[s] for s in seeds] for each in deviations if each])


def over_samples(
    scores: Sequence[Sequence[Array]],
    deviations: Sequence[Sequence[Array]],
    draws: int = DRAWS,
) -> Array:
    """Means of all methods with other test samples of these very agents.

    A draw takes one seed, and a resample of each agent there: seeds share most of their samples, so
    that their number does not make an interval narrower.

    Args:
        scores: by method and seed.
        deviations: by method and seed, a row per agent, of the scores on its resamples; the
            resamples are the same for all methods.
        draws: the number of rows of the result.
    """
    rng = stream(0, "bootstrap")
    stacked = np.array(deviations)  # methods, seeds, agents, resamples
    _, seeds, agents, resamples = stacked.shape
    seed = rng.integers(seeds, size=(draws, 1))
    picked = rng.integers(resamples, size=(draws, agents))
    moved = stacked[:, seed, np.arange(agents), picked].mean(axis=2)
    means = np.array([np.mean([each.mean() for each in by_seed]) for by_seed in scores])
    drawn: Array = means + moved.T
    return drawn


def bootstrap(scores: Sequence[Sequence[Array]], draws: int = DRAWS) -> Array:
    """Means of all methods over agents drawn with replacement within each seed, then over seeds.

    Args:
        scores: by method and seed; the agents of a seed are the same for all methods.
        draws: the number of rows of the result.
    """
    total = np.zeros((draws, len(scores)))
    for place in range(len(scores[0])):
        of_seed = np.stack([by_seed[place] for by_seed in scores])
        agents = of_seed.shape[1]
        rng = stream(0, "bootstrap", step=place)
        weights = rng.multinomial(agents, np.full(agents, 1 / agents), size=draws) / agents
        total += weights @ of_seed.T
    return total / len(scores[0])


def _two_sided(gaps: Array) -> float:
    """The bootstrap's p-value of a difference of 0."""
    tail = min((gaps <= 0).sum(), (gaps >= 0).sum())
    return float(min(1.0, 2 * (tail + 1) / (len(gaps) + 1)))


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected by Holm's method.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(values), 0.0
    for done, place in enumerate(np.argsort(values, kind="stable").tolist()):
        largest = max(largest, (len(values) - done) * values[place])
        corrected[place] = min(1.0, largest)
    return corrected


def differences(
    scores: Mapping[str, Mapping[int, Array]], against: str, resampled: Resampled = NOT_RESAMPLED
) -> dict[str, Place]:
    """The others minus one method, each on the seeds that both have; ranks are not given."""
    raw: dict[str, tuple[float, Array]] = {}
    for name, by_seed in scores.items():
        if name != against:
            seeds = sorted(set(by_seed) & set(scores[against]))
            drawn = _drawn(scores, resampled, [name, against], seeds)
            gap = mean(by_seed, seeds) - mean(scores[against], seeds)
            raw[name] = gap, drawn[:, 0] - drawn[:, 1]
    corrected = holm([_two_sided(gaps) for _, gaps in raw.values()])
    return {
        name: Place(0, (0, 0), gap, _interval(gaps), p)
        for (name, (gap, gaps)), p in zip(raw.items(), corrected, strict=True)
    }


def _interval(gaps: Array) -> tuple[float, float]:
    low, high = np.quantile(gaps, [0.025, 0.975]).tolist()
    return low, high
