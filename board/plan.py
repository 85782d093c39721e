"""Predicts the cost of a campaign from short measurements: a few rounds of a few methods.

It is an upper bound: methods that can't run on a problem cost nothing.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence

from board.campaign import Bench
from board.problems import Stage
from nufed import NumericalWarning
from nufed.errors import InputError, TrainingError, UpdateError
from nufed.lab.board import Contender, Trained
from nufed.lab.config.devices import torch_threads

ROUNDS = 5  # that are measured
MEASURED = ("fedavg-1", "fedavg-5", "gmeta-3", "ditto", "fedrep", "scaffold")
EVALUATED = ("fedavg-5", "ditto")  # methods whose evaluation is measured, too


def show(stages: Sequence[Stage], say: Callable[[str], None]) -> None:
    """Print the predicted CPU-minutes of every stage."""
    say(f"{'stage':24}{'methods':>8}{'a training':>12}{'a trial':>9}{'a score':>9}{'minutes':>9}")
    total = 0.0
    for stage in stages:
        try:
            bench = Bench(stage)
        except InputError as error:
            say(f"{stage.name}: skipped: {error}")
            continue
        with torch_threads(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            total += _stage(bench, say)
    say(f"in all {total / 60:.1f} CPU-hours")


def _stage(bench: Bench, say: Callable[[str], None]) -> float:
    stage, protocol = bench.stage, bench.stage.protocol
    trainings: dict[str, float] = {}
    evaluations: list[tuple[float, float]] = []
    for name in MEASURED:
        try:
            contender = bench.contender(name)
            trainings[name] = _training(contender)
            if name in EVALUATED:
                evaluations.append(_evaluation(contender))
        except (InputError, TrainingError, UpdateError):
            continue  # it costs nothing
    trial, score = (sum(each) / len(evaluations) for each in zip(*evaluations, strict=True))
    seeds = len(protocol.seeds) + len(protocol.more_seeds) / 4  # of a quarter of the methods
    mean = sum(trainings.values()) / len(trainings)
    seconds = protocol.trials * (mean + trial) + seeds * (mean + score)
    seconds *= len(stage.methods)
    say(
        f"{stage.name:24}{len(stage.methods):8}{mean:10.2f} s{trial:7.2f} s{score:7.2f} s"
        f"{seconds / 60:9.1f}"
    )
    return seconds / 60


def _training(contender: Contender) -> float:
    """The CPU-seconds of a training, from a few rounds."""
    rounds, seed = contender.setup.config.rounds, contender.protocol.search_seed
    few = min(ROUNDS, rounds)
    Trained.of(contender.setup, contender.name, seed, contender.protocol, 1)  # fills caches
    trained = Trained.of(contender.setup, contender.name, seed, contender.protocol, few)
    return float(trained.cost["seconds"]) * rounds / few


def _evaluation(contender: Contender) -> tuple[float, float]:
    """The CPU-seconds of scoring a trial, and of scoring a seed."""
    seed, protocol = contender.protocol.search_seed, contender.protocol
    trained = Trained.of(contender.setup, contender.name, seed, protocol, 2)
    began = time.process_time()
    trained.step_sizes()
    middle = time.process_time()
    trained.scores()
    return middle - began, time.process_time() - middle
