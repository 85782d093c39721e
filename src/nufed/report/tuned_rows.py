"""What a report says about a search that chose the settings of a run's methods."""

from __future__ import annotations

from nufed.config import Config
from nufed.report.tune_tables import settings_text


def tuned_rows(config: Config) -> dict[str, str]:
    """Rows of the table of settings; none for a run that was not tuned."""
    tuned = config.tuned
    if tuned is None:
        return {}
    choices = [
        f"{name} {settings_text(own)} ({tuned.trials.get(name, 0)} trials)"
        for name, own in tuned.choices.items()
    ]
    rows = {
        "tuned": f"{'; '.join(choices)}. Every method had the same budget, {tuned.budget_text} "
        f"({tuned.sampler}, seed {tuned.seed}), scored on validation samples of {tuned.agents} "
        "agents"
    }
    changed = []
    for name, own in tuned.choices.items():
        table = config.methods[name].settings if name in config.methods else {}
        now = {**config.method.settings, **table}
        changed += [f"{name}.{key}" for key, value in own.items() if now.get(key) != value]
    if changed:
        rows["changed after tuning"] = ", ".join(changed)
    return rows
