"""The model card of a bundle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nufed.bundle.about import About
from nufed.data.input_range import InputRange
from nufed.errors import InputError, visible


def card_of(about: About) -> str:
    """The card as Markdown, made from the metadata alone; their text is escaped."""
    try:
        return "\n".join(_lines(about)) + "\n"
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"`measured` can't be shown ({type(error).__name__}: {error}): it must have the layout "
            "that nufed writes"
        ) from None


def _lines(about: About) -> Iterator[str]:
    adapt, inputs = about.adapt, about.inputs
    yield f"# {_plain(about.name)}"
    yield ""
    if "agent" in about.trained:
        yield f"The personal model of agent {_plain(about.trained['agent'])}, for its data."
    else:
        yield "A global model: to be fine-tuned on your own data before use."
    if about.personal is not None and about.personal.training_data is not None:
        contents = _plain(about.personal.training_data)
        yield f"**This file holds {contents}**: store it only where they may be."
    yield ""
    yield "## Use"
    rate = f"{adapt.lr:.4g}" if isinstance(adapt.lr, float) else "one per parameter, learned"
    if adapt.lr_scale == 0:
        rate += " (no step lowered the loss on validation samples of agents seen in training)"
    elif adapt.lr_scale is not None:
        rate += (
            f" (chosen on validation samples of agents seen in training: {adapt.lr_scale:.3g} "
            "times that of training)"
        )
    yield (
        f"- fine-tuning: {adapt.steps} steps (ν) of plain gradient descent, step size (α) {rate}, "
        f"{adapt.batch_size} samples per batch (D)"
    )
    yield f"- inputs: {inputs.dtype} of shape {tuple(inputs.shape)}" + _scaling(about)
    if inputs.range is not None:
        yield f"- inputs of training: {InputRange(**inputs.range.model_dump())}"
    if about.classes:
        yield f"- classes: {_plain(_some(about.classes))}"
    loss = about.loss or "given in Python"
    yield f"- model: {_plain(_built(about))}, {about.dtype}; loss: {_plain(loss)}"
    if about.trained:
        yield from ["", "## Training"]
        for key, value in about.trained.items():
            yield f"- {_plain(key.replace('_', ' '))}: {_plain(_short(value))}"
    if about.measured:
        yield from ["", "## Measured"]
        yield from _measured(about.measured)
    yield from ["", f"Made by nufed {_plain(about.nufed)}."]


def _scaling(about: About) -> str:
    if about.inputs.dtype != "uint8":
        return ""
    shift = f" + {about.inputs.shift:g}" if about.inputs.shift else ""
    return f", as bytes; the model takes x·{about.inputs.scale:.6g}{shift}"


def _built(about: About) -> str:
    if about.model.build is None:
        return "a module that has to be passed when the bundle is loaded"
    given = ", ".join(f"{key}={value}" for key, value in about.model.args.items())
    return f"{about.model.build}({given})"


def _measured(measured: Mapping[str, Any]) -> Iterator[str]:
    groups: Mapping[str, Mapping[str, Any]] = measured["groups"]
    one = next(iter(groups.values()), {})
    split = str(measured["split_sha256"])[:12]
    yield (
        f"{_plain(str(measured['measure']).capitalize())} on the {_plain(measured['scored_on'])} "
        f"parts of agents: of the global model, and of personal models after "
        f"{_plain(measured['steps'])} fine-tuning steps. "
        + (f"Split: SHA-256 {_plain(split)}." if split else "The split is at the sites.")
    )
    yield ""
    nulls = [key for key in ("majority", "local", "untrained") if key in one]
    titles = ["agents", "number", "global", "personal", "± 95 %", "worst tenth", "harmed", *nulls]
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for group, row in groups.items():
        keys = ("global", "personal", "interval", "worst_tenth", "harmed", *nulls)
        numbers = [f"{row[key]:.3f}" if row.get(key) is not None else "" for key in keys]
        yield (
            "| "
            + " | ".join([f"{_plain(group)} in training", _plain(row["agents"]), *numbers])
            + " |"
        )
    yield ""
    yield (
        "*Harmed* is the share of agents whose personal model is worse than the global one. Null "
        "baselines: "
        "always the agent's most frequent class (majority), trained on its data alone (local), an "
        "untrained model fine-tuned (untrained). A new agent is like those unseen in training."
    )
    if "newcomer" in measured:
        yield ""
        yield (
            "Personal models of this method are not the global one after plain steps: an agent "
            f"unseen in training {_plain(measured['newcomer'])}. Scores after fine-tuning this "
            "bundle by plain steps were not measured."
        )


def _plain(text: object) -> str:
    """Text escaped for Markdown."""
    return re.sub(r"([\\`*_\[\]<>|&#~])", r"\\\1", visible(text))


def _short(value: Any) -> Any:
    is_hash = isinstance(value, str) and len(value) == 64
    return value[:12] if is_hash else value


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 20 else f"{', '.join(names[:20])}, … ({len(names)})"
