"""Client-level differential privacy: what a site sends says little about its data, and how little.

A site clips its change to length C, adds Gaussian noise of standard deviation z·C to every number,
and sends that; the server takes the uniform mean. With any one site's data replaced by other data,
nothing that is seen becomes more than e^ε times as likely, but for a probability δ. Two numbers are
kept, as two kinds of people look:

* ``released``: those who see the models of all rounds, of a server that can be trusted. The sum of
  ``a`` updates has noise √a·z·C, and nobody knows who was in the cohort. This counts on all ``a``
  sites adding their noise, and on cohorts that are not drawn from a seed that others know.
* ``server``: the server, and who reads along there, sees every update and whose it is. Each of a
  site's n updates has noise z·C, and no cohort hides it.

Both are about vectors alone, and hold if who answers does not depend on data. ``released`` is not
for weights by samples, other ways to combine, or updates that are left out for their length.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nufed.algorithm import State
from nufed.errors import InputError, RunError, TrainingError, require
from nufed.flower.epsilon import (
    Round,
    is_above_0,
    is_count,
    most_releases,
    released_epsilon,
    server_epsilon,
)

SUMMED = 4  # normal numbers that make one


@dataclass(frozen=True)
class Privacy:
    """What sites do before anything leaves them, and what may be spent.

    Args:
        clip: the longest change C that a site sends, over all its vectors together.
        noise: the standard deviation of the noise on every number, in units of ``clip``.
        delta: the probability δ with which epsilon may fail; below 1 / agents.
        epsilon: the budget of the released models; None: any.
        epsilon_server: the budget of a site against the server; None: any.
        scores: whether sites still send their scores, which no epsilon covers.
    """

    clip: float
    noise: float
    delta: float = 1e-5
    epsilon: float | None = None
    epsilon_server: float | None = None
    scores: bool = False

    def __post_init__(self) -> None:
        for name in ("clip", "noise", "epsilon", "epsilon_server"):
            value = getattr(self, name)
            if value is not None or name in ("clip", "noise"):
                require(is_above_0(value), name, value, "must be a number above 0")
        ok = is_above_0(self.delta) and self.delta < 1
        require(ok, "delta", self.delta, "must be above 0 and below 1")


def protect(vectors: State, received: State, privacy: Privacy) -> State:
    """What a site may send: the vectors, with their change from those received clipped and noisy.

    The guarantee is about real numbers. Floating-point numbers have gaps, and which of them can
    come out depends on the change itself (Mironov 2012). Here every noise is the sum of four, which
    makes it hard to work backwards (Holohan & Braghin 2021), and what is added in double precision
    is rounded to the vector's own; neither is a proof.

    Raises:
        InputError: the vectors are not like those received.
        TrainingError: a number is not finite, so that nothing may leave the site.
    """
    for name, vector in vectors.items():
        if name not in received or received[name].shape != vector.shape:
            had = tuple(received[name].shape) if name in received else "nothing"
            raise InputError(
                f"{name!r} has shape {tuple(vector.shape)}, but the site received {had}: with "
                "privacy an algorithm may only send vectors that it receives, in the same shapes"
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
    """The changes, made shorter by one factor if all together are longer than ``clip``."""
    length = math.hypot(*(float(torch.linalg.vector_norm(c)) for c in changes.values()))
    if not math.isfinite(length):
        raise TrainingError(
            "the site's change is not finite, so it sends nothing: lower meta_lr or adapt_lr"
        )
    share = min(1.0, clip / length) if length else 1.0
    return {name: change * share for name, change in changes.items()}


def system_normals(count: int) -> Tensor:
    """Independent standard normal numbers from the system's entropy, never from a seed."""
    total = np.zeros(count)
    for _ in range(SUMMED):
        bits = np.frombuffer(os.urandom(16 * count), np.uint64) >> np.uint64(11)
        first, second = bits.reshape(2, count) * 2.0**-53
        total += np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * np.pi * second)  # Box & Muller
    return torch.from_numpy(total / math.sqrt(SUMMED))


@dataclass(frozen=True)
class Spent:
    """The epsilon of the released models, and of the site that showed the server most."""

    released: float
    server: float


@dataclass(frozen=True)
class Ledger:
    """What has been spent in a run so far.

    ``rounds`` says how often a round like this was taken. ``releases`` says for every agent, and
    every store that its site has had, how many noisy updates left it: the site makes up a store's
    name when it finds none, and counts in it. So an update that is sent again costs nothing, and
    one that is made again because the store was lost is charged.
    """

    noise: float
    rounds: Mapping[Round, int] = field(default_factory=dict)
    releases: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(is_above_0(self.noise), "noise", self.noise, "must be a number above 0")
        counts = [*self.rounds.values()]
        for agent, stores in self.releases.items():
            require(is_count(agent), "agent", agent, "must be a whole number, 0 or more")
            for store in stores:
                ok = isinstance(store, str) and 0 < len(store) <= 64
                require(ok, "store", store, "must be a name of up to 64 letters")
            counts += stores.values()
        for count in counts:
            require(is_count(count) and count > 0, "count", count, "must be 1 or more")

    def with_round(self, agents: int, cohort: int, accepted: int) -> Ledger:
        """After a model was made of ``accepted`` updates."""
        taken = Round(agents, cohort, accepted)
        return replace(self, rounds={**self.rounds, taken: self.rounds.get(taken, 0) + 1})

    def with_release(self, agent: int, store: str, count: int) -> Ledger:
        """After an update of which its site says that it is the ``count``-th from this store."""
        require(is_count(count) and count > 0, "count", count, "must be 1 or more")
        stores = self.releases.get(agent, {})
        stores = {**stores, store: max(count, stores.get(store, 0))}
        return replace(self, releases={**self.releases, agent: stores})

    def released_by(self, agent: int) -> int:
        """How many noisy updates of an agent the server may have seen."""
        return sum(self.releases.get(agent, {}).values())

    def spent(self, privacy: Privacy) -> Spent:
        """Both epsilons at the privacy's delta."""
        if privacy.noise != self.noise:
            raise InputError(
                f"noise = {privacy.noise}, but the rounds so far had {self.noise}: use that one, "
                "or begin another run"
            )
        most = max(map(self.released_by, self.releases), default=0)
        return Spent(
            released_epsilon(self.noise, self.rounds, privacy.delta),
            server_epsilon(self.noise, most, privacy.delta),
        )

    def as_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {
            "noise": self.noise,
            "rounds": [[r.agents, r.cohort, r.accepted, n] for r, n in self.rounds.items()],
            "releases": {str(agent): dict(stores) for agent, stores in self.releases.items()},
        }

    @classmethod
    def from_json(cls, record: Any) -> Ledger:
        """The ledger of which :meth:`as_json` made a record; a damaged one is refused."""
        try:
            noise, rows, releases = (record[name] for name in ("noise", "rounds", "releases"))
            rounds = {Round(*sizes): times for *sizes, times in rows}
            ledger = cls(noise, rounds, {int(a): dict(s) for a, s in releases.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"the privacy ledger is damaged: {error}") from error
        if ledger.as_json() != record:
            raise RunError("the privacy ledger is damaged: it says things twice, or other things")
        return ledger


def planned(privacy: Privacy, agents: int, cohort: int, rounds: int) -> Spent:
    """What rounds without failures will spend, with the most updates that a site will be asked for
    but for a chance of one in a thousand."""
    often = {Round(agents, cohort, cohort): rounds}
    most = most_releases(agents, cohort, rounds)
    return Spent(
        released_epsilon(privacy.noise, often, privacy.delta),
        server_epsilon(privacy.noise, most, privacy.delta),
    )


def check_plan(privacy: Privacy, agents: int, cohort: int, rounds: int) -> Spent:
    """What is planned, unless it goes over a budget."""
    allowed = f"must be below 1/agents = {1 / agents:.3g}, or it promises nothing to a single site"
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


def check_round(privacy: Privacy, ledger: Ledger, agents: int, cohort: int, accepted: int) -> None:
    """Refuse a round whose model would go over the budget of the released models.

    Before a cohort is asked ``accepted`` is its size; before the model is made, the real number.
    """
    epsilon = ledger.with_round(agents, cohort, accepted).spent(privacy).released
    if privacy.epsilon is not None and epsilon > privacy.epsilon:
        raise TrainingError(
            f"a round with {accepted} updates would bring epsilon of the released model to "
            f"{epsilon:.4g}, above the budget of {privacy.epsilon:g}: training ends with the model "
            "before it"
        )


def check_release(privacy: Privacy, releases: int) -> None:
    """Refuse, at a site that sent so many noisy updates, one that would go over its budget."""
    if privacy.epsilon_server is None:
        return
    epsilon = server_epsilon(privacy.noise, releases + 1, privacy.delta)
    if epsilon > privacy.epsilon_server:
        raise TrainingError(
            f"one noisy update more than {releases} would bring this site's epsilon against the "
            f"server to {epsilon:.4g}, above the {privacy.epsilon_server:g} of its budget"
        )
