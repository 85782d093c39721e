"""Client-level (ε, δ)-differential privacy of what a site sends.

A site clips its change to norm C, adds Gaussian noise of standard deviation z·C per coordinate, and
sends that; the server takes the uniform mean. With any one site's data replaced by other data, no
observation becomes more than e^ε times as likely, except with probability δ. Two values of ε are
tracked, for two adversaries:

* ``released``: sees the models of all rounds, of a trusted server. The sum of ``a`` updates has
  noise √a·z·C, and cohorts are secret. Assumes that all ``a`` sites add their noise, and that
  cohorts are not drawn from a public seed.
* ``server``: the server, or whoever reads its traffic, sees every update and its sender. Each of a
  site's n updates has noise z·C, without amplification by sampling. With secure aggregation it sees
  sums of at least ``summed`` updates, with noise √summed·z·C, if no other site colludes with it.

Both cover vectors alone, and hold if dropping out does not depend on data. ``released`` does not
hold for weights by samples, other aggregations, or updates rejected for their norm.

The server's account charges every noisy update that arrives, also one that is then rejected. One
that arrives after the deadline is charged with the next of its site, which reports the site's
release count. A site that reports more updates than it was sent requests is named, and charged with
the requests. A round over the budget is refused.

A private run rejects noisy updates that can't be a clipped change plus noise. A site's change over
all its vectors has norm ≤ C and gets noise zC·g, g standard normal in d dimensions. For any t > 0
(Gaussian concentration: the norm is 1-Lipschitz, and d/√(d+1) ≤ E‖g‖ ≤ √d; a union bound over
coordinates), each of

* ‖g‖ ≥ √d + t, and ‖g‖ ≤ d/√(d+1) − t, has probability at most exp(−t²/2),
* |gᵢ| ≥ t for some i has probability at most d·exp(−t²/2).

An update outside of C + zC times these bounds is rejected. With t² = 2 ln(3/p), for coordinates
t² = 2 ln(3d/p), an honest update is rejected with probability at most p, whatever its data. Below
the lower bound the site added too little noise, and the released ε would not hold.

What remains: a vector within these bounds, in any direction, can't be told from noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.protocol import State
from nufed.errors import InputError, RunError, TrainingError, require
from nufed.flower.app.epsilon import (
    Round,
    is_count,
    is_positive,
    max_releases,
    released_epsilon,
    server_epsilon,
)
from nufed.flower.app.payload import RELEASE, read_release
from nufed.flower.logs import LOG

DRAWS_PER_NORMAL = 4  # Gaussian draws summed into one noise value
FALSE_REJECTION = 1e-20  # upper bound on the probability that an honest update is rejected
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


@dataclass(frozen=True)
class Privacy:
    """Clipping and noise at the sites, and privacy budgets.

    Args:
        clip: clipping norm C of a site's change, over all its vectors jointly.
        noise: noise multiplier z (standard deviation / clip).
        delta: the probability δ with which epsilon may fail; below 1 / agents.
        epsilon: the budget of the released models; None: unlimited.
        epsilon_server: the budget of a site against the server; None: unlimited.
        scores: whether sites still send their scores, which epsilon does not cover.
        summed: the fewest updates that the server sees only the sum of (secure aggregation).
    """

    clip: float
    noise: float
    delta: float = 1e-5
    epsilon: float | None = None
    epsilon_server: float | None = None
    scores: bool = False
    summed: int = 1

    @property
    def server_noise(self) -> float:
        """The noise multiplier of what the server sees: √``summed``·z."""
        return self.noise * math.sqrt(self.summed)

    def __post_init__(self) -> None:
        for name in ("clip", "noise", "epsilon", "epsilon_server"):
            value = getattr(self, name)
            if value is not None or name in ("clip", "noise"):
                require(is_positive(value), name, value, "must be a number above 0")
        ok = is_positive(self.delta) and self.delta < 1
        require(ok, "delta", self.delta, "must be above 0 and below 1")


def protect(vectors: State, received: State, privacy: Privacy) -> State:
    """The vectors with their change from those received clipped and noised.

    The guarantee holds for real numbers. Floating-point numbers have gaps, and the set of possible
    outputs depends on the change itself (Mironov 2012). Mitigations, neither of them a proof: every
    noise value is the sum of four draws, which is hard to invert (Holohan & Braghin 2021), and the
    double-precision result is rounded to the vector's dtype.

    Raises:
        InputError: the vectors do not match those received.
        TrainingError: a value is non-finite, so nothing may leave the site.
    """
    for name, vector in vectors.items():
        if name not in received or received[name].shape != vector.shape:
            had = tuple(received[name].shape) if name in received else "nothing"
            raise InputError(
                f"{name!r} has shape {tuple(vector.shape)}, but the site received {had}: with "
                "[privacy] an algorithm may only send vectors that it receives, in the same shapes"
            )
    before = {name: received[name].detach().cpu().double() for name in vectors}
    changes = {name: v.detach().cpu().double() - before[name] for name, v in vectors.items()}
    protected = {}
    for name, change in clip_jointly(changes, privacy.clip).items():
        noise = privacy.noise * privacy.clip * system_normals(change.numel()).reshape(change.shape)
        protected[name] = (before[name] + (change + noise)).to(vectors[name])
        if not protected[name].isfinite().all():
            raise TrainingError(f"{name!r} with its noise is too large for {vectors[name].dtype}")
    return protected


def clip_jointly(changes: State, clip: float) -> State:
    """The changes, scaled by one factor so that their joint norm is at most ``clip``."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(c)) for c in changes.values()))
    if not math.isfinite(norm):
        raise TrainingError(
            "the site's change is non-finite, so nothing is sent: lower meta_lr or adapt_lr"
        )
    factor = min(1.0, clip / norm) if norm else 1.0
    return {name: change * factor for name, change in changes.items()}


def system_normals(count: int) -> Tensor:
    """Independent standard normal draws from the system's entropy, never from a seed."""
    total = np.zeros(count)
    for _ in range(DRAWS_PER_NORMAL):
        bits = np.frombuffer(os.urandom(16 * count), np.uint64) >> np.uint64(11)
        first, second = bits.reshape(2, count) * 2.0**-53
        total += np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * np.pi * second)  # Box & Muller
    return torch.from_numpy(total / math.sqrt(DRAWS_PER_NORMAL))


def implausible(vectors: State, received: State, privacy: Privacy) -> str | None:
    """Why vectors can't be those received plus a clipped change and noise; None: they can be.

    None also for vectors that :func:`nufed.server.checks.examine` rejects.
    """
    if not vectors or vectors.keys() - received.keys():
        return None
    for name, vector in vectors.items():
        ok = isinstance(vector, Tensor) and vector.shape == received[name].shape
        if not ok or not vector.isfinite().all():
            return None
    changes = torch.cat([(v.double() - received[n].double()).flatten() for n, v in vectors.items()])
    norm, largest = float(changes.norm()), float(changes.abs().max())
    dimension, clip, noise = changes.numel(), privacy.clip, privacy.noise * privacy.clip
    margin = math.sqrt(2 * math.log(3 / FALSE_REJECTION))
    most = clip + noise * (math.sqrt(dimension) + margin)
    least = noise * (dimension / math.sqrt(dimension + 1) - margin) - clip
    spread = math.sqrt(2 * math.log(3 * dimension / FALSE_REJECTION))
    most_coordinate = clip + noise * spread
    rounding = _rounding(vectors, received, most)
    for value, bound, wrong, what in (
        (norm, most, norm > most + rounding, "norm {}, above {}"),
        (norm, least, norm < least - rounding, "norm {}, below {}"),
        (largest, most_coordinate, largest > most_coordinate + rounding, "a number {}, above {}"),
    ):
        if wrong:
            return (
                f"its change has {what.format(f'{value:.4g}', f'{bound:.4g}')}: clipping to "
                f"{clip:g} and noise {privacy.noise:g} give that with probability below "
                f"{FALSE_REJECTION:g}"
            )
    return None


def _rounding(vectors: State, received: State, most: float) -> float:
    """Upper bound on the norm of the error of rounding vectors to their dtype at the site."""
    return sum(
        torch.finfo(v.dtype).eps * (float(received[n].double().norm()) + most)
        for n, v in vectors.items()
    )


@dataclass(frozen=True)
class Spent:
    """The epsilon of the released models, and the largest of any site against the server."""

    released: float
    server: float


@dataclass(frozen=True)
class Ledger:
    """The privacy that a run has spent so far.

    ``rounds`` counts the rounds by their sizes. ``releases`` counts every agent's noisy updates by
    the id of its site's store: a site without a store creates one with a random id, and counts in
    it. So an update sent again costs nothing, and one recomputed because the store was lost is
    charged. These counts are the sites' claims. ``requests`` counts the requests for an update that
    the server sent to each agent, none of which yields more than one update: an agent is charged
    with at most as many.
    """

    noise: float
    rounds: Mapping[Round, int] = field(default_factory=dict)
    releases: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    requests: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(is_positive(self.noise), "noise", self.noise, "must be a number above 0")
        counts = [*self.rounds.values(), *self.requests.values()]
        for agent in (*self.releases, *self.requests):
            require(is_count(agent), "agent", agent, "must be a whole number, 0 or more")
        for stores in self.releases.values():
            for store in stores:
                ok = isinstance(store, str) and 0 < len(store) <= 64
                require(ok, "store", store, "must be a string of 1 to 64 characters")
            counts += stores.values()
        for count in counts:
            require(is_count(count) and count > 0, "count", count, "must be 1 or more")

    def with_round(self, agents: int, cohort: int, accepted: int) -> Ledger:
        """The ledger after a model was aggregated from ``accepted`` updates."""
        taken = Round(agents, cohort, accepted)
        return replace(self, rounds={**self.rounds, taken: self.rounds.get(taken, 0) + 1})

    def with_requests(self, agents: Iterable[int]) -> Ledger:
        """The ledger after a request for an update was sent to each of these agents."""
        sent = {agent: self.requests.get(agent, 0) + 1 for agent in agents}
        return replace(self, requests={**self.requests, **sent})

    def with_release(self, agent: int, store: str, count: int) -> Ledger:
        """The ledger after an update that its site reports as the ``count``-th from this store."""
        require(is_count(count) and count > 0, "count", count, "must be 1 or more")
        stores = self.releases.get(agent, {})
        stores = {**stores, store: max(count, stores.get(store, 0))}
        return replace(self, releases={**self.releases, agent: stores})

    def joined(self, other: Ledger) -> Ledger:
        """The later of two ledgers of one run: no count of it ever falls."""

        def most(one: Mapping[Any, int], two: Mapping[Any, int]) -> dict[Any, int]:
            return {key: max(one.get(key, 0), two.get(key, 0)) for key in {**one, **two}}

        stores = {
            agent: most(self.releases.get(agent, {}), other.releases.get(agent, {}))
            for agent in {**self.releases, **other.releases}
        }
        rounds, requests = most(self.rounds, other.rounds), most(self.requests, other.requests)
        return replace(self, rounds=rounds, releases=stores, requests=requests)

    def released_by(self, agent: int) -> int:
        """Number of an agent's noisy updates, as its site claims."""
        return sum(self.releases.get(agent, {}).values())

    def charged_to(self, agent: int) -> int:
        """Number of an agent's noisy updates that can have arrived: claimed, and requested."""
        return min(self.released_by(agent), self.requests.get(agent, 0))

    def spent(self, privacy: Privacy) -> Spent:
        """Both epsilons at the privacy's delta."""
        if privacy.noise != self.noise:
            raise InputError(
                f"noise = {privacy.noise}, but the rounds so far had {self.noise}: set that, or "
                "start a new run"
            )
        most = max(map(self.charged_to, self.releases), default=0)
        return Spent(
            released_epsilon(self.noise, self.rounds, privacy.delta),
            server_epsilon(privacy.server_noise, most, privacy.delta),
        )

    def as_json(self) -> dict[str, Any]:
        """The record stored in a checkpoint."""
        return {
            "noise": self.noise,
            "rounds": [[r.agents, r.cohort, r.accepted, n] for r, n in self.rounds.items()],
            "releases": {str(agent): dict(stores) for agent, stores in self.releases.items()},
            "requests": {str(agent): count for agent, count in self.requests.items()},
        }

    @classmethod
    def from_json(cls, record: Any) -> Ledger:
        """Restore a ledger from :meth:`as_json`; a damaged record is refused."""
        try:
            names = ("noise", "rounds", "releases", "requests")
            noise, rows, releases, requests = (record[name] for name in names)
            rounds = {Round(*sizes): times for *sizes, times in rows}
            stores = {int(agent): dict(counts) for agent, counts in releases.items()}
            ledger = cls(noise, rounds, stores, {int(a): n for a, n in requests.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"the privacy ledger is damaged: {error}") from error
        if ledger.as_json() != record:
            raise RunError("the privacy ledger is damaged: duplicate or unexpected entries")
        return ledger


def planned(privacy: Privacy, agents: int, cohort: int, rounds: int) -> Spent:
    """What rounds without failures will spend; for ``server`` with :func:`max_releases` updates."""
    by_sizes = {Round(agents, cohort, cohort): rounds}
    most = max_releases(agents, cohort, rounds)
    return Spent(
        released_epsilon(privacy.noise, by_sizes, privacy.delta),
        server_epsilon(privacy.server_noise, most, privacy.delta),
    )


def check_plan(privacy: Privacy, agents: int, cohort: int, rounds: int) -> Spent:
    """The planned spending; refused if it exceeds a budget."""
    allowed = f"must be below 1/agents = {1 / agents:.3g}, or it protects no single site"
    require(privacy.delta * agents < 1, "delta", privacy.delta, allowed)
    spent = planned(privacy, agents, cohort, rounds)
    for name, epsilon, of in (
        ("epsilon", spent.released, "of the released model"),
        ("epsilon_server", spent.server, "of a site against the server"),
    ):
        budget = getattr(privacy, name)
        if budget is not None and epsilon > budget:
            raise InputError(
                f"{name} = {budget:g}: {rounds} rounds with {cohort} of {agents} agents and noise "
                f"{privacy.noise:g} come to {epsilon:.4g} {of}; plan fewer rounds, more noise, a "
                "larger delta or a larger budget"
            )
    return spent


def in_words(spent: Spent, privacy: Privacy) -> str:
    """The planned spending, and what it means."""
    return (
        f"epsilon will be {spent.released:.3g} for whoever sees the released models and "
        f"{spent.server:.3g} against the server, if all sites reply: with any one site's data "
        "replaced by other data, nothing that they see becomes more than e^epsilon times as "
        f"likely, except with probability {privacy.delta:g}; 1 is strong, 10 is weak, and 50 is "
        "meaningless"
    )


def check_round(privacy: Privacy, ledger: Ledger, agents: int, cohort: int, accepted: int) -> None:
    """Refuse a round whose model would exceed the budget of the released models.

    ``accepted`` is the cohort size before requests are sent, and the actual number before the model
    is aggregated.
    """
    epsilon = ledger.with_round(agents, cohort, accepted).spent(privacy).released
    if privacy.epsilon is not None and epsilon > privacy.epsilon:
        raise TrainingError(
            f"a round with {accepted} updates would bring epsilon of the released model to "
            f"{epsilon:.4g}, above the budget of {privacy.epsilon:g}: training stops at the "
            "previous model"
        )


def check_release(privacy: Privacy, releases: int) -> None:
    """Refuse, at a site, an update after ``releases`` others that would exceed its budget."""
    if privacy.epsilon_server is None:
        return
    epsilon = server_epsilon(privacy.server_noise, releases + 1, privacy.delta)
    if epsilon > privacy.epsilon_server:
        raise TrainingError(
            f"another noisy update after {releases} would bring this site's epsilon against the "
            f"server to {epsilon:.4g}, above its budget of {privacy.epsilon_server:g}"
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
