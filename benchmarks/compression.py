"""The accuracy that compression costs, on digits or CIFAR-10.

    python benchmarks/compression.py [--data digits] [--rounds 60] [--seeds 3]

trains FedAvg (ν = 0) and gMeta (ν = 1) over 50 agents with each codec, and prints the mean accuracy
of personal models after one step over seen agents, its standard deviation over seeds, and the bytes
that an agent sends in a round; first the accuracy of the initial model after one step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import nufed

CODECS = {
    "off": {},
    "bfloat16": {"codec": "bfloat16"},
    "int8": {"codec": "int8"},
    "top_k, share 0.1": {"codec": "top_k", "share": 0.1},
    "top_k, share 0.01": {"codec": "top_k", "share": 0.01},
}


METHOD = {
    "digits": {"meta_lr": 0.1, "adapt_lr": 0.1, "local_steps": 5, "batch_size": 8},
    "cifar10": {"meta_lr": 0.05, "adapt_lr": 0.01, "local_steps": 4, "batch_size": 40},
}


def settings(
    data: str, rounds: int, seeds: int, compression: dict[str, object]
) -> dict[str, object]:
    return {
        "rounds": rounds,
        "participation": 0.2,
        "seeds": list(range(seeds)),
        "eval_every": rounds,
        "baselines": [],
        "workers": 1,
        "data": {"source": data, "agents": 50, "dirichlet": 0.1},
        "compression": compression,
        "method": METHOD[data],
        "methods": {
            "fedavg": {"algorithm": "fedavg"},
            "gmeta": {"algorithm": "gmeta", "adapt_steps": 1},
        },
    }


def measure(data: str, rounds: int, seeds: int, codecs: list[str]) -> None:
    """Print a row for every codec and method."""
    for name in codecs:
        with tempfile.TemporaryDirectory() as folder:
            config = settings(data, rounds, seeds, CODECS[name])
            run = nufed.run(config, out=Path(folder) / "run", figures=False)
            for method, trained in run.methods.items():
                parts = list(trained.values())
                if name == codecs[0]:
                    row("initial model", method, [part.metrics[0] for part in parts], 0)
                last = [part.metrics[-1] for part in parts]
                row(name, method, last, last[0].bytes_up / len(last[0].cohort))


def row(name: str, method: str, lines: list[Any], sent: float) -> None:
    scores = [100 * line.evaluation["seen"].score[1] for line in lines]
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    mean = statistics.mean(scores)
    print(f"| {name} | {method} | {mean:.1f} ± {spread:.1f} % | {sent:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", choices=METHOD, default="digits")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    measure(**vars(parser.parse_args()), codecs=list(CODECS))


if __name__ == "__main__":
    main()
