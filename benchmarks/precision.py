"""What ``precision = "bfloat16"`` costs in accuracy: three problems, three seeds, one process.

python benchmarks/precision.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np

import nufed

COMMON = {"seeds": [0, 1, 2], "baselines": [], "workers": 1, "engine": "direct"}
DIGITS = {
    "source": "digits",
    "partition": "dirichlet",
    "dirichlet": 0.3,
    "agents": 20,
    "samples_per_agent": 60,
}
GMETA = {
    "fedavg": {"algorithm": "fedavg"},
    "gmeta-exact": {"algorithm": "gmeta", "adapt_steps": 2, "curvature": "exact"},
}
PROBLEMS = {
    "digits, perceptron (accuracy)": {
        "rounds": 40,
        "data": DIGITS,
        "model": {"name": "fcnn", "args": {"hidden": [32], "activation": "tanh"}},
        "method": {"adapt_lr": 0.05, "meta_lr": 0.3, "local_steps": 4, "batch_size": 10},
        "methods": GMETA,
    },
    "digits, convolutional (accuracy)": {
        "rounds": 20,
        "data": DIGITS,
        "model": {"name": "cnn_groupnorm", "args": {"channels": [8, 16]}},
        "method": {"adapt_lr": 0.02, "meta_lr": 0.1, "local_steps": 4, "batch_size": 10},
        "methods": GMETA,
    },
    "sinusoid, perceptron (squared error)": {
        "rounds": 100,
        "data": {"source": "sinusoid", "args": {"agents": 60, "samples": 40}},
        "model": {"name": "fcnn", "args": {"hidden": [40, 40], "activation": "tanh"}},
        "method": {"adapt_lr": 0.02, "meta_lr": 0.02, "local_steps": 4, "batch_size": 10},
        "methods": GMETA,
    },
}


def scores(path: Path, method: str) -> list[float]:
    """The mean score of personal models after all steps, by seed."""
    found = []
    for seed in COMMON["seeds"]:
        text = (path / "methods" / method / f"seed-{seed}" / "agents.jsonl").read_text("utf-8")
        agents = [json.loads(line) for line in text.splitlines()]
        found.append(float(np.mean([agent["score"][-1] for agent in agents])))
    return found


def main() -> None:
    print("| problem | method | float32 | bfloat16 | difference by seed |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for problem, config in PROBLEMS.items():
            paths = {}
            for precision in ("float32", "bfloat16"):
                paths[precision] = Path(folder) / problem / precision
                table = COMMON | config | {"precision": precision}
                nufed.run(table, out=paths[precision], figures=None)
            for method in config["methods"]:
                plain, mixed = (scores(path, method) for path in paths.values())
                apart = ", ".join(f"{b - a:+.4f}" for a, b in zip(plain, mixed, strict=True))
                means = f"{np.mean(plain):.4f} | {np.mean(mixed):.4f}"
                print(f"| {problem} | {method} | {means} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
