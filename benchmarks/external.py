"""make external: published numbers of NIID-Bench, and ours in its setting.

Trains FedAvg, FedProx and SCAFFOLD on CIFAR-10 and MNIST, split by class among ten agents with
Dirichlet parameter 0.5, as NIID-Bench does (Li et al. 2022), scores the global model on images that
no agent holds, and writes docs/results/external.json and docs/external.md. `--rounds` trains fewer
than 50 rounds; the same command with more rounds continues from there. About two hours of one core
for CIFAR-10 and one and a half for MNIST at 50 rounds and one seed. `--augment` trains FedAvg on
CIFAR-10 with random crops and flips instead, in a run of its own.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from external_page import PAGE, RESULTS, write
from rich.console import Console
from safetensors.torch import load_file

from nufed import Objective, Samples, load_run, resume, run
from nufed.errors import NufedError
from nufed.lab.cli.progress import show_progress
from nufed.lab.config.devices import torch_threads
from nufed.lab.readers.sources import SOURCES
from nufed.models import lenet5

RUNS = Path("runs/external")
CHUNK = 1000  # held-out images scored at once
SETTING = {
    "participation": 1.0,
    "baselines": [],
    "eval_lr": "as_trained",
    "eval_every": 10,
    "checkpoint_every": 1,
    "save_every": 1,
    "data": {
        "partition": "dirichlet_by_class",
        "partition_args": {"self_balancing": True, "min_size": 100},
        "agents": 10,
        "dirichlet": 0.5,
        "test": 0.01,  # nufed tests every agent; the numbers below are from images held out before
    },
    "model": {"name": "lenet5"},
    "method": {
        "meta_lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-5,
        "local_epochs": 10,
        "batch_size": 64,
        "averaging": "samples",
    },
    "methods": {"fedavg": {}, "fedprox": {"weight": 0.001}, "scaffold": {}},
}
AUGMENTED = {"data": {**SETTING["data"], "augment": "crop_flip"}, "methods": {"fedavg": {}}}


def cifar10() -> tuple[Samples, Samples]:
    """The first 40,000 training images to train on, the other 10,000 to score."""
    samples = SOURCES["cifar10"]()
    return rows(samples, slice(40_000)), rows(samples, slice(40_000, None))


def mnist() -> tuple[Samples, Samples]:
    """The 60,000 training images, and the 10,000 test images to score; without their writers."""
    parts = [SOURCES["mnist-writers"](part) for part in ("train", "test")]
    train, test = (replace(part, owners=None) for part in parts)
    return train, test


def rows(samples: Samples, chosen: slice) -> Samples:
    return replace(samples, inputs=samples.inputs[chosen], targets=samples.targets[chosen])


DATA: dict[str, Callable[[], tuple[Samples, Samples]]] = {"cifar10": cifar10, "mnist": mnist}


def trained(name: str, samples: Samples, changes: dict, rounds: int) -> Path:
    """The run directory: trained, resumed, or extended to ``rounds``."""
    path = RUNS / name
    tables = {**SETTING, **changes, "rounds": rounds, "name": name}
    with show_progress(Console(stderr=True)) as display:
        follow = {"observers": [display], "figures": False}
        if not (path / "run.json").exists():
            run(tables, data=samples, out=path, **follow)
        else:
            resume(path, [f"rounds={rounds}"], data=samples, **follow)
    return path


def accuracies(path: Path, held_out: Samples) -> dict[str, dict[str, list[float]]]:
    """The accuracy of the global model on held-out images, by method, seed and round."""
    config = load_run(path).config
    objective = Objective(lenet5(held_out.input_shape, len(held_out.classes)))
    found: dict[str, dict[str, list[float]]] = {}
    for method in config.methods:
        for seed in config.seeds:
            folder = path / "methods" / method / f"seed-{seed}"
            files = sorted(folder.glob("model-round-*.safetensors"))
            found.setdefault(method, {})[str(seed)] = [
                accuracy(objective, load_file(file)["model"], held_out) for file in files
            ]
    return found


def accuracy(objective: Objective, w: torch.Tensor, samples: Samples) -> float:
    right = 0
    for start in range(0, len(samples), CHUNK):
        part = rows(samples, slice(start, start + CHUNK))
        inputs = part.inputs.float() * part.scale + part.shift
        right += int((objective.predict(w, inputs).argmax(1) == part.targets).sum())
    return round(right / len(samples), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--data", choices=DATA, action="append", help="only this data set")
    parser.add_argument("--augment", action="store_true", help="FedAvg on CIFAR-10, augmented")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if options.augment:
        train, held_out = DATA["cifar10"]()
        with torch_threads(1):
            path = trained("cifar10-augmented", train, AUGMENTED, options.rounds)
            found.setdefault("cifar10", {})["augmented"] = accuracies(path, held_out)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for name in () if options.augment else options.data or DATA:
        train, held_out = DATA[name]()
        with torch_threads(1):
            path = trained(name, train, {}, options.rounds)
            found[name] = found.get(name, {}) | {
                "rounds": options.rounds,
                "trained_on": len(train),
                "scored_on": len(held_out),
                "accuracy": accuracies(path, held_out),
            }
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    write(found, PAGE)
    print(f"results: {RESULTS}\npage: {PAGE}")


if __name__ == "__main__":
    try:
        main()
    except NufedError as error:
        sys.exit(f"external: {error}")
    except KeyboardInterrupt:
        sys.exit("external: stopped; the same command resumes it")
