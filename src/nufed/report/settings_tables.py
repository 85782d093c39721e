"""The tables of settings and costs of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nufed.algorithms.protocol import Algorithm
from nufed.config.schema import AT_SITES
from nufed.data import PARTITIONS, settings_taken
from nufed.report.tables import Table, evaluated_agents, label, steps_shown
from nufed.report.tuned_rows import tuned_rows
from nufed.runs import Run
from nufed.settings import Field, settings_of, text_of

NOT_SENT = "not sent by the sites"


def costs_table(runs: Sequence[Run]) -> Table:
    """The cost of training and evaluating each method, per seed, and that of a newcomer."""
    headings = ["", "gradients", "HVPs", "MB up", "MB down", "gradients of evaluation", "seconds"]
    rows = []
    for run in runs:
        for name in run.methods:
            cost = run.costs(name)
            rows.append(
                [
                    label(run, name, runs),
                    f"{cost['gradients']:,.0f}",
                    f"{cost['hvps']:,.0f}",
                    f"{cost['bytes_up'] / 1e6:.2f}",
                    f"{cost['bytes_down'] / 1e6:.2f}",
                    _work(cost["evaluation_gradients"], cost["evaluation_hvps"]),
                    f"{cost['seconds']:.1f}",
                    _newcomer_cost(run, name),
                ]
            )
    return Table([*headings, "gradients of a newcomer"], rows, [False] * len(rows))


def _newcomer_cost(run: Run, name: str) -> str:
    """The work to make a personal model, as agents without a state did, and to fine-tune it."""
    made = [
        (s.personal_gradients, s.personal_hvps)
        for t in run.methods[name].values()
        for s in t.scores
        if s.newcomer
    ]
    if not made:  # none was evaluated: all agents took part
        return "–"
    steps = " or ".join(map(str, run.config.steps_of(name)))
    return f"{_work(*np.mean(made, axis=0))} + {steps}"


def _work(gradients: float, hvps: float) -> str:
    """Gradients, and Hessian-vector products if there are any."""
    return f"{gradients:,.6g}" + (f" and {hvps:,.6g} HVPs" if hvps else "")


def methods_table(runs: Sequence[Run]) -> Table:
    """Every setting of every method, one column per method; the most common settings first."""
    columns: dict[str, dict[str, str]] = {}
    headings: dict[str, str] = {"algorithm": "algorithm"}
    for run in runs:
        for name, algorithm in run.config.algorithms().items():
            column = {"algorithm": type(algorithm).__name__}
            for field, value in _settings(algorithm):
                headings.setdefault(field.name, _heading(field))
                column[field.name] = text_of(field, value)
            columns[label(run, name, runs)] = column | algorithm.describe()
            headings |= {key: key for key in algorithm.describe() if key not in headings}
    had = {key: sum(key in column for column in columns.values()) for key in headings}
    keys = sorted(headings, key=lambda key: -had[key])  # stable: ties in the order of fields
    rows = [[headings[k], *(column.get(k, "–") for column in columns.values())] for k in keys]
    return Table(["", *columns], rows, [False] * len(rows))


def _settings(algorithm: Algorithm) -> Iterator[tuple[Field, Any]]:
    """Its settings with their values, including those of base classes that it fixes."""
    found = {
        field.name: field
        for cls in reversed(type(algorithm).__mro__)
        if dataclasses.is_dataclass(cls)
        for field in settings_of(cls)
    }
    return ((field, getattr(algorithm, name)) for name, field in found.items())


def _heading(field: Field) -> str:
    """The name of a setting, with the paper's letter if its description begins with one."""
    letter, comma, _ = field.setting.about.partition(",")
    return f"{field.name} ({letter})" if comma and len(letter) <= 3 else field.name


def settings_table(run: Run) -> Table:
    """The settings that all methods of a run share, with the paper's letters."""
    config = run.config
    cohort = max(1, round(config.participation * (run.agents - config.data.unseen_agents)))
    rows = {
        "agents (N)": f"{run.agents}, of which {config.data.unseen_agents} unseen in training",
        "participation (r)": f"{config.participation:g}, a cohort of {cohort} agents a round",
        "rounds (K)": str(config.rounds),
        "data": f"{config.data.source}; {_partition(run)}",
        "samples per agent": samples_per_agent(run),
        "parts": f"validation {config.data.validation:g}, test {config.data.test:g}, rest training",
        "model": f"{config.model.name} {config.model.args or ''}, {config.dtype}",
        "fine-tuning steps": steps_shown(run),
        "step size of fine-tuning": "chosen on validation samples, one per method, seed and "
        "number of steps"
        if run.step_sizes_chosen
        else "as trained",
        "scored on": f"the agents' {config.eval_on} parts",
        "agents evaluated": "all" if config.eval_agents is None else evaluated_agents(run),
        "engine": ", ".join(f"{method} {engine}" for method, engine in run.engines.items()),
        "seeds": ", ".join(map(str, config.seeds)),
        "split SHA-256": ", ".join(
            f"{s}: {x.sha256[:12] or 'at the sites'}" for s, x in run.splits.items()
        ),
        "software": ", ".join(f"{k} {v}" for k, v in run.software.items()),
        **_privacy(run),
        **tuned_rows(config),
    }
    return Table(["", ""], [[k, v] for k, v in rows.items()], [False] * len(rows))


def problem_text(run: Run) -> str:
    """The data and its split, as resolved, in a sentence."""
    config = run.config.data
    unseen = f", {config.unseen_agents} of them unseen in training" if config.unseen_agents else ""
    source = "" if config.source == AT_SITES else f"{config.source}, {_partition(run)}: "
    sizes = samples_per_agent(run)
    each = "" if sizes == NOT_SENT else f", {sizes} samples each"
    return f"Data: {source}{run.agents} agents{unseen}{each}."


def samples_per_agent(run: Run) -> str:
    """The number of samples of an agent, all parts: one number, or minimum, median and maximum."""
    listed = [agent for split in run.splits.values() for agent in split.agents]
    sizes = [agent.train + agent.validation + agent.test for agent in listed]
    if run.federated:  # sites that sent no scores have not told their number
        sizes = [size for size in sizes if size]
    if not sizes:
        return NOT_SENT
    low, middle, high = min(sizes), float(np.median(sizes)), max(sizes)
    same = f"{low:,}"
    return same if low == high else f"{same} to {high:,} (median {middle:,g})"


def _partition(run: Run) -> str:
    """The partition with its settings, as resolved, and the shift."""
    config = run.config.data
    name = run.partition
    known = PARTITIONS.working().get(name)
    taken = {} if known is None else settings_taken(known, config.partition_settings)
    names = {"concentration": "α_d (dirichlet)"}
    words = [name, *(f"{names.get(k, k)} = {v:g}" for k, v in taken.items())]
    if name != config.partition:
        words[0] += f" (by {config.partition!r})" if config.split_file is None else ""
    if name == "dirichlet":
        words.append(f"reuse {config.reuse}")
    text = ", ".join(words)
    if config.partition_args:
        text += f" {config.partition_args}"
    if config.shift != "none":
        text += f"; shift {config.shift} {config.shift_args or ''}".rstrip()
    return text


def _privacy(run: Run) -> dict[str, str]:
    """Clipping and noise of updates, and the guarantees that they give."""
    about = run.privacy()
    if about is None:
        return {}
    rows = {
        "privacy": f"updates clipped to norm {about.clip:g}, noise multiplier "
        f"{about.noise:g}, delta (δ) {about.delta:g}; {about.rounds} rounds with "
        f"{about.cohort} of {about.agents} agents",
    }
    spent, budgets, holds = about.epsilon, about.budget, about.holds_for
    for what, epsilon, budget, for_whom in (
        ("the released model", spent.released, budgets.released, holds.released),
        ("a site against the server", spent.server, budgets.server, holds.server),
    ):
        most = "" if budget is None else f", budget {budget:g}"
        rows[f"epsilon (ε) of {what}"] = f"{epsilon:.4g}{most}: for {for_whom}"
    if about.updates and about.updates.claimed > about.updates.charged:
        rows["noisy updates of a site"] = (
            f"at most {about.updates.charged}; one site claims {about.updates.claimed}, more than "
            "it was sent requests: ε does not count them"
        )
    return rows
