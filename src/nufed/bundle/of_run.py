"""Bundles of what a run trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nufed.algorithm import State
from nufed.algorithms import GMeta
from nufed.bundle.bundle import Bundle
from nufed.errors import InputError, RunError
from nufed.evaluate import summarise
from nufed.models import MODELS
from nufed.objective import Loss, Objective
from nufed.runs import Estimate, Run
from nufed.runs.build import LOSSES, call_named, find_named, loss_name
from nufed.runs.part import read_server
from nufed.runs.schema import OWN
from nufed.runs.trust import require_trust


def make_bundle(
    run: Run,
    method: str,
    seed: int | None = None,
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Loss | None = None,
    trust: bool = False,
) -> Bundle:
    """The meta-model that a run trained, as a bundle.

    Args:
        run: a finished run, as :func:`nufed.load_run` gives it.
        method: its name there.
        seed: which of its seeds; the first by default.
        model, loss: what was passed as objects to :func:`nufed.run`, again.
        trust: allow importing the functions that the run names, if it names any.
    """
    if method not in run.methods:
        raise InputError(f"method {method!r}: {run.path} has {', '.join(run.methods)}")
    given = [key for key, own in (("model.name", model), ("loss", loss)) if own is not None]
    require_trust(run.path, run.config, trust, given)
    name = loss_name(run.config, bool(run.inputs.get("classes")))
    if (run.config.model.name == OWN and model is None) or (name == OWN and loss is None):
        raise InputError(
            f"{run.path} was given its model or loss as objects: use the bundles that it left in "
            "bundles/, or nufed.make_bundle with model= and loss="
        )
    objective = Objective(
        _module(run, model),
        loss or find_named("loss", name, LOSSES),
        running_stats=run.config.model.running_stats,
    )
    return bundle_of(run, method, seed, objective)


def bundle_of(run: Run, method: str, seed: int | None, objective: Objective) -> Bundle:
    """The same, with the objective at hand."""
    seeds = list(run.methods[method])
    seed = seeds[0] if seed is None else seed
    if seed not in seeds:
        raise InputError(f"seed {seed}: {run.path} has {', '.join(map(str, seeds))}")
    algorithm = run.config.algorithms()[method]
    if not isinstance(algorithm, GMeta) or not can_be_bundled(run):
        raise InputError(
            f"{run.path} can't be bundled: a bundle is fed one array of numbers and fine-tuned by "
            "plain gradient steps"
        )
    inputs, config = run.inputs, run.config
    path = run.path / "methods" / method / f"seed-{seed}" / "model.safetensors"
    server = read_server(path, objective.size)
    name = loss_name(config, bool(inputs["classes"]))
    module = objective.module(server["model"])
    sizes = run.methods[method][seed].step_sizes
    scale = sizes.scale(shown_steps(run, method)) if sizes else None
    return Bundle.of(
        module,
        input_shape=tuple(inputs["shape"]),
        input_dtype=inputs["dtype"],
        scale=inputs["scale"],
        shift=inputs["shift"],
        classes=tuple(inputs["classes"]),
        adapt_lr=_rate(algorithm, server, module, scale or 1.0),
        lr_scale=scale,
        adapt_steps=shown_steps(run, method),
        batch_size=algorithm.batch_size,
        loss=objective.loss if name == OWN else name,
        build=None if config.model.name == OWN else config.model.name,
        args=_arguments(run),
        running_stats=config.model.running_stats,
        name=f"{config.name} {method}",
        trained=_trained(run, method, seed, algorithm),
        measured=_measured(run, method, seed),
    )


def can_be_bundled(run: Run) -> bool:
    """Whether its models are fed one array of a kind that bundles know."""
    return run.inputs.get("dtype") in ("uint8", "int32", "int64", "float32", "float64")


def shown_steps(run: Run, method: str) -> int:
    """The fine-tuning steps after which a method is shown."""
    return run.config.steps_of(method)[0]


def _module(run: Run, model: Callable[[], nn.Module] | nn.Module | None) -> nn.Module:
    dtype = getattr(torch, run.config.dtype)
    if isinstance(model, nn.Module):
        return model.to(dtype)
    with torch.random.fork_rng(devices=[]):
        made = model() if model else None
        named = made or call_named("model.name", run.config.model.name, MODELS, _arguments(run))
    module: nn.Module = named.to(dtype)
    return module


def _arguments(run: Run) -> dict[str, Any]:
    """The arguments that build the model, with the shapes of the data for those of nufed's."""
    if run.config.model.name not in MODELS:
        return run.config.model.args
    shapes = {"input_shape": run.inputs["shape"], "outputs": run.inputs["outputs"]}
    return {**shapes, **run.config.model.args}


def _rate(
    algorithm: GMeta, server: State, module: nn.Module, scale: float
) -> float | dict[str, float]:
    """``scale`` times the step size of training; learned ones by the names of their parameters."""
    if "log_rates" not in server:
        return scale * float(algorithm.adapt_lr)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if server["log_rates"].shape != (len(names),):
        raise RunError(f"the saved model has no learned step size for each of {', '.join(names)}")
    rates = (scale * server["log_rates"].exp()).tolist()
    return dict(zip(names, rates, strict=True))


def _trained(run: Run, method: str, seed: int, algorithm: GMeta) -> dict[str, Any]:
    config = run.config
    return {
        "method": method,
        "curvature": type(algorithm.curvature).__name__,
        "adapt_steps": algorithm.adapt_steps,
        "meta_lr": algorithm.meta_lr,
        "local_steps": algorithm.local_steps,
        "rounds": config.rounds,
        "agents": run.agents,
        "participation": config.participation,
        "seed": seed,
        "data": config.data.source,
        **({"data_sha256": run.data_sha256} if run.data_sha256 else {}),
        "configuration_sha256": config.fingerprint,
        **_private(run),
    }


def _private(run: Run) -> dict[str, str]:
    """What the model gives away about any one site, of a federation with noisy updates."""
    about = run.privacy()
    if about is None:
        return {}
    epsilon = f"epsilon {about['epsilon']['released']:.4g}, delta {about['delta']:g}"
    return {"privacy": f"{epsilon}, with the data of any one site replaced"}


def _measured(run: Run, method: str, seed: int) -> dict[str, Any]:
    """What was measured of this very model, beside the null baselines of its seed."""
    steps = shown_steps(run, method)
    groups: dict[str, dict[str, Any]] = {}
    for group in run.groups:
        mine = [s for s in run.methods[method][seed].final if s.seen == (group == "seen")]
        if not mine:
            continue
        before, after = (summarise(mine, step, run.measure) for step in (0, steps))
        groups[group] = {
            "agents": after.agents,
            "before": before.mean,
            "after": after.mean,
            "interval": Estimate.of([s.score[steps] for s in mine]).half_width,
            "worst_tenth": after.worst_tenth,
            "harmed": after.harmed,
        }
        for line in run.lines():
            if line.kind == "baseline" and seed in line.seeds:
                null = [s for s in line.seeds[seed].final if s.seen == (group == "seen")]
                groups[group][line.name] = summarise(null, line.steps, run.measure).mean
    if not groups:
        return {}
    return {
        "measure": run.measure.name,
        "scored_on": run.config.eval_on,
        "steps": steps,
        "split_sha256": run.splits[seed]["sha256"],
        "groups": groups,
    }
