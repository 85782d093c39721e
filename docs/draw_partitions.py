"""Draws docs/pictures/partition-*.svg: what each partition makes of 2,000 samples of 10 classes.

Run it from anywhere: `python docs/draw_partitions.py`.
"""

from pathlib import Path

import altair as alt
import numpy as np
import torch

from nufed.data import Samples
from nufed.lab.config.load import load_config
from nufed.lab.config.problem import build_samples, build_split
from nufed.lab.config.schema import DataConfig

PICTURES = Path(__file__).parent / "pictures"
SHOWN = {
    "iid": ["data.samples_per_agent=100"],
    "dirichlet-0.1": [
        "data.partition=dirichlet",
        "data.dirichlet=0.1",
        "data.samples_per_agent=100",
    ],
    "dirichlet-1": ["data.partition=dirichlet", "data.dirichlet=1", "data.samples_per_agent=100"],
    "dirichlet_by_class": ["data.dirichlet=0.3"],
    "quantity_skew": ["data.dirichlet=0.5"],
    "given": [],  # of the four hospitals
    "shards": ["data.classes_per_agent=2", "data.samples_per_agent=100"],
}


def counts(partition: str, overrides: list[str]) -> list[dict[str, object]]:
    """Samples of every class at every agent."""
    if partition == "given":
        data = load_config("heart").data
        samples = build_samples(data)
    else:
        data, samples = drawn(partition, overrides)
    split = build_split(data, samples, 0)
    labels = samples.targets.numpy()
    rows = []
    for agent in split.agents:
        held = np.concatenate([split.train[agent], split.validation[agent], split.test[agent]])
        name = split.names[agent] if partition == "given" else agent
        for c, n in enumerate(np.bincount(labels[held])):
            rows += [{"agent": name, "class": samples.classes[c], "samples": int(n)}] * bool(n)
    return rows


def drawn(partition: str, overrides: list[str]) -> tuple[DataConfig, Samples]:
    """The configuration of a drawn partition, and its samples."""
    labels = np.arange(2000) % 10
    samples = Samples(torch.zeros(2000, 1), torch.as_tensor(labels), classes=tuple("0123456789"))
    given = [f"data.partition={partition}", "data.agents=16", "data.test=0.2", *overrides]
    data = load_config("quickstart", [*given, "data.unseen_agents=0"]).data
    return data, samples


def draw(name: str, overrides: list[str]) -> alt.Chart:
    """Circles whose areas are numbers of samples."""
    rows = counts(name.partition("-")[0], overrides)
    return (
        alt.Chart(alt.InlineData(values=rows), width=360, height=200, background="white")
        .mark_circle(opacity=0.8)
        .encode(
            x=alt.X("agent:O", sort=None, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("class:O"),
            size=alt.Size("samples:Q", scale=alt.Scale(domain=[0, 200], range=[0, 420])),
            color=alt.Color("class:N", legend=None, scale=alt.Scale(scheme="tableau10")),
        )
    )


if __name__ == "__main__":
    for name, overrides in SHOWN.items():
        draw(name, overrides).save(PICTURES / f"partition-{name}.svg")
