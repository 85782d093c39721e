"""How often host and device wait for each other, and what is copied between them.

Samples are copied to the device once, and the indices of an agent's batches once per round. The
host reads the largest magnitude of every vector that agents send or that the server holds, and the
norm of its change. Neither copies nor waits grow with the number of local steps.
"""

from dataclasses import replace

import pytest

import accelerator
from accelerator import NAME, counting
from conformance.cases import CASES
from conformance.test_algorithms import evaluate
from nufed import Objective
from nufed.algorithms.server_optimizer import OPTIMIZER_STATE
from nufed.simulation import Engines, Training
from support import federation, mlp

COHORT, EVALUATED = 3, 6
ENGINES = [
    (c, e) for c, a in CASES.items() for e in ("direct", "batched") if a.combines or e == "direct"
]
DECIDES = {"fedala": 11, "fedl2p": 0, "fedavg-kept": COHORT}
"""Algorithms whose loops end when a loss does, or that read a count of steps, with their waits."""
DECIDES |= {"fedamp": 2, "fedpac": COHORT, "fedfomo": 4 * COHORT}
"""The same that look which parameters, classes or models count."""
DECIDES |= {"moon": COHORT, "fedproto": COHORT, "fedproto-nearest": COHORT, "ifca": COHORT + 4}
"""The same that look, once per agent and round, at their start or for the best model; the server of
IFCA also at the share of each model."""
ROWS = {"fedamp": EVALUATED, "fedpac": EVALUATED, "fedfomo": 9}
"""Algorithms that look up agents in the server's tables, with their copies in an evaluation."""


class Trainer:
    """Rounds of a training on the device, after a first one that fills caches."""

    def __init__(self, case, engine, **settings):
        objective = Objective(mlp().to(NAME))
        self.algorithm = replace(CASES[case], **settings)
        self.engine = Engines(objective, federation(unseen=1), seed=5).get(engine)
        self.training = Training(self.algorithm, self.engine, 0.6)
        self.progress = self.training.start(objective.initial())
        self.round()

    def round(self):
        """Copies and waits of another round."""
        with counting() as found:
            self.progress = self.training.round(self.progress)
        assert len(self.progress.cohort) == COHORT
        return found


@pytest.mark.parametrize("case, engine", ENGINES)
def test_a_round(case, engine):
    trainers = [Trainer(case, engine, local_steps=steps) for steps in (2, 5)]
    few, many = (trainer.round() for trainer in trainers)
    sent = len(trainers[0].progress.server.keys() - set(OPTIMIZER_STATE))
    if case not in ("fedl2p", "fedfomo"):  # draw batches between steps: their number is not known
        assert few["to_device"] <= 1 + sent + 2 * COHORT and many["to_device"] == few["to_device"]
    most = sent * (COHORT + 2) + 1 + ROWS.get(case, 0)
    assert few["to_host"] <= most and many["to_host"] == few["to_host"]
    curvature = getattr(CASES[case], "curvature", None)
    products = getattr(CASES[case], "adapt_steps", 0) * COHORT
    if getattr(curvature, "fd_step", None) == "auto":  # it looks whether a product crosses a kink
        assert few["synchronised"] <= 2 * products and many["synchronised"] <= 5 * products
    elif hasattr(curvature, "fd_step"):  # a fixed step is checked at products 1, 10, 100, …
        assert few["synchronised"] <= 6 and many["synchronised"] <= 6
    else:
        assert few["synchronised"] <= DECIDES.get(case, 0), accelerator.waits
        assert many["synchronised"] == few["synchronised"]


@pytest.mark.parametrize("case, engine", ENGINES)
def test_an_evaluation(case, engine):
    """Scores: the losses of an agent, and its outputs. Besides indices and rows to the device."""
    trainer = Trainer(case, engine)
    with counting() as found:
        evaluate(trainer.algorithm, trainer.engine, trainer.progress)
    assert found["to_host"] == 2 * EVALUATED + ROWS.get(case, 0)
    # constants are made anew for each prediction, models are picked for each agent
    few = {"knn_per": 9, "fedfomo": 6}.get(case, 5)
    assert found["to_device"] <= few * EVALUATED
    # a choice of weights, exits, parameters, prototypes or models needs numbers
    chooses = ("fedala", "scalefl", "fedamp", "fedfomo", "ifca", "fedem")
    if case not in (*chooses, "fedproto", "fedproto-nearest"):
        assert found["synchronised"] == 0, accelerator.waits


def test_samples_are_copied_once():
    objective = Objective(mlp().to(NAME))
    engine = Engines(objective, federation(), seed=5).get("direct")
    data = engine.federation
    with counting() as found:
        data.scored(0)
        first = found
    with counting() as found:
        data.scored(1)
        data.scoring("validation").take([0, 3])
    assert first["to_device"] == 3 and found["to_device"] == 2  # inputs, targets, indices
