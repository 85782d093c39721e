"""Your own model and data: classification, then regression."""

import numpy as np
from torch import nn

import nufed

settings = {
    "rounds": 30,
    "method": {"adapt_steps": 3, "adapt_lr": 0.1, "meta_lr": 0.2, "batch_size": 12},
}
rng = np.random.default_rng(0)

# Classification: any inputs and class numbers, any nn.Module.
inputs = rng.normal(size=(1000, 8))
classes = (inputs @ rng.normal(size=(8, 4))).argmax(axis=1)
run = nufed.run(
    settings | {"name": "own-classification", "data": {"agents": 12, "dirichlet": 0.5}},
    data=(inputs, classes),
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
)
print(f"accuracy after 3 steps: {run.rows()[0].personal.mean:.3f}, {run.path / 'report.html'}")

# Regression: every site has its own linear function; the third array is the owner of each sample.
sites, per_site = 30, 20
lines = rng.normal(size=8) + 0.3 * rng.normal(size=(sites, 8))
x = rng.normal(size=(sites * per_site, 8))
y = (x * np.repeat(lines, per_site, axis=0)).sum(axis=1, keepdims=True)
run = nufed.run(
    settings | {"name": "own-regression"},
    data=(x, y + 0.5 * rng.normal(size=y.shape), np.repeat(np.arange(sites), per_site)),
    model=lambda: nn.Linear(8, 1),
    loss=nn.functional.mse_loss,
)
print(f"squared error after 3 steps: {run.rows()[0].personal.mean:.3f}, {run.path / 'report.html'}")
