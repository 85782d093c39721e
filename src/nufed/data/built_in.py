"""Data without a download: handwritten digits, which are shipped, and two generated regressions."""

from __future__ import annotations

import math
from importlib.resources import as_file, files
from typing import Any, TypeAlias

import numpy as np
import torch

from nufed.data.samples import Samples
from nufed.errors import require, require_whole
from nufed.seeding import stream

Array: TypeAlias = np.ndarray[Any, Any]
AMPLITUDES, PHASES, INPUTS = (0.1, 5.0), (0.0, math.pi), (-5.0, 5.0)  # of sinusoid
GAINS, LENGTH = (0.1, 1.0), 2.0  # of sensors


def digits() -> Samples:
    """1,797 handwritten digits of 8×8 pixels, shipped with nufed (UCI, 10 classes).

    >>> samples = digits()
    >>> len(samples), samples.input_shape, samples.outputs
    (1797, (8, 8), 10)
    """
    with as_file(files("nufed.data") / "digits.npz") as path, np.load(path) as archive:
        images, labels = archive["images"], archive["labels"]
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(labels).long(),
        classes=tuple(str(digit) for digit in range(10)),
        scale=1 / 16,
    )


def sinusoid(agents: int = 100, samples: int = 50, noise: float = 0.0, seed: int = 0) -> Samples:
    """Sine waves (regression): each agent has its own amplitude and phase, as in Finn et al. 2017.

    Agent i has y = A_i sin(x − φ_i) with A_i uniform in 0.1 … 5, φ_i in 0 … π, x in −5 … 5. The
    mean over agents is close to 0 everywhere: what a model learns for all of them together is of
    little use without fine-tuning.

    Args:
        agents: their number (``data.agents`` is not used, since the data has owners).
        samples: of every agent.
        noise: standard deviation of normal noise on y.
        seed: of the waves, independent of the run's seeds.

    >>> waves = sinusoid(agents=3, samples=4)
    >>> len(waves), waves.input_shape, waves.outputs, waves.classes
    (12, (1,), 1, ())
    """
    check_generated(agents=agents, samples=samples, noise=noise, seed=seed)
    x, y = np.empty((agents, samples)), np.empty((agents, samples))
    for agent in range(agents):
        rng = stream(seed, "sinusoid", agent=agent)
        amplitude, phase = rng.uniform(*AMPLITUDES), rng.uniform(*PHASES)
        x[agent] = rng.uniform(*INPUTS, samples)
        y[agent] = amplitude * np.sin(x[agent] - phase) + noise * rng.standard_normal(samples)
    return by_agent(x[..., None], y[..., None])


def check_generated(*, noise: float, seed: int, **counts: int) -> None:
    """Refuse arguments of a generated data set that are out of their range."""
    require_whole(**counts)
    require_whole(0, seed=seed)
    number = isinstance(noise, int | float) and math.isfinite(noise)
    require(number and noise >= 0, "noise", noise, "must be a finite number, 0 or more")


def by_agent(x: Array, y: Array) -> Samples:
    """Samples from inputs and targets by agent, in float32; agents are called by their numbers."""
    agents, samples = x.shape[:2]
    width = len(str(agents - 1))  # so that the order of names is that of numbers
    names = [f"{agent:0{width}}" for agent in range(agents)]
    inputs, targets = (
        torch.from_numpy(values.reshape(agents * samples, -1).astype(np.float32))
        for values in (x, y)
    )
    return Samples(inputs, targets, owners=np.repeat(names, samples))


def sensors(
    agents: int = 100, samples: int = 60, inputs: int = 20, noise: float = 0.1, seed: int = 0
) -> Samples:
    """Uncalibrated sensors (regression): agents share a linear law but not the scale of inputs.

    Agent i measures x = g_i·u, with u standard normal and an unknown gain g_i log-uniform in
    0.1 … 1, and predicts y = θ·u + noise, where θ is the same for all agents and ‖θ‖ = 2. Its own
    law is θ/g_i: a shared model can learn the direction of θ, and fine-tuning has to find the
    gain, in a loss whose curvature is g_i² times that of u. Curvature differs between agents up to
    100 times and is tied to the optimum.

    Args:
        agents: their number (``data.agents`` is not used, since the data has owners).
        samples: of every agent.
        inputs: numbers per sample.
        noise: standard deviation of normal noise on y.
        seed: of the law, the gains and the samples, independent of the run's seeds.

    >>> data = sensors(agents=3, samples=4)
    >>> len(data), data.input_shape, data.outputs, data.classes
    (12, (20,), 1, ())
    """
    check_generated(agents=agents, samples=samples, inputs=inputs, noise=noise, seed=seed)
    law = stream(seed, "sensors/law").standard_normal(inputs)
    law *= LENGTH / np.linalg.norm(law)
    low, high = map(math.log, GAINS)
    x, y = np.empty((agents, samples, inputs)), np.empty((agents, samples, 1))
    for agent in range(agents):
        rng = stream(seed, "sensors", agent=agent)
        gain = math.exp(rng.uniform(low, high))
        u = rng.standard_normal((samples, inputs))
        x[agent] = gain * u
        y[agent, :, 0] = u @ law + noise * rng.standard_normal(samples)
    return by_agent(x, y)
