"""Tries an app on one site's data, without a server: what would fail in a run fails here.

It also runs an app in Flower's simulation, which starts Ray on this machine. nufed's simulator is
much faster and bit-identical; this is for testing an app as Flower runs it.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.simulation import run_simulation
from torch import Tensor

from nufed.algorithms.local_training import with_one_step
from nufed.algorithms.protocol import AgentResult, AgentUpdate, State
from nufed.data.samples import input_ranges, scale_warnings
from nufed.errors import InputError, in_short
from nufed.evaluate import training_loss
from nufed.flower.app.apps import App
from nufed.flower.app.payload import ARRAYS, content, method_record, size_of
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import check_plan, in_words
from nufed.flower.app.site import PARTITION_ID, Load, Site
from nufed.flower.secure_sum.messages import words_record
from nufed.flower.secure_sum.words import encode
from nufed.lab.config.devices import torch_threads
from nufed.server import MemoryStates, to_send
from nufed.server.incoming import screen


def load_app(folder: Path) -> App:
    """The federation defined in a directory's app.py."""
    if not (folder / "app.py").is_file():
        raise InputError(f"{folder} is not an app directory: it has no app.py")
    sys.path.insert(0, str(folder.resolve()))
    try:
        app = importlib.import_module("app").federation
    except Exception as error:  # any error in the user's files
        raise InputError(
            f"{folder / 'app.py'} can't be imported ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(app, App):
        raise InputError(f"{folder / 'app.py'}: `federation` must be a nufed.flower.App")
    return app


MIB = 2**20


class CheckResult(NamedTuple):
    """One result of the check; ``note``: a warning, a run would start."""

    name: str
    text: str
    note: bool = False

    def __str__(self) -> str:
        return f"{'note: ' if self.note else ''}{self.name}: {self.text}"


def check_configuration(app: App) -> Iterator[CheckResult]:
    """What an app trains and the epsilon it will spend; raises an error if it is invalid."""
    plans, config = app.plans(), app.checked
    plan = next(iter(plans.values()))
    yield CheckResult(
        "configuration",
        f"{config.name}: {', '.join(plans)}, {plan.rounds} rounds{' each' if plan.method else ''}, "
        f"{plan.agents} sites, {plan.cohort} per round; model of {plan.objective.size:,} "
        "parameters",
    )
    if app.measured:
        why = "sites send sums only: give both, the defaults of the classes are used"
        how = "a number comes from first gradients at the sites of the first round"
        text = f"meta_lr or adapt_lr is not given; {why if plan.hides_single_numbers else how}"
        yield CheckResult("step sizes", text, note=True)
    if plan.privacy:
        rounds = len(plans) * plan.rounds
        spent = check_plan(plan.privacy, len(plan.seen), plan.cohort, rounds)
        yield CheckResult("privacy", in_words(spent, plan.privacy))


def check_site(folder: Path, data: Path | None, number: int = 0) -> Iterator[CheckResult]:
    """Load the app and the data as a site does, and train one step; raises what is wrong.

    Args:
        folder: the app's directory, whose code is executed.
        data: the path that the site would be started with.
        number: its number.
    """
    app = load_app(folder)
    yield from check_configuration(app)
    plan = app.plan()
    with tempfile.TemporaryDirectory() as temporary, torch_threads(plan.threads):
        where = {} if data is None else {"data": str(data.absolute())}
        site = Site(plan, {PARTITION_ID: number, "folder": temporary, **where}, app.load)
        yield from _data(site, folder)
        yield from _training(site)
        for other in list(app.plans().values())[1:]:
            yield from _training(replace(site, plan=other))


def _data(site: Site, folder: Path) -> Iterator[CheckResult]:
    """Shapes, classes and the number of samples."""
    plan, agent = site.plan, site.agent
    try:
        samples = site.read()
    except Exception as error:  # any error in the user's function
        raise InputError(
            f"the data of site {agent} can't be loaded ({in_short(error)}): correct --data or the "
            f"function load of {folder}"
        ) from error
    plan.check_data(samples)
    yield CheckResult("input", f"{len(samples):,} samples of shape {list(samples.input_shape)}")
    for sentence in scale_warnings(samples, input_ranges(samples)):
        yield CheckResult("input", sentence, note=True)
    split = site.federation.split
    parts = {"training": split.train, "validation": split.validation, "test": split.test}
    sizes = {name: len(rows[agent]) for name, rows in parts.items()}
    yield CheckResult("parts", ", ".join(f"{size:,} {name}" for name, size in sizes.items()))
    classes = plan.like.classes if plan.like else samples.classes
    if not classes:
        yield CheckResult("targets", f"{samples.outputs} numbers each (regression)")
        return
    trained = samples.targets[split.train[agent]]
    of = dict(zip(classes, torch.bincount(trained, minlength=len(classes)).tolist(), strict=True))
    yield CheckResult(
        "classes", "training samples: " + ", ".join(f"{c} {n:,}" for c, n in of.items())
    )
    missing = [name for name, count in of.items() if not count]
    if missing:
        yield CheckResult("classes", f"no training sample of {', '.join(missing)}", note=True)


def _training(site: Site) -> Iterator[CheckResult]:
    """One local step of the first round, the size of its messages, and memory."""
    plan, agent = site.plan, site.agent
    server = plan.start()
    received = to_send(plan.algorithm, server)
    began = time.perf_counter()
    result = _one_step(site, received)
    seconds = time.perf_counter() - began
    after: State = {**received, **{k: v for k, v in result.vectors.items() if k in received}}
    first, then = (_loss(site, vectors) for vectors in (received, after))
    update = AgentUpdate(agent, 1, len(site.federation.split.train[agent]), result.vectors)
    replaced = {name: server[name] for name in plan.algorithm.sent_in(1)}
    _, rejected = screen([update], replaced, 1)
    if rejected:
        raise InputError(
            f"the server would leave out the update of site {agent} after one step, because "
            f"{rejected[0].reason}: lower meta_lr or adapt_lr, or scale the inputs"
        )
    of = f"{plan.method}, " if plan.method else ""
    yield CheckResult(
        f"{of}one step",
        f"training loss {first:.4g} before, {then:.4g} after one local step of {seconds:.2g} s",
    )
    request = content(received, run="0" * 32, agent=agent, round=1, taken=0, released=0)
    request.update(method_record(plan.method))
    down = size_of(request)
    about = {"agent": agent, "round": 1, "gradients": 1, "hvps": 0, "began": 0}
    reply, beside = content(result.vectors, samples=1, **about), ""
    if plan.site_keys:
        reply, beside = content(None, **about), ", beside the keys and shares of secure aggregation"
        reply[ARRAYS] = words_record(encode(result.vectors, replaced, plan.cohort))
    up = size_of(reply)
    yield CheckResult(
        f"{of}messages",
        f"{down:,} bytes to the site and {up:,} back, per round of training{beside}",
    )
    yield CheckResult("memory", _memory(site, plan, up))


def _one_step(site: Site, received: State) -> AgentResult:
    """The update of the first round after one local step."""
    plan, algorithm = site.plan, with_one_step(site.plan.algorithm)
    context = site.context(1)
    return algorithm.agent_update(context, received, algorithm.agent_init(plan.objective, received))


def _loss(site: Site, received: State) -> float:
    """The loss on the site's training part."""
    plan = site.plan
    loss, _ = training_loss(
        plan.algorithm,
        plan.objective,
        site.federation,
        [site.agent],
        received,
        MemoryStates(),
        plan.seed,
    )
    return loss


def _memory(site: Site, plan: Plan, up: int) -> str:
    """The peak of this process, which did what a site does, and an estimate for the server."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    tensors = [t for t in (site.samples.inputs, site.samples.targets) if isinstance(t, Tensor)]
    data = sum(t.nbytes for t in tensors)
    updates = 2 * plan.cohort * up  # every reply as received, and decoded
    return (
        f"peak of this check {peak / MIB:.0f} MiB, of which data {data / MIB:.1f} MiB; at the "
        f"server about {updates / MIB:.1f} MiB for the updates of a round"
    )


RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; avoids a warning
}


def simulate_app(folder: Path, out: Path, data: str | None = None) -> Path:
    """Run the app in ``folder`` with its configured number of sites; returns the run directory.

    ``data`` is the path of a site's data; ``{number}`` in it stands for the site's number.
    """
    federation = load_app(folder)
    if data is not None:
        federation = replace(federation, load=_from(federation.load, str(Path(data).absolute())))
    sites = federation.checked.data.agents
    paths = os.pathsep.join((str(folder.resolve()), os.environ.get("PYTHONPATH", "")))
    os.environ.update(RAY | {"PYTHONPATH": paths})  # Ray's processes import the app too
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets need a short path
        os.environ.setdefault("RAY_TMPDIR", short)
        run_simulation(
            federation.serving(out),
            federation.site,
            sites,
            backend_config={"client_resources": {"num_cpus": 1}},
        )
    return out


def _from(load: Load, data: str) -> Load:
    """``load`` with each site's data path filled in."""

    def load_numbered(site: Mapping[str, Any]) -> Any:
        return load({**site, "data": data.replace("{number}", str(site[PARTITION_ID]))})

    return load_numbered
