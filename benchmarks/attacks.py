"""make attacks: every attack against every aggregation rule, on handwritten digits.

Trains with a fifth of the agents corrupt, and writes docs/results/attacks.json and the section
about it (attacks_page.py). The setting is that of the preset quickstart with first-order updates,
half of the agents a round, and more rounds: how many was chosen from curves of the plain mean
without attacks, with other seeds, and by their cost. Finished runs are reused and interrupted ones
resumed; to repeat one, remove its directory. About half an hour.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path

import attacks_page
import torch
from attacks_page import RESULTS, RULES, SPLITS, STEPS
from rich.console import Console

from nufed import resume, run
from nufed.algorithms.aggregation import ClippedMean, Mean, Median, TrimmedMean
from nufed.algorithms.protocol import AgentUpdate
from nufed.errors import NufedError
from nufed.lab.cli.progress import show_progress
from nufed.lab.config import load_config
from nufed.lab.runs import Run, load_run
from nufed.lab.runs.json_files import finite
from nufed.simulation import Faults

RUNS = Path("runs/attacks")
AGENTS, CORRUPT, MAX_NORM = 30, 0.2, 3.0
COST_OF = 15, 200_000  # updates, and numbers in each, to measure the cost of a rule
SETTING = {
    "rounds": 120,
    "seeds": list(range(6)),
    "participation": 0.5,
    "eval_every": 40,
    "checkpoint_every": 60,
    "model": {"name": "fcnn", "args": {"hidden": [32], "activation": "tanh"}},
    "method": {
        "adapt_steps": STEPS,
        "adapt_lr": 0.05,
        "meta_lr": 0.3,
        "local_steps": 4,
        "batch_size": 10,
        "curvature": "first_order",
        "trim": CORRUPT,
    },
    "methods": {rule: {"algorithm": "gmeta", "aggregation": rule} for rule in RULES},
}


def settings(split: str, attack: str) -> dict:
    """The configuration of a run: all rules, one attack, one split."""
    data = {"source": "digits", "agents": AGENTS, "samples_per_agent": 50, "test": 0.3}
    tables = {**SETTING, "data": data | SPLITS[split], "baselines": []}
    if attack == "none":
        return tables | {"baselines": ["majority", "untrained", "local"]}
    if attack == "scale, screened":
        tables, attack = tables | {"max_update_norm": MAX_NORM}, "scale"
    return tables | {"faults": {"corruption": CORRUPT, "attack": attack}}


def trained(split: str, attack: str) -> Run:
    """The run: trained, resumed, or read if it is finished."""
    path = RUNS / f"{split}-{attack.replace(', ', '-')}"
    tables = settings(split, attack)
    if (path / "results.json").exists():
        finished = load_run(path)
    else:
        print(f"{split}, {attack}")
        with show_progress(Console(stderr=True)) as display:
            follow = {"observers": [display]}
            begun = (path / "run.json").exists()
            finished = resume(path, **follow) if begun else run(tables, out=path, **follow)
    if finished.config.fingerprint != load_config(tables).fingerprint:
        sys.exit(f"{path} was made with other settings: remove it and run the command again")
    return finished


def honest(found: Run, part: dict, steps: int) -> list[float | None]:
    """The mean accuracy of honest agents by seed; None where training failed or diverged.

    Without an attack the would-be corrupt agents are excluded too, so that all rows score the same.
    """
    means = []
    for seed in found.config.seeds:
        corrupt = corrupt_agents(seed)
        scores = (
            [s.score[steps] for s in part[seed].scores if s.agent not in corrupt]
            if (seed in part)
            else [math.nan]
        )
        mean = statistics.fmean(scores)
        means.append(round(mean, 5) if math.isfinite(mean) else None)
    return means


def corrupt_agents(seed: int) -> frozenset[int]:
    return Faults(corruption=CORRUPT).corrupt_agents(range(AGENTS), seed)


def summary(found: Run) -> dict:
    """The numbers of a run that the page needs."""
    rules = {
        rule: {str(n): honest(found, found.methods.get(rule, {}), n) for n in (0, STEPS)}
        for rule in RULES
    }
    nulls = {
        name: honest(found, part, STEPS * (name == "untrained"))
        for name, part in found.baselines.items()
    }
    return {"rules": rules, "late_gain": late_gain(found), "left_out": len(found.rejected())} | (
        {"nulls": nulls} if nulls else {}
    )


def late_gain(found: Run) -> dict[str, float]:
    """The gain of accuracy in the last third of the rounds, over seeds and agents."""

    def at(rule: str, round: int) -> float:
        lines = [line for one in found.methods[rule].values() for line in one.metrics]
        there = [line.evaluation for line in lines if line.round == round]
        return statistics.fmean(means["seen"].score[STEPS] for means in there)

    last = found.config.rounds
    return {rule: at(rule, last) - at(rule, 2 * last // 3) for rule in found.methods}


def crowded(found: Run) -> float:
    """The fraction of rounds with more corrupt agents in the cohort than the trimmed mean trims.

    Cohorts are the same for every run.
    """
    rounds = [
        len(corrupt_agents(seed) & set(line.cohort)) > int(CORRUPT * len(line.cohort))
        for seed, one in found.methods["mean"].items()
        for line in one.metrics
        if line.round
    ]
    return sum(rounds) / len(rounds)


def costs() -> dict[str, float]:
    """The CPU time of each rule relative to the mean: medians over repeats."""
    number, size = COST_OF
    updates = [AgentUpdate(a, 1, 1, {"model": torch.randn(size)}) for a in range(number)]
    rules = dict(zip(RULES, (Mean(), ClippedMean(), Median(), TrimmedMean(CORRUPT)), strict=True))
    times: dict[str, list[float]] = {rule: [] for rule in rules}
    for _ in range(7):
        for rule, combine in rules.items():
            start = time.process_time()
            combine.combine(updates, "model", torch.zeros(size))
            times[rule].append(time.process_time() - start)
    mean = statistics.median(times["mean"])
    return {rule: statistics.median(t) / mean for rule, t in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    found = {
        split: {attack: trained(split, attack) for attack in attacks_page.ATTACKS}
        for split in SPLITS
    }
    about = {
        "setting": SETTING | {"agents": AGENTS, "corrupt": CORRUPT, "max_norm": MAX_NORM},
        "crowded": crowded(found["iid"]["none"]),
        "cost_of": COST_OF,
        "costs": costs(),
        "splits": {
            split: {attack: summary(one) for attack, one in runs.items()}
            for split, runs in found.items()
        },
    }
    RESULTS.write_text(json.dumps(finite(about), indent=1) + "\n", "utf-8")
    print(RESULTS)
    print(attacks_page.write())


if __name__ == "__main__":
    try:
        main()
    except NufedError as error:
        sys.exit(f"attacks: {error}")
    except KeyboardInterrupt:
        sys.exit("attacks: stopped; the same command resumes it")
