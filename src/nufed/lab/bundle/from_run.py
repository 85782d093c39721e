"""Bundles of a run's global models, and the personal model of one of its agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nufed.algorithms.protocol import Algorithm, State, defines
from nufed.data import Partition, Samples
from nufed.errors import InputError, require
from nufed.evaluate import evaluation_context, summarise
from nufed.lab.bundle.about import InputsAbout
from nufed.lab.bundle.adapting import Adapted, prepared
from nufed.lab.bundle.building import PersonalModule, about_algorithm
from nufed.lab.bundle.bundle import Bundle
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.problem import Given, Problem, algorithms_of, loss_name, rebuild_objective
from nufed.lab.config.schema import OWN
from nufed.lab.pretrained import PREFIX
from nufed.lab.runs import Estimate, Run
from nufed.lab.runs.agent_states import StoredStates, personal_after
from nufed.lab.runs.json_files import finite
from nufed.lab.runs.part_files import read_received
from nufed.lab.runs.records import Inputs, zeros_of
from nufed.meta.fine_tuning import Rate
from nufed.models import MODELS
from nufed.objective import Loss, Objective
from nufed.server import Downlink, on_device
from nufed.settings import settings_of, text_of

INPUT_TYPES = ("uint8", "int32", "int64", "float32", "float64")


class NoBundleError(InputError):
    """The method has no model that can be bundled."""


def make_bundle(
    run: Run,
    method: str,
    seed: int | None = None,
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Loss | None = None,
    methods: Mapping[str, Algorithm] | None = None,
    trust: bool = False,
    carry_base: bool | None = None,
) -> Bundle:
    """The global model that a run trained, as a bundle.

    Args:
        run: a finished run, from :func:`nufed.load_run`.
        method: the name of one of its methods.
        seed: one of its seeds; the first by default.
        model, loss, methods: the same objects that were passed to :func:`nufed.run`.
        trust: allow importing the code that the run names, if any.
        carry_base: as for :meth:`Bundle.of`.
    """
    seed = trained_seed(run, method, seed)
    check_inputs(run)
    given = Given(model=model, loss=loss, methods=methods)
    objective = rebuild_objective(run.recorded, _like(run), given, trust=trust)
    algorithms = algorithms_of(run.config, given.methods, [method])
    return bundle_of(run, method, seed, objective, algorithms[method], carry_base)


def bundle_of(
    run: Run,
    method: str,
    seed: int,
    objective: Objective,
    algorithm: Algorithm,
    carry_base: bool | None = None,
) -> Bundle:
    """A bundle of a run's method from a built objective and algorithm."""
    check_inputs(run)
    folder = run.path / "methods" / method / f"seed-{seed}"
    received = read_received(folder / "model.safetensors", algorithm, objective)
    shipped = algorithm.shipped(objective, received)
    if shipped is None:
        raise NoBundleError(
            f"{method} can't be bundled: the server has no complete model that a new agent could "
            f"fine-tune; `nufed bundle {run.path} --method {method} --agent N` writes the "
            "personal model of one agent"
        )
    module, sizes = objective.module(shipped.model), run.methods[method][seed].step_sizes
    if not defines(algorithm, "personal_model", "fine_tune"):
        steps = run.config.steps_of(method)[0]
        scale = sizes.scale(steps) if sizes else None
        steps = 0 if scale == 0 else steps
    else:  # the chosen step size is that of other models
        steps, scale = run.config.steps_shown, None
    return Bundle.of(
        module,
        **described(run, objective, seed),
        adapt_lr=_rate(shipped.adapt_lr, objective, module, scale or 1.0),
        lr_scale=scale,
        adapt_steps=steps,
        batch_size=algorithm.batch_size,
        name=f"{run.config.name} {method}",
        trained=trained_as(run, method, seed, algorithm),
        measured=_measured(run, method, seed, algorithm),
        carry_base=carry_base,
    )


def trained_seed(run: Run, method: str, seed: int | None) -> int:
    """The given seed, or the first; refuses a method or seed that the run does not have."""
    named = f"{method}, seed {run.config.seeds[0] if seed is None else seed}"
    if named in run.unfinished and (seed is not None or method not in run.methods):
        raise InputError(f"{named} of {run.path} is not finished: wait, or resume the run")
    if method not in run.methods:
        names = ", ".join(run.methods)
        raise InputError(f"method {method!r}: must be one of {names}, those of {run.path}")
    seeds = list(run.methods[method])
    if seed is None:
        return seeds[0]
    if seed not in seeds:
        numbers = ", ".join(map(str, seeds))
        raise InputError(f"seed {seed}: must be one of {numbers}, those of {run.path}")
    return seed


def can_be_bundled(run: Run) -> bool:
    """Whether its models take arrays of dtypes that bundles support."""
    if run.inputs is None:
        return False
    return all(one.dtype in INPUT_TYPES for one in run.inputs.formats.values())


def check_inputs(run: Run) -> Inputs:
    """The format of a run's inputs; refuses any but arrays of dtypes that bundles support."""
    if run.inputs is None or not can_be_bundled(run):
        raise InputError(
            f"{run.path} can't be bundled: a bundle's inputs are arrays of numbers "
            f"({', '.join(INPUT_TYPES)}), and those of this run are not"
        )
    return run.inputs


def described(run: Run, objective: Objective, seed: int) -> dict[str, Any]:
    """How a model of the run is built and its inputs' format, as arguments of :meth:`Bundle.of`."""
    inputs, config = check_inputs(run), run.config
    name = loss_name(config, bool(inputs.classes), bool(inputs.targets))
    arguments = config.model.args
    if config.model.name in MODELS:
        arguments = {"input_shape": inputs.shape, "outputs": inputs.outputs, **arguments}
    elif config.model.name.startswith(PREFIX):
        arguments = {"outputs": inputs.outputs, **arguments}
    return {
        "input_shape": tuple(inputs.shape),
        "input_dtype": inputs.dtype,
        "scale": inputs.scale,
        "shift": inputs.shift,
        "several": {
            name: InputsAbout.model_validate(
                {**one.model_dump(), "scale": inputs.scale, "shift": inputs.shift}
            )
            for name, one in inputs.several.items()
        },
        "input_range": None if inputs.range is None else asdict(inputs.range),
        "classes": tuple(inputs.classes),
        "target_dtype": inputs.targets,
        "loss": objective.loss if name == OWN else name,
        "build": None if config.model.name == OWN else config.model.name,
        "args": arguments,
        "running_stats": config.model.running_stats,
        "preparation": run.preparation(seed),
        "train": config.model.train,
        "lora": config.model.lora,
    }


def trained_as(run: Run, method: str, seed: int, algorithm: Algorithm) -> dict[str, Any]:
    """The metadata of a model's training."""
    config = run.config
    settings = ((field, getattr(algorithm, field.name)) for field in settings_of(type(algorithm)))
    return {
        "method": method,
        "algorithm": type(algorithm).__name__,
        **{
            field.name: value if isinstance(value, int | float) else text_of(field, value)
            for field, value in settings
        },
        **algorithm.notes.settings(algorithm),
        "rounds": run.methods[method][seed].round,
        "agents": run.agents,
        "participation": config.participation,
        "seed": seed,
        "data": config.data.source,
        **({"data_sha256": run.data_sha256} if run.data_sha256 else {}),
        "configuration_sha256": config.fingerprint,
        **_private(run),
    }


def _like(run: Run) -> Samples:
    """One sample in the run's format, for which models are built."""
    inputs = check_inputs(run)
    classes = tuple(inputs.classes)
    kind = getattr(torch, inputs.targets or "float32")
    targets = torch.zeros(1).long() if classes else torch.zeros(1, inputs.outputs, dtype=kind)
    return Samples(zeros_of(inputs.formats), targets, classes)


def _rate(
    rate: Rate, objective: Objective, module: nn.Module, scale: float
) -> float | dict[str, float] | Tensor:
    """``scale`` times the step size; if it has one per parameter, by name."""
    if not isinstance(rate, Tensor):
        return scale * float(rate)
    rate = scale * rate
    parts = torch.split(rate, objective.sizes, dim=-1)
    if rate.ndim > 1 or any(bool((part != part[:1]).any()) for part in parts):
        return rate.cpu()
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    # parts behind those of parameters are tracked statistics, which have no step size
    return {name: float(part[0]) for name, part in zip(names, parts, strict=False)}


def _private(run: Run) -> dict[str, str]:
    """The privacy guarantee of the model, of a federation with noisy updates."""
    about = run.privacy()
    if about is None:
        return {}
    epsilon = f"epsilon {about.epsilon.released:.4g}, delta {about.delta:g}"
    return {"privacy": f"{epsilon}, with the data of any one site replaced"}


def _measured(run: Run, method: str, seed: int, algorithm: Algorithm) -> dict[str, Any]:
    """The scores of this model, beside the null baselines of its seed."""
    steps = run.config.steps_of(method)[0]
    groups: dict[str, dict[str, Any]] = {}
    for group in run.groups:
        mine = [s for s in run.methods[method][seed].final if s.seen == (group == "seen")]
        if not mine:
            continue
        summary = summarise(mine, steps, run.measure)
        groups[group] = {
            "agents": summary.agents,
            "global": summary.global_mean,
            "personal": summary.mean,
            "interval": Estimate.of([s.score[steps] for s in mine]).half_width,
            "worst_tenth": summary.worst_tenth,
            "harmed": summary.harmed,
        }
        for line in run.lines():
            if line.kind == "baseline" and seed in line.seeds:
                null = [s for s in line.seeds[seed].final if s.seen == (group == "seen")]
                groups[group][line.name] = summarise(null, line.steps, run.measure).mean
    if not groups:
        return {}
    own_use = defines(algorithm, "personal_model", "fine_tune")
    newcomer = {"newcomer": algorithm.notes.newcomer} if own_use else {}
    return {**_scores(run, seed, steps, groups), **newcomer}


def _scores(run: Run, seed: int, steps: int, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Scores by group of agents, as the card shows them, and what they are of."""
    return {
        "measure": run.measure.name,
        "scored_on": run.config.eval_on,
        "steps": steps,
        "split_sha256": run.splits[seed].sha256,
        "groups": finite(groups),
    }


def make_personal(
    run: Run,
    method: str,
    agent: int,
    seed: int | None = None,
    *,
    steps: int | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    methods: Mapping[str, Algorithm] | None = None,
    partition: Partition | None = None,
    trust: bool = False,
    with_training_data: bool = False,
    carry_base: bool | None = None,
) -> Adapted:
    """The personal model of one agent of a run, the same that evaluation scored.

    Args:
        run: a finished run, from :func:`nufed.load_run`.
        method: the name of one of its methods.
        agent: the agent's number; one that never took part is treated as a newcomer.
        seed: one of its seeds; the first by default.
        steps: fine-tuning steps, with the step size that evaluation chose for their number; by
            default those that results show.
        model, data, loss, methods, partition: the same objects that were passed to
            :func:`nufed.run`.
        trust: allow importing the code that the run names, if any.
        with_training_data: allow a model that holds training data in some form, as kNN-Per's does;
            without it such a model is refused.
        carry_base: as for :meth:`Bundle.of`.
    """
    seed = trained_seed(run, method, seed)
    if run.federated:
        raise InputError(
            f"{run.path} is the run of a federation: agents' states and personal models are at "
            "their sites; only the global model can be bundled here"
        )
    require(0 <= agent < run.agents, "agent", agent, f"must lie in 0 … {run.agents - 1}")
    steps = run.config.steps_of(method)[0] if steps is None else steps
    check_inputs(run)
    faults = run.config.faults
    if faults.attack == "labels" and faults.corruption:
        raise InputError(
            f"{run.path} was trained with wrong labels at some agents (faults.attack): personal "
            "models of such a run can't be reproduced"
        )
    given = Given(model, data, loss, methods=methods, partition=partition)
    with torch_threads(run.config.threads):
        problem = Problem.rebuild(run.recorded, given, trust=trust, seeds=[seed])
        algorithm, objective = problem.algorithms[method], problem.objectives[seed]
        held = algorithm.notes.personal_data
        if held is not None and not with_training_data:
            raise InputError(
                f"the personal model of {method} holds {held}: whoever gets the file gets these; "
                "add --with-training-data (in Python with_training_data=True) if they may be there"
            )
        tensors = _personal_model(run, problem, method, seed, agent, steps)
        module, personal = objective.module(tensors["model"]).cpu(), None
        if tensors.keys() != {"model"} or defines(algorithm, "predict"):
            personal = about_algorithm(method, algorithm)
    about = Bundle.of(
        module,
        **described(run, objective, seed),
        adapt_steps=0,  # already fine-tuned
        adapt_lr=0.0,
        batch_size=algorithm.batch_size,
        name=f"{run.config.name} {method} agent {agent}",
        trained={**trained_as(run, method, seed, algorithm), "agent": agent, "steps": steps},
        measured=_agent_measured(run, method, seed, agent, steps),
        personal=personal,
        carry_base=carry_base,
    ).about
    if personal is not None:
        further = {name: tensor for name, tensor in tensors.items() if name != "model"}
        module = PersonalModule(algorithm, module, about.model.running_stats, further)
    return Adapted(about, prepared(about, module), None)


def _personal_model(
    run: Run, problem: Problem, method: str, seed: int, agent: int, steps: int
) -> State:
    """The personal model after ``steps`` fine-tuning steps, computed as in evaluation."""
    algorithm, objective = problem.algorithms[method], problem.objectives[seed]
    federation = problem.federations[seed]
    folder = run.path / "methods" / method / f"seed-{seed}"
    device = objective.initial().device
    sent = read_received(folder / "model.safetensors", algorithm, objective)
    received = on_device(Downlink.of(sent).to(agent), device)
    round = run.methods[method][seed].round
    state = final_state(folder, problem.belongs_to(seed), round, agent)
    batches = federation.batches(agent, seed, "evaluate")
    context = evaluation_context(federation, objective, batches, batches.samples)
    before = None if state is None else on_device(state, device)
    sizes = run.methods[method][seed].step_sizes
    scale = sizes.scale(steps) if sizes else 1.0
    return personal_after(algorithm, context, received, before, steps, scale)


def final_state(
    folder: Path, belongs_to: Mapping[str, str], rounds: int, agent: int
) -> State | None:
    """The agent's state after ``rounds`` rounds; None if it had not taken part."""
    return StoredStates(folder, belongs_to, [rounds]).get(agent)


def _agent_measured(run: Run, method: str, seed: int, agent: int, steps: int) -> Mapping[str, Any]:
    """The agent's scores in the run, if it was evaluated after so many steps."""
    scores = next((s for s in run.methods[method][seed].final if s.agent == agent), None)
    if scores is None or steps >= len(scores.score):
        return {}
    undefined = dict.fromkeys(("interval", "worst_tenth", "harmed"))
    row = {"agents": 1, "global": scores.global_score, "personal": scores.score[steps]}
    group = "seen" if scores.seen else "unseen"
    return _scores(run, seed, steps, {group: {**row, **undefined}})
