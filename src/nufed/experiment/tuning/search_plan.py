"""The plan of a search: what is searched with which budget, from a configuration or a record."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nufed.config import Config
from nufed.errors import InputError, NumericalWarning, RunError, shown
from nufed.experiment.setup import Setup
from nufed.experiment.tuning.halving import check_budget, rungs_of
from nufed.experiment.tuning.ranges import Smoothness, configured, ranges_of_methods
from nufed.experiment.tuning.sampling import resolve_sampler
from nufed.experiment.tuning.work import Predictor, matters
from nufed.runs.json_files import check_entries, read_record
from nufed.runs.provenance import flat_differences, plain_settings
from nufed.runs.tuning_record import MethodSearch, SearchRecord

SEARCH = "search.json"


def make_plan(
    config: Config,
    setup: Setup,
    predict: Predictor,
    smoothness: Smoothness | None,
    command: str,
) -> SearchRecord:
    """What is searched, from the configuration and measured costs."""
    sampler = resolve_sampler(config.tune.sampler)
    algorithms = setup.problem.algorithms
    ranges = ranges_of_methods(config, algorithms, partial(matters, setup), smoothness)
    work = {name: config.rounds * predict(name, {}) for name in algorithms}
    packages = ["nufed", "torch", "numpy", *(["optuna"] if sampler == "tpe" else [])]
    return SearchRecord(
        format=2,
        command=command,
        config=_recorded(config),
        **_digests(setup),
        measure=setup.measure.name,
        higher_is_better=setup.measure.higher_is_better,
        budget=config.tune.budget,
        per=config.tune.per,
        unit=check_budget(config.tune.budget, work, config.tune.per),
        seed=config.tune.seed,
        repeat_seeds=setup.config.seeds[1:],
        sampler=sampler,
        agents=config.tune.agents,
        rungs=rungs_of(config.rounds, config.tune.halvings),
        methods={
            name: MethodSearch(
                ranges=own,
                configured={
                    key: value
                    for key, value in configured(algorithms[name]).items()
                    if key in {each.setting for each in own}
                },
                work=work[name],
                notes=notes,
            )
            for name, (own, notes) in ranges.items()
        },
        software={package: version(package) for package in packages},
    )


def _recorded(config: Config) -> dict[str, Any]:
    """A configuration as plain data, with ``[tune]`` written out."""
    return {**plain_settings(config), "tune": config.tune.model_dump()}


def _digests(setup: Setup) -> dict[str, Any]:
    splits = {str(seed): f.split.fingerprint for seed, f in setup.problem.federations.items()}
    return {"data_sha256": setup.samples.fingerprint, "splits": splits}


def reopen_plan(path: Path, config: Config, setup: Setup) -> SearchRecord:
    """The record of a search to resume; refuses another configuration, data or split."""
    if not (path / SEARCH).is_file():
        raise RunError(f"{path} is not the directory of a search: it has no {SEARCH}")
    check_entries(path)
    plan = read_record(path / SEARCH, SearchRecord)
    changed = flat_differences(plan.config, _recorded(config))
    if changed:
        words = "; ".join(f"{k} was {shown(a)} and is {shown(b)}" for k, (a, b) in changed.items())
        raise InputError(
            f"{path} is a search of another configuration ({words}): a resumed search keeps its "
            "settings; change them back, or start a new one with --out"
        )
    for what, value in _digests(setup).items():
        if getattr(plan, what) != value:
            word = "data" if what == "data_sha256" else "split"
            raise RunError(
                f"the {word} is not that of {path} (its SHA-256 differs): start a new one"
            )
    resolve_sampler(plan.sampler)
    now = {package: version(package) for package in plan.software}
    if now != plan.software:
        words = "; ".join(f"{p} {v}, now {now[p]}" for p, v in plan.software.items() if v != now[p])
        warnings.warn(
            f"{path} was started with other software ({words}): its choices may differ from those "
            "of an uninterrupted search",
            NumericalWarning,
            stacklevel=2,
        )
    return plan
