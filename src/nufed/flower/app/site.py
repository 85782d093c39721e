"""One site: its node's configuration and its own data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from nufed.data import Federation, Samples, as_samples, site_split
from nufed.data.input_range import input_ranges, scale_warnings
from nufed.errors import InputError, TrainingError, require, shown
from nufed.flower.app.epsilon import is_positive
from nufed.flower.app.plan import Plan
from nufed.flower.app.site_store import SiteRecord, default_folder, load_record
from nufed.flower.logs import event

LOG = logging.getLogger("nufed")
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
        """Where it stores its state."""
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
        return Federation(samples, split, plan.small_agents, plan.scored_on)

    @cached_property
    def samples(self) -> Samples:
        """This site's data, which matches the federation's."""
        samples = self._load()
        self.plan.check_data(samples)
        return samples

    def read(self) -> Samples:
        """This site's data, not compared with the federation's; any error is raised."""
        classes = self.plan.like.classes if self.plan.like else ()
        samples = as_samples(self.load(self.config), classes)
        samples.check_finite(self.plan.objective.dtype)
        return samples

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
