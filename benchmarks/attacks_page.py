"""Writes the section about attacks; all its numbers come from docs/results/attacks.json.

Statements follow from 95 % intervals over seeds, of differences paired by seed.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nufed.lab.runs.results import Estimate

RESULTS = Path("docs/results/attacks.json")
PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- made by `make attacks`: begin -->", "<!-- made by `make attacks`: end -->"

STEPS = 3
BEFORE, AFTER = "0", str(STEPS)
WHEN = {BEFORE: "before adaptation", AFTER: "after adaptation"}
SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "dirichlet": {"partition": "dirichlet", "dirichlet": 0.1},
}
SPLIT_WORDS = {"iid": "IID", "dirichlet": "α_d = 0.1"}
ATTACKS = ("none", "sign_flip", "scale", "scale, screened", "gaussian", "nan", "labels")
RULES = {
    "mean": ("0: one agent can move it anywhere", "one pass over the updates"),
    "clipped": ("1/2 for the norm of a step, 0 for its direction", "three passes"),
    "median": ("1/2", "n log n comparisons per number"),
    "trimmed": ("`trim`, here {trim}", "n log n comparisons per number"),
}

Values = Sequence[float | None]


class Results:
    """The file, by split, attack, rule and number of fine-tuning steps."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about

    def values(self, split: str, attack: str, rule: str, when: str) -> Values:
        """Mean accuracies of honest agents by seed; None where training failed or diverged."""
        found: Values = self.about["splits"][split][attack]["rules"][rule][when]
        return found

    def null(self, split: str, name: str) -> Values:
        found: Values = self.about["splits"][split]["none"]["nulls"][name]
        return found

    def over_mean(self, split: str, attack: str, rule: str, when: str) -> Estimate | None:
        mean = self.values(split, attack, "mean", when)
        return difference(self.values(split, attack, rule, when), mean)

    def damage(self, split: str, attack: str, rule: str, when: str) -> Estimate | None:
        """The accuracy that the attack costs the same rule."""
        none = self.values(split, "none", rule, when)
        return difference(none, self.values(split, attack, rule, when))

    def repaired(self, split: str, attack: str, rule: str) -> Estimate | None:
        """The damage before adaptation less that after it."""
        lost = [
            [a - b for a, b in both]
            for when in (BEFORE, AFTER)
            if (
                both := pairs(
                    self.values(split, "none", rule, when), self.values(split, attack, rule, when)
                )
            )
        ]
        return difference(*lost) if len(lost) == 2 else None


def pairs(a: Values, b: Values) -> list[tuple[float, float]]:
    """Both values of every seed; nothing if a seed lacks one."""
    both = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return both if len(both) == len(a) else []


def difference(a: Values, b: Values) -> Estimate | None:
    """The mean of a − b over seeds with its interval."""
    both = pairs(a, b)
    return Estimate.of([x - y for x, y in both]) if both else None


def sign(found: Estimate | None) -> int:
    """1 or −1 if the interval lies above or below 0, else 0."""
    if found is None or found.half_width is None or abs(found.mean) <= found.half_width:
        return 0
    return 1 if found.mean > 0 else -1


def write() -> Path:
    """Replace the section between its markers."""
    head, rest = PAGE.read_text("utf-8").split(BEGIN)
    about = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(f"{head}{BEGIN}\n{section(about)}\n{END}{rest.split(END)[1]}", "utf-8")
    return PAGE


def section(about: dict[str, Any]) -> str:
    """The whole section in Markdown."""
    results = Results(about)
    return "\n\n".join(
        [
            *introduction(about),
            "### Accuracy of honest agents",
            *(part for split in SPLITS for part in accuracy(results, split)),
            "### The cost of robust rules without an attack",
            differences(lambda s, w, r: results.over_mean(s, "none", r, w), "rule − mean"),
            *(sentence for split in SPLITS for sentence in without_attack(results, split)),
            "### Their gain under attack",
            *(part for split in SPLITS for part in under_attack(results, split)),
            "### What adaptation repairs",
            "The accuracy that an attack costs a rule, in points: before adaptation → after "
            "it. Bold: the interval of the first minus the second lies above 0.",
            *(part for split in SPLITS for part in repairs(results, split)),
        ]
    )


def introduction(about: dict[str, Any]) -> Iterator[str]:
    setting, seeds = about["setting"], len(about["setting"]["seeds"])
    method, (updates, size) = setting["method"], about["cost_of"]
    cohort = round(setting["participation"] * setting["agents"])
    trimmed = int(method["trim"] * cohort)
    late = {
        (split, attack, rule): gain
        for split, attacks in about["splits"].items()
        for attack, found in attacks.items()
        for rule, gain in found["late_gain"].items()
        if gain is not None
    }
    most = max(late, key=lambda cell: abs(late[cell]))
    yield (
        f"`make attacks` trains on the shipped digits: {setting['agents']} agents with 50 samples "
        f"each, of which {share(setting['corrupt'])} are corrupt; {cohort} agents a round, "
        f"{setting['rounds']} rounds, first-order updates, ν = {STEPS}, α = {method['adapt_lr']}, "
        f"β = {method['meta_lr']}, τ = {method['local_steps']}, D = {method['batch_size']}; "
        f"{seeds} seeds. The setting is that of the preset `quickstart`, with more agents a round "
        "and more rounds; how many was chosen from runs of the plain mean without an attack, with "
        "other seeds, and by their cost. Only honest agents are scored, on their own test data "
        "with true labels; without an attack, the agents that are corrupt in the other rows are "
        f"excluded too. Adaptation is {STEPS} steps. ± are 95 % intervals over seeds; differences "
        "are paired by seed, and bold where the interval excludes 0. Of twenty such intervals one "
        "misses by chance, on average."
    )
    yield (
        f"In the last third of the rounds accuracy after adaptation changed by at most "
        f"{100 * abs(late[most]):.1f} points ({label(most[1])}, {most[2]}, "
        f"{SPLIT_WORDS[most[0]]}), all agents and seeds together."
    )
    rows = [
        [rule, words[0].format(trim=method["trim"]), words[1], f"{about['costs'][rule]:.1f}"]
        for rule, words in RULES.items()
    ]
    yield table(["rule", "breakdown point", "cost", "time relative to the mean"], rows, texts=3)
    yield (
        f"Times are of {updates} updates of {size:,} numbers on one core. All but the mean hold a "
        "copy of all updates in float64. A breakdown point is a fraction of the cohort, not of the "
        f"federation: in {share(about['crowded'])} of these rounds more than {trimmed} of the "
        f"{cohort} agents were corrupt, which is more than the trimmed mean trims at each end."
    )


def accuracy(results: Results, split: str) -> Iterator[str]:
    for when in (AFTER, BEFORE):
        rows = [
            [label(attack), *(percent(results.values(split, attack, r, when)) for r in RULES)]
            for attack in ATTACKS
        ]
        yield table([f"{SPLIT_WORDS[split]}, {WHEN[when]}", *RULES], rows)
    untrained, majority, local = (
        percent(results.null(split, name)) for name in ("untrained", "majority", "local")
    )
    yield (
        f"Null baselines, {SPLIT_WORDS[split]}: an untrained model after the same adaptation "
        f"{untrained}; always the agent's most frequent class {majority}; trained on the agent's "
        f"data alone {local}."
    )
    useless = [
        f"{rule} under {label(attack)}"
        for attack in ATTACKS
        for rule in RULES
        if sign(
            difference(results.values(split, attack, rule, AFTER), results.null(split, "untrained"))
        )
        <= 0
    ]
    if useless:
        yield (
            "After adaptation these are not significantly better than the untrained model: "
            f"{', '.join(useless)}."
        )


def differences(of: Callable[[str, str, str], Estimate | None], heading: str) -> str:
    """Points for every rule but the mean, by split, before and after adaptation."""
    columns = [(split, when) for split in SPLITS for when in (BEFORE, AFTER)]
    words = [f"{SPLIT_WORDS[split]}, {WHEN[when]}" for split, when in columns]
    rows = [
        [rule, *(points(of(split, when, rule)) for split, when in columns)] for rule in others()
    ]
    return table([f"{heading}, points", *words], rows)


def without_attack(results: Results, split: str) -> Iterator[str]:
    for when in (BEFORE, AFTER):
        found = {rule: results.over_mean(split, "none", rule, when) for rule in others()}
        names = {f"{rule} ({points(e, bold=False)})": e for rule, e in found.items()}
        yield f"{SPLIT_WORDS[split]}, no attack, {WHEN[when]}: {by_sign(names)}."


def under_attack(results: Results, split: str) -> Iterator[str]:
    rows, names = [], {}
    for attack in ATTACKS[1:]:
        found = {rule: results.over_mean(split, attack, rule, AFTER) for rule in others()}
        rows.append([label(attack), *map(points, found.values())])
        names |= {f"{rule} under {label(attack)}": e for rule, e in found.items()}
    heading = f"{SPLIT_WORDS[split]}, {WHEN[AFTER]}, rule − mean, points"
    yield table([heading, *others()], rows)
    said = by_sign({name: e for name, e in names.items() if sign(e)}) or "none is significant"
    yield f"{SPLIT_WORDS[split]}, {WHEN[AFTER]}: {said}. Other differences are not significant."


def repairs(results: Results, split: str) -> Iterator[str]:
    rows, partly, wholly, harmed = [], [], [], []
    for attack in ATTACKS[1:]:
        cells = []
        for rule in RULES:
            before, after = (results.damage(split, attack, rule, w) for w in (BEFORE, AFTER))
            repaired = sign(results.repaired(split, attack, rule)) > 0
            cell = f"{points(before, bold=False)} → {points(after, bold=False)}"
            cells.append(f"**{cell}**" if repaired else cell)
            name = f"{rule} under {label(attack)}"
            if sign(before) > 0 and repaired:
                (partly if sign(after) > 0 else wholly).append(name)
            if sign(after) > 0:
                harmed.append(name)
        rows.append([label(attack), *cells])
    yield table([SPLIT_WORDS[split], *RULES], rows)
    yield (
        f"{SPLIT_WORDS[split]}: adaptation repairs a part, and significant damage is left: "
        f"{listed(partly)}. It repairs, and no significant damage is left: {listed(wholly)}. "
        f"Significant damage after adaptation: {listed(harmed)}."
    )


def by_sign(found: dict[str, Estimate | None]) -> str:
    """Which are significantly better or worse than the mean."""
    groups = {
        words: [name for name, e in found.items() if sign(e) == side]
        for words, side in (("worse than the mean", -1), ("better", 1), ("not significant", 0))
    }
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.items() if names)


def others() -> list[str]:
    return [rule for rule in RULES if rule != "mean"]


def label(attack: str) -> str:
    known = {"none": "no attack", "scale, screened": "`scale` with `max_update_norm = 3`"}
    return known.get(attack, f"`{attack}`")


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def percent(values: Values) -> str:
    bad = sum(value is None for value in values)
    if bad:
        return f"diverged in {bad} of {len(values)}"
    found = Estimate.of([value for value in values if value is not None])
    return f"{100 * found.mean:.1f} ± {100 * (found.half_width or math.nan):.1f} %"


def points(found: Estimate | None, bold: bool = True) -> str:
    if found is None:
        return "–"
    text = f"{100 * found.mean:+.1f} ± {100 * (found.half_width or 0):.1f}".replace("-", "−")
    return f"**{text}**" if bold and sign(found) else text


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table in Markdown whose first columns are texts and whose others are numbers."""
    lines = [headings, [*["---"] * texts, *["---:"] * (len(headings) - texts)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
