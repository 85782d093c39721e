"""What the server asks a site to do, and the state that the site does it from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import RecordDict
from safetensors.torch import save

from nufed.algorithms.compression import without_residuals
from nufed.algorithms.protocol import State
from nufed.errors import InputError, shown
from nufed.files import sha256
from nufed.flower.app.payload import read_about, read_int, read_run, read_vectors
from nufed.flower.app.site import Site
from nufed.flower.app.site_store import load_record

LOG = logging.getLogger("nufed")


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
    received = read_vectors(request, site.plan.received_like())
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
