"""Examples at the end of help texts."""

from __future__ import annotations

import typer

EXAMPLES = {
    "run": (
        "nufed run quickstart",
        "nufed run quickstart rounds=50 method.adapt_steps=5 data.dirichlet=0.1 --seeds 3",
        "nufed run quickstart data.source=file data.args.path=mine.csv data.samples_per_agent=20",
        "nufed run --resume runs/quickstart-001",
        "nufed run mine.toml --out runs/mine --part 3/16",
    ),
    "submit": (
        "nufed submit mine.toml --out runs/mine --parts 16 --time 240 --memory 4 --partition cpu",
        "nufed submit quickstart --out runs/try --parts 2 --local",
    ),
    "report": (
        "nufed report runs/quickstart-001",
        "nufed report runs/quickstart-001 runs/quickstart-002 --out compared",
    ),
    "adapt": (
        "nufed adapt runs/quickstart-001/bundles/gmeta-hf.nufed mine.csv --out mine.safetensors",
        "nufed adapt model.nufed mine.csv --label species --steps auto --max-steps 30 "
        "--out mine.safetensors",
        "nufed adapt model.nufed photos --out mine.safetensors  (a folder of images per class)",
    ),
    "predict": (
        "nufed predict mine.safetensors new.csv",
        "nufed predict mine.safetensors new.parquet --out predictions.csv",
    ),
    "bundle": (
        "nufed bundle runs/quickstart-001 --method gmeta-hf --out model.nufed",
        "nufed bundle runs/quickstart-001 --method gmeta-hf --agent 7",
    ),
    "inspect": ("nufed inspect runs/quickstart-001/bundles/gmeta-hf.nufed",),
    "bounds": (
        "nufed bounds runs/quickstart-001 --report",
        "nufed bounds constants.toml",
    ),
    "advise": ("nufed advise runs/quickstart-001", "nufed advise runs/mine --max-steps 20"),
    "list": (
        "nufed list",
        "nufed list presets",
        "nufed list ditto",
    ),
    "data get": (
        "nufed data get cifar10",
        "nufed data get cifar10 --from cifar-10-binary.tar.gz",
    ),
    "data show": ("nufed data show quickstart data.dirichlet=0.1 --out split.svg",),
}


def add_examples(app: typer.Typer, group: str = "") -> None:
    """Append the examples of every command, of a group if any, to its help text."""
    for command in app.registered_commands:
        name = group + str(command.name or getattr(command.callback, "__name__", ""))
        if name in EXAMPLES:
            command.epilog = "\n\n".join(["Examples:", *EXAMPLES[name]])
