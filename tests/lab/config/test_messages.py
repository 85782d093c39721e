"""Suggestions are made for typing errors, not for other words."""

import pytest

from nufed.algorithms import ALGORITHMS
from nufed.lab.config import presets
from nufed.lab.config.describe import suggest_key
from nufed.lab.config.load import known_keys
from nufed.lab.readers.sources import SOURCES
from nufed.registry import closest

KEYS = {
    "method.adapt_stepz": "method.adapt_steps",
    "method.adaptsteps": "method.adapt_steps",
    "method.adapt-steps": "method.adapt_steps",
    "adapt_steps": "method.adapt_steps",
    "method.optimiser": "method.optimizer",
    "method.momentun": "method.momentum",
    "method.curv": "method.curvature",
    "method.batch": "method.batch_size",
    "method.clip": "method.clip_norm",
    "round": "rounds",
    "seed": "seeds",
    "metrics": "metric",
    "loss_fn": "loss",
    "participation_rate": "participation",
    "training.rounds": "rounds",
    "data.agent": "data.agents",
    "data.dirichlet_alpha": "data.dirichlet",
    "data.validatoin": "data.validation",
    "faults.dropuot": "faults.dropout",
    "dta.agents": "data.agents",
    "method.epochs": None,
    "method.learning_rate": None,
    "method.lr": None,
    "method.tau": None,
    "epochs": None,
    "gpu": None,
    "model.hidden": None,
    "model.width": "method.width",
    "data.clients": None,
    "data.alpha": "model.lora.alpha",
    "data.path": None,
}
NAMES = {
    "FedAvg": (ALGORITHMS, "fedavg"),
    "per-fedavg": (ALGORITHMS, "per_fedavg"),
    "ditt": (ALGORITHMS, "ditto"),
    "scafold": (ALGORITHMS, "scaffold"),
    "fedsgd": (ALGORITHMS, None),
    "maml": (ALGORITHMS, None),
    "mocha": (ALGORITHMS, None),
    "cifar-10": (SOURCES, "cifar10"),
    "cifar": (SOURCES, "cifar10"),
    "mnist": (SOURCES, "mnist-writers"),
    "imagenet": (SOURCES, None),
    "emnist": (SOURCES, None),
    "quikstart": (presets(), "quickstart"),
    "mine.toml": (presets(), None),
    "x" * 10**5: (presets(), None),
    "": (presets(), None),
}


@pytest.mark.parametrize("given", KEYS)
def test_keys(given):
    right = KEYS[given]
    assert suggest_key(given, known_keys()) == (f"; did you mean {right!r}?" if right else "")


def test_a_setting_of_another_kind_is_not_suggested():
    known = [f"method.{key}" for key in ("trim", "meta_lr", "adapt_lr", "batch_size")]
    assert suggest_key("method.optimizer", known) == ""


@pytest.mark.parametrize("given", NAMES, ids=lambda name: name[:20])
def test_names(given):
    known, right = NAMES[given]
    assert closest(given, known) == right
