"""Agents' personal models as files: in the run directory of a simulation, else at the site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nufed.algorithms.protocol import AgentContext, Algorithm, State
from nufed.errors import RunError
from nufed.files import make_private, write_sealed

FOLDER = "personal"


def personal_after(
    algorithm: Algorithm,
    context: AgentContext,
    received: State,
    state: State | None,
    steps: int,
    scale: float = 1.0,
) -> State:
    """An agent's personal model after so many fine-tuning steps, as evaluation scores it.

    ``scale`` multiplies their step size; results show the scale that evaluation chose. 0: no step.
    """
    steps = steps if scale else 0
    personal = algorithm.personal_model(context, received, state)
    *_, last = algorithm.fine_tune(context, received, personal.tensors, steps, scale)
    return last


def write_personal(folder: Path, agent: int, tensors: State, about: Mapping[str, Any]) -> Path:
    """Write an agent's personal model as a sealed file ``personal/AGENT.safetensors``.

    Args:
        folder: of the method and seed, or of the run at a site.
        agent: whose model it is.
        tensors: the personal model.
        about: its metadata, as JSON: the round, fine-tuning steps and the scale of their size.
    """
    path = folder / FOLDER / f"{agent}.safetensors"
    try:
        make_private(path.parent)
    except OSError as error:
        raise RunError(f"{path.parent} can't be created: {error.strerror}") from error
    write_sealed(path, {"agent": agent, **about}, tensors)
    return path
