"""Uncalibrated sensors, generated: one law behind all agents, seen through a gain of each one's."""

from __future__ import annotations

import math

import numpy as np

from nufed.data.samples import Samples
from nufed.data.sinusoid import by_agent, check_generated
from nufed.seeding import stream

GAINS, LENGTH = (0.1, 1.0), 2.0


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
