"""The personal model of one agent of a run, as a file that ``nufed predict`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nufed.algorithms.protocol import Algorithm, State
from nufed.bundle.adapted import Adapted, prepared
from nufed.bundle.bundle import Bundle
from nufed.bundle.from_run import check_inputs, described, shown_steps, trained_as, trained_seed
from nufed.bundle.personal_module import PersonalModule, about_algorithm
from nufed.config.problem import Given, Problem
from nufed.data import Partition
from nufed.errors import InputError, require
from nufed.evaluate import evaluation_context
from nufed.objective import Loss
from nufed.objective.threads import torch_threads
from nufed.runs import Run
from nufed.runs.agent_states import StoredStates
from nufed.runs.json_files import finite
from nufed.runs.part_files import read_received
from nufed.runs.personal_models import personal_after


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
    """
    seed = trained_seed(run, method, seed)
    if run.federated:
        raise InputError(
            f"{run.path} is the run of a federation: agents' states and personal models are at "
            "their sites; only the global model can be bundled here"
        )
    require(0 <= agent < run.agents, "agent", agent, f"must lie in 0 … {run.agents - 1}")
    steps = shown_steps(run, method) if steps is None else steps
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
        if algorithm.personal_data is not None and not with_training_data:
            raise InputError(
                f"the personal model of {method} holds {algorithm.personal_data}: whoever gets the "
                "file gets these; add --with-training-data (in Python with_training_data=True) if "
                "they may be there"
            )
        tensors = _personal_model(run, problem, method, seed, agent, steps)
        module, personal = objective.module(tensors["model"]).cpu(), None
        if tensors.keys() != {"model"} or not algorithm.predicts_plainly:
            personal = about_algorithm(method, algorithm)
    about = Bundle.of(
        module,
        **described(run, objective),
        adapt_steps=0,  # already fine-tuned
        adapt_lr=0.0,
        batch_size=algorithm.batch_size,
        name=f"{run.config.name} {method} agent {agent}",
        trained={**trained_as(run, method, seed, algorithm), "agent": agent, "steps": steps},
        measured=_measured(run, method, seed, agent, steps),
        personal=personal,
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
    received = _on(device, read_received(folder / "model.safetensors", algorithm, objective))
    round = run.methods[method][seed].round
    state = final_state(folder, problem.belongs_to(seed), round, agent)
    batches = federation.batches(agent, seed, "evaluate")
    context = evaluation_context(federation, objective, batches, batches.samples)
    own = None if state is None else _on(device, state)
    sizes = run.methods[method][seed].step_sizes
    scale = sizes.scale(steps) if sizes else 1.0
    return personal_after(algorithm, context, received, own, steps, scale)


def final_state(
    folder: Path, belongs_to: Mapping[str, str], rounds: int, agent: int
) -> State | None:
    """The agent's state after so many rounds; None if it had not taken part."""
    return StoredStates(folder, belongs_to, [rounds]).get(agent)


def _on(device: Any, state: State) -> State:
    return {name: vector.to(device) for name, vector in state.items()}


def _measured(run: Run, method: str, seed: int, agent: int, steps: int) -> Mapping[str, Any]:
    """The agent's scores in the run, if it was evaluated after so many steps."""
    found = next((s for s in run.methods[method][seed].final if s.agent == agent), None)
    if found is None or steps >= len(found.score):
        return {}
    own: Mapping[str, Any] = finite(
        {
            "measure": run.measure.name,
            "scored_on": run.config.eval_on,
            "steps": steps,
            "split_sha256": run.splits[seed].sha256,
            "groups": {
                "seen" if found.seen else "unseen": {
                    "agents": 1,
                    "global": found.global_score,
                    "personal": found.score[steps],
                    "interval": None,
                    "worst_tenth": None,
                    "harmed": None,
                }
            },
        }
    )
    return own
