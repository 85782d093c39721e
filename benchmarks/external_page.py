"""The page of `make external`: published numbers beside ours, the setting, and why they differ."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment

RESULTS, PAGE = Path("docs/results/external.json"), Path("docs/external.md")
TEMPLATE = Path(__file__).with_name("external.md.j2")
METHODS = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
ROUNDS = 50  # of the setting
NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST"}
FLOWER = "Flower's baseline `niid_bench`, its README"
# source, rounds, and per cent in the order of METHODS
PUBLISHED = {
    "cifar10": [
        ["NIID-Bench, leader board in the authors' repository", ROUNDS, 68.2, 67.9, 69.8],
        [FLOWER, ROUNDS, 63.4, 65.6, 68.0],
    ],
    "mnist": [
        [FLOWER, ROUNDS, 98.9, 99.0, 99.0],
        ["FedBench 0.1.3, its results page", "not stated", 98.85, 98.91, 61.99],
    ],
}
PLAIN = {  # FedAvg by external_plain.py
    "plain PyTorch on nufed's split, 1 seed": "plain",
    "the same with random crops and flips": "plain, augmented",
}


def write(found: Mapping[str, Any], page: Path) -> None:
    """Write the page from the results of every data set."""
    template = Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    text = template.from_string(TEMPLATE.read_text("utf-8")).render(
        methods=list(METHODS.values()),
        tables=[_table(name, own) for name, own in found.items()],
        checks=_checks(found),
        flat=_flat(found.get("cifar10", {})),
        unfinished=[
            f"{NAMES[name]} was trained for {own['rounds']} rounds"
            for name, own in found.items()
            if own["rounds"] < ROUNDS
        ],
    )
    page.write_text(text, "utf-8")


def _flat(own: Mapping[str, Any], since: int = 10) -> dict[str, Any] | None:
    """The range of nufed's FedAvg from a round on, in per cent, if it was trained for longer."""
    if own.get("rounds", 0) < 2 * since:
        return None
    curves = zip(*own["accuracy"]["fedavg"].values(), strict=True)
    means = [100 * fmean(seeds) for seeds in curves][since - 1 :]
    return {"since": since, "least": f"{min(means):.1f}", "most": f"{max(means):.1f}"}


def _checks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rounds, and accuracies in per cent, of PyTorch loops beside nufed's FedAvg."""
    own = found.get("cifar10", {})
    checks = []
    for key in PLAIN.values():
        if key in own:
            rounds = min(len(own[key]), own["rounds"])
            ours = fmean(seed[rounds - 1] for seed in own["accuracy"]["fedavg"].values())
            plain = own[key][rounds - 1]
            numbers = {"plain": f"{100 * plain:.1f}", "nufed": f"{100 * ours:.1f}"}
            checks.append({"key": key, "rounds": rounds, **numbers})
    return checks


def _table(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    rows: list[list[Any]] = list(PUBLISHED[name])
    curves, last = own["accuracy"], own["rounds"]
    seeds = len(curves["fedavg"])
    for rounds in sorted({*range(10, last, 10), last}):
        means = [fmean(seed[rounds - 1] for seed in curves[m].values()) for m in METHODS]
        label = f"nufed, {seeds} seed{'s' * (seeds > 1)}"
        rows.append([label, rounds, *(f"{100 * mean:.1f}" for mean in means)])
    for label, key in PLAIN.items():
        if key in own:
            rows.append([label, len(own[key]), f"{100 * own[key][-1]:.1f}", "", ""])
    return {"name": NAMES[name], "rows": rows, **own}
