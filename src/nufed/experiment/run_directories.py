"""Starts the directory of a new run, and rebuilds the setup of an existing one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nufed.config import Config
from nufed.config.problem import Given, Problem
from nufed.config.schema import DataConfig
from nufed.data import Samples
from nufed.errors import InputError
from nufed.experiment.setup import Setup
from nufed.objective.threads import torch_threads
from nufed.runs import RunDirectory
from nufed.runs.provenance import Provenance


def check_simulated(config: Config) -> None:
    """Refuse the tables of a real federation."""
    for table in ("federation", "privacy"):
        if table in config.model_dump():
            raise InputError(
                f"[{table}] is for a federation whose sites keep their data: start it with `nufed "
                "federate run`, or remove the table to simulate"
            )


def begin_run(setup: Setup, directory: RunDirectory) -> None:
    """Write the splits and settings of a new run."""
    for seed, federation in setup.problem.federations.items():
        directory.write_split(federation.split, federation.samples, seed)
    Provenance(directory).write(
        setup.config, setup.measure, setup.engine_names, setup.samples, setup.samples.fingerprint
    )


def reopen_run(
    directory: RunDirectory,
    overrides: Sequence[str],
    given: Given,
    *,
    trust: bool,
    load_samples: Callable[[DataConfig], Samples | None] = lambda data: None,
) -> Setup:
    """The setup of an existing run, whose files must match it; nothing but a missing split is
    written.

    Args:
        directory: the run's directory.
        overrides: only ``rounds=…`` and ``workers=…``.
        given: the objects that were passed to the run.
        trust: allow importing the code that the directory names.
        load_samples: gives the data if it is loaded already, else None.
    """
    provenance = Provenance(directory)
    config = provenance.read_to_resume(overrides)
    recorded = provenance.recorded(config)
    recorded.check_trusted(given, trust)
    engines = provenance.engines()
    provenance.check_config(given.with_placeholders(config))
    with torch_threads(config.threads):
        samples = load_samples(config.data)
        problem = Problem.rebuild(recorded, given, trust=trust, samples=samples)
        provenance.check_split_files({seed: f.split for seed, f in problem.federations.items()})
        return Setup.make(problem, engines)
