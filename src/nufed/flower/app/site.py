"""One site: its node's configuration, its data, its state, and the server's requests.

Between rounds its state is in one sealed file. A site can't know whether the server accepted its
last update: it may have been late, rejected, or from a round that was retried or redone after a
crash. So it stores two states: before and after its last update. The server names the last round
whose update of this site it accepted, and the site continues from the state of that round.

A site with noisy updates stores the last one before sending it: a repeated request gets identical
bytes, which reveal nothing new. It also counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import RecordDict
from safetensors.torch import save

from nufed.algorithms.compression import without_residuals
from nufed.algorithms.protocol import AgentContext, Cost, State
from nufed.data import Federation, Samples, as_samples, check_single_sample, prepare, site_split
from nufed.data.samples import input_ranges, scale_warnings
from nufed.errors import InputError, RunError, TrainingError, require, shown
from nufed.flower.app.epsilon import is_positive
from nufed.flower.app.payload import OWN, read_about, read_int, read_run, read_vectors
from nufed.flower.app.plan import Plan
from nufed.flower.logs import LOG, event
from nufed.lab.files import make_private, read_sealed, sha256, write_sealed
from nufed.server import Downlink


def default_folder() -> Path:
    """The default folder of sites' states."""
    return Path.home() / ".nufed" / "sites"


@dataclass(frozen=True)
class Release:
    """The last noisy update, and the number of releases.

    Args:
        store: random id of this file, so that the loss of a file is detected.
        noise: noise multiplier of the updates.
        count: number of updates released since the file was created.
        before: number of releases that the server knew of at that time.
        question: digest of the request that the last one answers.
        cost: its computational cost.
        vectors: the vectors sent.
    """

    store: str
    noise: float
    count: int = 0
    before: int = 0
    question: str = ""
    cost: Cost = field(default_factory=Cost)
    vectors: State = field(default_factory=dict)

    def after(self, question: str, vectors: State, cost: Cost) -> Release:
        """The record after one more noisy update."""
        return replace(self, count=self.count + 1, question=question, vectors=vectors, cost=cost)


@dataclass(frozen=True)
class SiteRecord:
    """The states before and after the last update, with their rounds; with privacy also the last
    release."""

    rounds: tuple[int, int] = (0, 0)
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    release: Release | None = None

    def state(self, taken: int) -> State | None:
        """The state after round ``taken``; None if it is not stored."""
        return {self.rounds[0]: self.before, self.rounds[1]: self.after}.get(taken) or None

    def with_update(self, taken: int, before: State, round: int, after: State) -> SiteRecord:
        """The record after an update in ``round``."""
        return replace(self, rounds=(taken, round), before=before, after=after)


def load_record(path: Path, like: State) -> SiteRecord:
    """The file's record, with states that have the names and shapes of ``like``.

    A missing or damaged file, or one of another model, gives an empty record.
    """
    try:
        file = read_sealed(path)
    except RunError:
        return SiteRecord()
    about = file.about
    parts: dict[str, State] = {"before": {}, "after": {}, "release": {}}
    for key, tensor in file.tensors.items():
        part, _, name = key.partition("/")
        parts[part] = {**parts[part], name: tensor}
    vectors, fields = parts.pop("release"), about["release"]
    fits = {part: state if _same_layout(state, like) else {} for part, state in parts.items()}
    release = None
    if fields:
        release = Release(**{**fields, "cost": Cost(**fields["cost"])}, vectors=vectors)
    return SiteRecord(tuple(about["rounds"]), **fits, release=release)


def save_record(path: Path, record: SiteRecord) -> None:
    """Write the file atomically."""
    release = record.release
    parts = {"before": record.before, "after": record.after}
    if release:
        parts["release"] = release.vectors
    tensors = {
        f"{part}/{name}": tensor for part, state in parts.items() for name, tensor in state.items()
    }
    fields = asdict(replace(release, vectors={})) if release else {}
    fields.pop("vectors", None)
    try:
        make_private(path.parent.parent)  # the site's folder
        make_private(path.parent)  # the run's, in it
    except OSError as error:
        raise RunError(f"{path.parent} can't be created: {error.strerror}") from error
    write_sealed(path, {"rounds": record.rounds, "release": fields}, tensors)


def _same_layout(state: State, like: State) -> bool:
    return state.keys() == like.keys() and all(
        (state[k].shape, state[k].dtype) == (like[k].shape, like[k].dtype) for k in like
    )


PARTITION_ID = "partition-id"
Load: TypeAlias = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Site:
    """One agent: its node's config, and its own data, loaded on first use."""

    plan: Plan
    config: Mapping[str, Any]
    load: Load
    notes: dict[str, Any] = field(default_factory=dict)  # for its activity record

    @cached_property
    def agent(self) -> int:
        """The agent's number."""
        agent, agents = self.config.get(PARTITION_ID), self.plan.agents
        if not isinstance(agent, int) or isinstance(agent, bool) or not 0 <= agent < agents:
            raise InputError(
                f"{PARTITION_ID} = {shown(agent)} in the node's config: must be the site's own "
                f"number, 0 … {agents - 1}"
            )
        return agent

    @property
    def name(self) -> str:
        """Its display name."""
        return str(self.config.get("name", self.agent))

    @property
    def folder(self) -> Path:
        """The folder of its state."""
        return Path(self.config.get("folder") or default_folder())

    @property
    def key(self) -> Path | None:
        """Its private key; None: replies are not signed."""
        key = self.config.get("key")
        return Path(key) if key else None

    @property
    def limit(self) -> float | None:
        """Its budget of epsilon against the server, over all runs; None: unlimited."""
        limit: float | None = self.config.get("epsilon")
        if limit is not None:
            require(is_positive(limit), "epsilon", limit, "in the node's config: must be above 0")
        return limit

    def releases_in_other_runs(self, file: Path, noise: float) -> int:
        """Number of updates at this noise that equals the privacy loss of all other runs."""
        others = [other for other in self.folder.glob(f"*/agent-{self.agent}") if other != file]
        records = {other: load_record(other, {}) for other in others}
        for other, record in records.items():
            if record == SiteRecord():
                LOG.error(
                    "%s is damaged, so this site's releases in that run can't be counted: restore "
                    "a copy, or remove it and lower the limit by what that run spent",
                    other,
                )
                raise TrainingError(
                    "it has a privacy limit, and its release count of another run is lost"
                )
        releases = [record.release for record in records.values() if record.release]
        return math.ceil(sum(r.count * (noise / r.noise) ** 2 for r in releases))

    @cached_property
    def federation(self) -> Federation:
        """A federation that holds only this agent's part."""
        plan, samples = self.plan, self.samples
        split = site_split(
            len(samples),
            self.agent,
            plan.seed,
            validation=plan.validation,
            test=plan.test,
            name=self.name,
        )
        parts = {"training": split.train, "validation": split.validation, "test": split.test}
        sizes = {part: len(rows[self.agent]) for part, rows in parts.items()}
        self.notes["samples"] = sizes
        listed = ", ".join(f"{size} {part}" for part, size in sizes.items() if size)
        event("data loaded: %d samples (%s)", len(samples), listed, event="data loaded", **sizes)
        augment = None if plan.augment is None else plan.augment(samples)
        federation = Federation(samples, split, plan.small_agents, plan.scored_on, augment)
        method = plan.method or type(plan.algorithm).__name__
        check_single_sample(federation, self.agent, method, plan.algorithm, plan.objective)
        return federation

    def context(self, round: int = 0) -> AgentContext:
        """What the agent knows in a round of training; 0: at evaluation."""
        federation, plan = self.federation, self.plan
        if round:
            batches = federation.batches(self.agent, plan.seed, "train", round)
        else:
            batches = federation.batches(self.agent, plan.seed, "evaluate")
        return AgentContext.of(plan.context(round), plan.objective, batches, batches.samples)

    @cached_property
    def samples(self) -> Samples:
        """This site's data, which matches the federation's."""
        samples = self._load()
        self.plan.check_data(samples)
        return samples

    def read(self) -> Samples:
        """This site's data, not compared with the federation's; any error is raised."""
        classes = self.plan.like.classes if self.plan.like else ()
        samples = self._prepared(as_samples(self.load(self.config), classes))
        samples.check_finite(self.plan.objective.dtype)
        return samples

    def _prepared(self, samples: Samples) -> Samples:
        """Samples of a table as inputs of the model, in the federation's way."""
        how = self.plan.preparation
        if bool(samples.columns) != (how is not None):
            raise InputError(
                "this site's data is a table with columns by name, and the configuration has no "
                "[[data.prepare.columns]]: make them with `nufed data prepare`"
                if samples.columns
                else "the configuration has [[data.prepare.columns]], and this site's data has no "
                "columns by name: load it with nufed.data.as_table"
            )
        if how is None:
            return samples
        prepared, notes = prepare(samples, how)
        for note in notes:
            LOG.warning("at this site, %s", note)
        return prepared

    def _load(self) -> Samples:
        """The same; details of an error are logged at the site only."""
        try:
            samples = self.read()
            for sentence in scale_warnings(samples, input_ranges(samples)):
                LOG.warning("at this site, %s", sentence)
            return samples
        except Exception as error:
            LOG.exception("this site's data can't be loaded")
            raise InputError(
                f"its data can't be loaded ({type(error).__name__}); see the site's log"
            ) from None


@dataclass(frozen=True)
class Task:
    """A request of the server, and the state that the site starts from.

    ``began`` is the round of ``state``; 0: the initial state. ``released`` is the number of noisy
    updates of this agent that the server knows of. ``method`` is that of the plan; each has a
    ``file`` of its own. ``more`` holds further fields, not checked yet.
    """

    run: str
    round: int
    released: int
    received: State
    state: State
    began: int
    file: Path
    method: str
    more: Mapping[str, object]

    @property
    def kept(self) -> State | None:
        """The state of an agent that took part in training; None for a newcomer."""
        return without_residuals(self.state) if self.began else None

    @property
    def releases(self) -> Path:
        """The file of the last noisy update and of their number, over all methods of the run."""
        return self.file.parents[2 if self.method else 0] / self.file.name

    @property
    def digest(self) -> str:
        """Digest that identifies this request."""
        what = f"{self.run}/{self.round}/" + (f"{self.method}/" if self.method else "")
        return sha256(what.encode() + save(dict(self.received)))


def read_task(site: Site, request: RecordDict, *more: str) -> Task:
    """The task in a request, checked; ``more`` names its further fields."""
    if site.limit is not None and site.plan.privacy is None:
        raise InputError(
            f"this site's limit is epsilon = {site.limit:g}, but the federation's configuration "
            "has no [privacy], so its privacy loss is unbounded"
        )
    run, agent, round, taken, released, *rest = read_about(
        request, "run", "agent", "round", "taken", "released", *more
    )
    if agent != site.agent:
        raise InputError(f"the request is for site {shown(agent)}, but this is site {site.agent}")
    like = Downlink.of(site.plan.received_like())
    received, individual = read_vectors(request, like.shared), like.own(None)
    if individual:
        received = {**received, **read_vectors(request, individual, OWN)}
    taken = read_int(taken, "taken", 10**9)
    run = read_run(run)
    method, folder = site.plan.method, site.folder / run
    file = (folder / "methods" / method if method else folder) / f"agent-{site.agent}"
    initial = site.plan.initial_state(received)
    kept = load_record(file, initial).state(taken) if initial and taken else None
    if initial and taken and kept is None:
        LOG.warning(
            "%s has no state of round %d: this site restarts from the initial state", file, taken
        )
    began = taken if kept is not None or not initial else 0
    return Task(
        run,
        read_int(round, "round", 10**9),
        read_int(released, "released", 10**9),
        received,
        kept or initial,
        began,
        file,
        method,
        dict(zip(more, rest, strict=True)),
    )
