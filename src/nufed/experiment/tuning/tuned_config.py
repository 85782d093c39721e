"""The configuration with the settings that a search chose, ready for ``nufed run``."""

from __future__ import annotations

from nufed.config import Config
from nufed.config.methods import MethodConfig
from nufed.config.tune_table import TunedTable, TuneTable
from nufed.errors import visible
from nufed.runs.tuning_record import TuningRecord


def tuned_config(config: Config, record: TuningRecord) -> Config:
    """The configuration with the chosen settings of each method, and a record of the search."""
    search = record.search
    choices = {name: record.choice(name).settings for name in record.chosen}
    shared = MethodConfig(algorithm=config.method.algorithm)
    tables = dict(config.methods)
    for name, settings in choices.items():
        table = tables.get(name, shared).model_dump()
        tables[name] = MethodConfig(**{**table, **settings})
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
    return config.model_copy(update={"methods": tables, "tune": TuneTable(), "tuned": tuned})


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
