"""Next characters of the roles of Shakespeare's plays: a small GRU, fine-tuned to a role.

`nufed data get shakespeare` downloads the text; or `python examples/shakespeare.py FILE`, with
speeches that begin with a line "ROLE:" and end with a blank one.
"""

import sys
from pathlib import Path

import torch

import nufed
from nufed.data.text import characters, windows
from nufed.lab.readers.sources import data_directory
from nufed.lab.readers.text import roles

stored = data_directory() / "tinyshakespeare/input.txt"
play = (Path(sys.argv[1]) if len(sys.argv) > 1 else stored).read_text("ascii")
alphabet, tokens = characters(roles(play))
samples = windows(tokens, length=40, least=50)  # roles with at least 2,000 characters

settings = {
    "name": "roles",
    "rounds": 150,
    "participation": 0.1,
    "eval_every": 50,
    "eval_steps": 3,
    "baselines": ["untrained"],
    "metric": "bits_per_character",
    "data": {"unseen_agents": len(set(samples.owners)) // 5, "validation": 0.2},
    "model": {
        "name": "gru",
        "args": {"hidden": [64], "vocabulary": len(alphabet), "next_token": True},
    },
    "method": {"meta_lr": 2.0, "local_steps": 2, "batch_size": 10},
    "methods": {
        "fedavg": {"adapt_lr": 0.5},
        "gmeta": {"adapt_steps": 3, "adapt_lr": 0.5, "curvature": "first_order"},
    },
}
run = nufed.run(settings, data=samples)
for row in run.rows():
    if row.kind == "method":
        print(f"{row.name:7}{row.group:7} {row.personal.mean:.2f} bits per character")

role = max(tokens, key=lambda name: len(tokens[name]))
own = samples.owners == role
model = nufed.load_bundle(run.path / "bundles/gmeta.nufed")
mine = model.adapt(samples.inputs[own], samples.targets[own])
torch.manual_seed(0)
line = tokens[role][:40]
for _ in range(80):
    following = mine.module(torch.tensor([line[-40:]]))[0, -1].softmax(dim=0)
    line = [*line, int(torch.multinomial(following, 1))]
print(f"{role}: {''.join(alphabet[token] for token in line)}")
