"""``nufed tune``: searches the settings of every method with the same budget.

A search has a plan (what is searched with which budget), is resumed from its record, and ends with
a configuration with the chosen settings, ready for ``nufed run``.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

from nufed.errors import InputError, NumericalWarning, RunError, shown, visible
from nufed.lab.config import Config, load_config
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.load import read_config
from nufed.lab.config.schema import BudgetUnit, TunedTable, TuneTable
from nufed.lab.config.trust import require_trust
from nufed.lab.experiment.session import Options, Session, resumed_by, takes_options
from nufed.lab.experiment.setup import Setup, check_simulated
from nufed.lab.files import locked, write_durably, write_sealed
from nufed.lab.runs import RunDirectory, load_run
from nufed.lab.runs.json_files import check_entries, read_record
from nufed.lab.runs.provenance import flat_differences, plain_settings
from nufed.lab.runs.tuning_record import (
    AskedTrial,
    MethodSearch,
    SearchRecord,
    Trial,
    TuningRecord,
    finalists,
)
from nufed.lab.tuning.ranges import Predictor, Smoothness, configured, matters, ranges_of_methods
from nufed.lab.tuning.search import check_budget, resolve_sampler, rungs_of, search
from nufed.lab.tuning.trials import Trainer, TuneListener, scored_agents, with_settings

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
                ranges=searched,
                configured={
                    key: value
                    for key, value in configured(algorithms[name]).items()
                    if key in {each.setting for each in searched}
                },
                work=work[name],
                notes=notes,
            )
            for name, (searched, notes) in ranges.items()
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


def tuned_config(config: Config, record: TuningRecord) -> Config:
    """The configuration with the chosen settings of each method, and a record of the search."""
    search = record.search
    choices = {name: record.choice(name).settings for name in record.chosen}
    for name, settings in choices.items():
        config = with_settings(config, name, settings)
    tuned = TunedTable(
        budget=search.budget,
        per=search.per,
        unit=search.unit,
        seed=search.seed,
        sampler=search.sampler,
        agents=search.agents,
        trials={name: len(record.of(name)) for name in search.methods},
        choices=choices,
    )
    return config.model_copy(update={"tune": TuneTable(), "tuned": tuned})


def tuned_text(config: Config, record: TuningRecord) -> str:
    """The configuration as TOML, with comments on where it comes from."""
    search = record.search
    lines = [
        f"Tuned by: {search.command}",
        f"Budget of each method: {search.budget_text}; sampler {search.sampler}, seed "
        f"{search.seed}.",
        f"Scored on validation samples of {search.agents} agents, never on test samples.",
    ]
    failed = [name for name in search.methods if name not in record.chosen]
    if failed:
        lines.append(f"Every trial of {', '.join(failed)} failed: settings as configured.")
    text = "".join(f"# {visible(line)}\n" for line in lines)
    return f"{text}\n{config.to_toml()}"


TUNED, RESULT = "tuned.toml", "tune.json"


@dataclass(frozen=True)
class Tuning:
    """A finished search, as :func:`tune` returns it.

    ``config`` is the configuration with the chosen settings; ``record`` has all ranges and scores.
    """

    path: Path
    config: Config
    record: TuningRecord

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """The chosen settings by method."""
        return {name: dict(self.record.choice(name).settings) for name in self.record.chosen}

    @property
    def trials(self) -> list[Trial]:
        """All trials, in the order in which they were proposed."""
        return list(self.record.trials)

    def __repr__(self) -> str:
        return f"Tuning({str(self.path)!r}, {len(self.trials)} trials, choices={self.choices})"


@takes_options
def tune(
    config: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    budget: float | None = None,
    per: BudgetUnit | None = None,
    bounds: str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    trust: bool = False,
    figures: bool = True,
    on_start: Callable[[Path], None] | None = None,
    on_progress: TuneListener | None = None,
    **options: Unpack[Options],
) -> Tuning:
    """Search the settings of every method with the same budget, as ``nufed tune`` does.

    Trials are scored on validation samples; test samples are never read.

    Args:
        config: a preset's name, a TOML file, or the same tables as a mapping.
        overrides: ``key=value`` strings, as on the command line.
        budget: what each method may spend, in full trainings by the cheapest method, counted in
            gradients; by default ``[tune] budget``.
        per: ``"trial"``: the budget is a number of trials instead; by default ``[tune] per``.
        bounds: a run directory with the results of ``nufed bounds`` for this problem: declared
            ranges of step sizes then end at 2/L, with its estimated smoothness L.
        out: the directory to create; by default the next free ``runs/NAME-tune-001``.
        resume: the directory of a stopped or killed search, which is continued to the same bits;
            ``config`` may be left out.
        trust: allow importing the code that the directories ``resume`` and ``bounds`` name, if any.
        figures: whether to also write the page's charts as SVG and PNG files.
        on_start, on_progress: called with the directory, and after every round.
        options: as for :func:`nufed.run`.
    """
    session = Session.of(
        options, trust=trust, figures=figures, on_start=on_start, on_progress=on_progress
    )
    overrides = [*overrides, *([] if per is None else [f"tune.per={per}"])]
    checked = _configuration(config, overrides, budget, resume, session)
    check_simulated(checked)
    if resume is not None and bounds is not None:
        raise InputError("bounds can't be given to a resumed search: it keeps its ranges")
    with torch_threads(checked.threads):
        setup = _setup(checked, session)
        predict = Predictor(setup)
        if resume is None:
            smoothness = None if bounds is None else _smoothness(Path(bounds), checked, trust)
            command = _command(config, overrides, budget)
            plan = make_plan(checked, setup, predict, smoothness, command)
            wanted = None if out is None else Path(out)
            path = RunDirectory.create(f"{checked.name}-tune", wanted).path
        else:
            path = Path(resume)
            plan = reopen_plan(path, checked, setup)
        with resumed_by(f"nufed tune --resume {path}"), locked(path):
            if resume is None:
                write_durably(path / "config.toml", checked.to_toml().encode())
                write_sealed(path / SEARCH, plan.model_dump())
            if on_start:
                on_start(path)
            record = _search(setup.on_ray(session.ray), plan, path, predict, session)
            return _finish(checked, record, path, figures)


def _configuration(
    config: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    budget: float | None,
    resume: str | Path | None,
    session: Session,
) -> Config:
    """The configuration to tune; that of a search to resume if none is given."""
    more = [*overrides, *([] if budget is None else [f"tune.budget={float(budget)!r}"])]
    if resume is None and config is None:
        raise InputError("give a preset (see `nufed list`) or a TOML file, or --resume DIR")
    if config is not None:
        return load_config(config, more, session.given.methods)
    path = Path(str(resume))
    if not (path / SEARCH).is_file():
        raise RunError(
            f"{path} is not the directory of a search, it has no {SEARCH}: give another, or, if it "
            "was killed while it started, remove it and start again"
        )
    check_entries(path)
    recorded = read_config(path / "config.toml", more)
    require_trust(path, session.given.with_placeholders(recorded), session.trust)
    return recorded


def _setup(config: Config, session: Session) -> Setup:
    """The setup of the search: with the seeds of repeats, and what depends on all methods fixed."""
    _check_validation(config)
    seeds = [config.seeds[0], *_other_seeds(config)]
    fixed = {"seeds": seeds, "eval_steps": config.steps_shown, "baselines": [], "tune_local": False}
    setup = session.setup(config.model_copy(update=fixed))
    for seed in seeds:
        if config.tune.agents == "unseen" and not setup.federations[seed].split.unseen:
            raise InputError(
                'tune.agents = "unseen": no agents are held out from training; set '
                "data.unseen_agents, for example to 5"
            )
        if not scored_agents(setup, seed, config.tune.agents):
            raise InputError(
                f"data.validation = {config.data.validation:g}: no {config.tune.agents} agent has "
                "validation samples to score trials on; increase it"
            )
    return setup


def _check_validation(config: Config) -> None:
    if not config.data.validation and config.data.split_file is None:
        raise InputError(
            "data.validation = 0: tuning needs a validation part, because trials are scored on it "
            "and never on test samples; set data.validation, for example to 0.2"
        )


def _other_seeds(config: Config) -> list[int]:
    """Seeds of repeats: the configuration's others, then further ones."""
    others = config.seeds[1:]
    if config.data.split_file is None:
        others = [*others, *(s for s in range(1000) if s not in config.seeds)]
    return others[: config.tune.repeats]


def _smoothness(path: Path, config: Config, trust: bool) -> Smoothness:
    """The smoothness that ``nufed bounds`` estimated for a run on the same problem."""
    run = load_run(path, trust=trust)
    for table in ("data", "model", "loss"):
        if getattr(run.config, table) != getattr(config, table):
            raise InputError(
                f"the bounds of {path} are about another problem, its {table} differs: run `nufed "
                "bounds` on a run of this configuration"
            )
    estimated = run.bounds()
    constant = None if estimated is None else estimated.constants.get("smoothness")
    value = None if constant is None else constant.value
    if not value or not 0 < value < float("inf"):
        raise InputError(
            f"{path} has no estimate of the smoothness L: run `nufed bounds {path}` first"
        )
    return Smoothness(value, f"`nufed bounds` on {path}")


def _command(
    config: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], budget: float | None
) -> str:
    """The command that repeats the search."""
    source = "CONFIG" if isinstance(config, Mapping) else str(config)
    more = [] if budget is None else ["--budget", f"{budget:g}"]
    return shlex.join(["nufed", "tune", source, *overrides, *more])


def _search(
    setup: Setup,
    plan: SearchRecord,
    path: Path,
    predict: Predictor,
    session: Session,
) -> TuningRecord:
    """Run all trials and repeats that are not done, and choose."""
    listener = session.on_progress or (lambda event: None)
    rounds, better = plan.rungs[-1], plan.higher_is_better
    with session.training(setup) as stop:
        trainer = Trainer(setup, plan, path, predict, stop, listener)
        trials = search(plan, predict, trainer, trainer.discard)
        by_method = {name: [t for t in trials if t.method == name] for name in plan.methods}
        number = setup.config.tune.finalists
        best = {name: finalists(each, rounds, number, better) for name, each in by_method.items()}
        asked = [
            AskedTrial(**{**trial.model_dump(exclude={"rungs"}), "seed": seed})
            for seed in plan.repeat_seeds
            for of_method in best.values()
            for trial in of_method
        ]
        scores = trainer.repeat(asked, rounds)
    repeats = [
        Trial(**each.model_dump(), rungs=[score]) for each, score in zip(asked, scores, strict=True)
    ]
    chosen = {name: ranked[0].number for name, ranked in best.items() if ranked}
    return TuningRecord(search=plan, trials=trials, repeats=repeats, chosen=chosen)


def _finish(config: Config, record: TuningRecord, path: Path, figures: bool) -> Tuning:
    """Write the chosen configuration, the record and the page."""
    tuned = tuned_config(config, record)
    write_durably(path / TUNED, tuned_text(tuned, record).encode())
    write_sealed(path / RESULT, record.record())
    from nufed.lab.report.tune_page import build_tune_page  # charts are slow to import

    build_tune_page(record, path, figures=figures)
    return Tuning(path, tuned, record)
