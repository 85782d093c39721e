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
# source, iterations, per cent after three steps
MAML = [
    ["Finn et al. 2017, table 1 (± over tasks)", "60,000", "89.7 ± 1.1"],
    ["learn2learn, README of its vision examples", "60,000 in its script", "88.9"],
]
PLAIN = {  # FedAvg by external_plain.py
    "plain PyTorch on nufed's split, 1 seed": "plain",
    "the same with random crops and flips": "plain, augmented",
}


def write(found: Mapping[str, Any], page: Path) -> None:
    """Write the page from the results of every data set."""
    template = Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    text = template.from_string(TEMPLATE.read_text("utf-8")).render(
        methods=list(METHODS.values()),
        tables=[_table(name, own) for name, own in found.items() if name in NAMES],
        maml=_maml(found.get("maml", {})),
        checks=_checks(found),
        flat=_flat(found.get("cifar10", {})),
        unfinished=[
            f"{NAMES[name]} was trained for {own['rounds']} rounds"
            for name, own in found.items()
            if name in NAMES and own["rounds"] < ROUNDS
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


def _augmented(own: Mapping[str, Any]) -> list[float]:
    """FedAvg with random crops and flips, of seed 0, by round."""
    curve: list[float] = own["augmented"]["fedavg"]["0"]
    return curve


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
    if "augmented" in own and "plain, augmented" in own:
        rounds = min(len(_augmented(own)), len(own["plain, augmented"]))
        curves = {"plain": own["plain, augmented"], "nufed": _augmented(own)}
        numbers = {name: f"{100 * curve[rounds - 1]:.1f}" for name, curve in curves.items()}
        checks.append({"key": "augmented", "rounds": rounds, **numbers})
    return checks


def _maml(seeds: Mapping[str, Any], most: int = 5) -> dict[str, Any] | None:
    """Rows of accuracy by round after 1 and 3 steps, of each seed; None if nothing was trained."""
    if not seeds:
        return None
    rows: list[list[str]] = [[*row[:2], "", row[2]] for row in MAML]
    for seed, own in seeds.items():
        curve = own["curve"]
        wanted = {curve[round((i + 1) * len(curve) / most) - 1]["round"] for i in range(most)}
        for at in (each for each in curve if each["round"] in wanted):
            after = [
                f"{100 * each['mean']:.1f} ± {100 * each['half']:.1f}" for each in at["accuracy"]
            ]
            rows.append([f"nufed, seed {seed}", f"{at['round']:,}", after[1], after[3]])
        rows.append([f"nearest drawing, no training, seed {seed}", "0", "", _percent(own)])
    last = [own["curve"][-1] for own in seeds.values()]
    curve = next(iter(seeds.values()))["curve"]
    before = curve[(len(curve) - 1) // 2]
    gain = curve[-1]["accuracy"][-1]["mean"] - before["accuracy"][-1]["mean"]
    return {
        "rows": rows,
        "before": f"{before['round']:,}",
        "gain": f"{100 * gain:+.1f}",
        "seeds": len(seeds),
        "rounds": f"{min(each['round'] for each in last):,}",
        "seconds": max(each["seconds"] / each["round"] for each in last),
    }


def _percent(own: Mapping[str, Any]) -> str:
    return f"{100 * own['centroid']:.1f}"


def _table(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    rows: list[list[Any]] = list(PUBLISHED[name])
    curves, last = own["accuracy"], own["rounds"]
    seeds = len(curves["fedavg"])
    for rounds in sorted({*range(10, last, 10), last}):
        means = [fmean(seed[rounds - 1] for seed in curves[m].values()) for m in METHODS]
        label = f"nufed, {seeds} seed{'s' * (seeds > 1)}"
        rows.append([label, rounds, *(f"{100 * mean:.1f}" for mean in means)])
    if "augmented" in own:
        curve = _augmented(own)
        label = 'nufed with `augment = "crop_flip"`, 1 seed'
        rows.append([label, len(curve), f"{100 * curve[-1]:.1f}", "", ""])
    for label, key in PLAIN.items():
        if key in own:
            rows.append([label, len(own[key]), f"{100 * own[key][-1]:.1f}", "", ""])
    return {"name": NAMES[name], "rows": rows, **own}
