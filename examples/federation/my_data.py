"""Four sites with handwritten digits; class frequencies differ between sites."""

import numpy as np

from nufed.data import dirichlet
from nufed.lab.readers.sources import SOURCES


def load(site):
    """A real site would read its own file; here each takes its part of nufed's digits."""
    digits = SOURCES["digits"]()
    shares = dirichlet(digits.targets.numpy(), 4, 400, 0.3, np.random.default_rng(0))
    rows = shares[site["partition-id"]]
    return digits.inputs[rows] / 16, digits.targets[rows]
