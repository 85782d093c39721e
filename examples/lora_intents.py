"""A pretrained language model for organisations with few intents of their own, by LoRA.

    python examples/lora_intents.py FOLDER clinc150.json

FOLDER is a pretrained sentence encoder with its tokenizer, such as all-MiniLM-L6-v2; clinc150.json
is CLINC150 (Larson et al. 2019, CC BY 3.0). An agent is an organisation that has five intents under
numbers of its own, with eight sentences each. Adapters of rank 8 and the head are trained, about
0.3 % of the model, and nothing else is sent or stored. New organisations fine-tune in three steps.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import nufed
from nufed.lab.pretrained import tokens


def organisations(path, agents, intents=5, each=8, seed=0):
    """Sentences, intents as 0 … 4 and the organisation of each."""
    rows = json.loads(Path(path).read_text("utf-8"))["train"]
    by_intent = {}
    for text, intent in rows:
        by_intent.setdefault(intent, []).append(text)
    rng, texts, labels, owners = np.random.default_rng(seed), [], [], []
    for agent in range(agents):
        for label, intent in enumerate(rng.choice(sorted(by_intent), intents, replace=False)):
            texts += list(rng.choice(by_intent[intent], each, replace=False))
            labels += [label] * each
            owners += [f"organisation-{agent}"] * each
    return texts, np.array(labels), np.array(owners)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the pretrained model")
    parser.add_argument("data", help="clinc150.json")
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    texts, labels, owners = organisations(options.data, options.agents)
    config = {
        "name": "intents",
        "rounds": options.rounds,
        "participation": 0.3,
        "data": {"validation": 0.2, "test": 0.3, "unseen_agents": options.agents // 4},
        "model": {
            "name": f"hf:{options.folder}",
            "train": "lora",
            "lora": {"rank": 8, "alpha": 16, "targets": ["query", "value"]},
        },
        "method": {"batch_size": 10, "local_steps": 4, "meta_lr": 0.1, "adapt_lr": 0.1},
        "methods": {
            "fedavg": {},
            "fedrep": {},
            "gmeta": {"adapt_steps": 3, "curvature": "first_order"},
        },
    }
    run = nufed.run(config, data=(tokens(texts, options.folder, 32), labels, owners))
    for row in run.rows():
        print(f"{row.group:7} {row.name:24} accuracy {row.personal.mean:.1%}")
    print(run.path / "report.html")


if __name__ == "__main__":
    main()
