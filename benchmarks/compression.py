"""The accuracy that compression costs, on digits.

    python benchmarks/compression.py [--rounds 60] [--seeds 3]

trains FedAvg (ν = 0) and gMeta (ν = 1) over 50 agents with each codec, and prints the mean accuracy
of personal models after one step over seen agents, its standard deviation over seeds, and the bytes
that an agent sends in a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import nufed

CODECS = {
    "off": {},
    "bfloat16": {"codec": "bfloat16"},
    "int8": {"codec": "int8"},
    "top_k, share 0.1": {"codec": "top_k", "share": 0.1},
    "top_k, share 0.01": {"codec": "top_k", "share": 0.01},
}


def settings(rounds: int, seeds: int, compression: dict[str, object]) -> dict[str, object]:
    return {
        "rounds": rounds,
        "participation": 0.2,
        "seeds": list(range(seeds)),
        "eval_every": rounds,
        "baselines": [],
        "workers": 1,
        "data": {"agents": 50, "dirichlet": 0.1},
        "compression": compression,
        "method": {"meta_lr": 0.1, "adapt_lr": 0.1, "local_steps": 5, "batch_size": 8},
        "methods": {"fedavg": {}, "gmeta": {"adapt_steps": 1}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for name, compression in CODECS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = settings(options.rounds, options.seeds, compression)
            run = nufed.run(config, out=Path(folder) / "run", figures=False)
            for method, seeds in run.methods.items():
                last = [seed.metrics[-1] for seed in seeds.values()]
                scores = [100 * line.evaluation["seen"].score[1] for line in last]
                spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
                sent = last[0].bytes_up / len(last[0].cohort)
                print(
                    f"| {name} | {method} | {statistics.mean(scores):.1f} ± {spread:.1f} % "
                    f"| {sent:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
