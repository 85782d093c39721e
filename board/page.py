"""Writes docs/board.md from the records: no number in it is typed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from board import chart, records
from board.problems import ONE, ORDER, VERSION, WHERE, Stage, stages
from board.records import Record
from nufed.lab.analysis import places
from nufed.lab.analysis.places import Array, Group, Place

TEMPLATE = Path(__file__).parent / "board.md.j2"
NU = (  # differences that tell what ν > 1 gains
    ("gmeta-3", "per-fedavg"),
    ("gmeta-5", "per-fedavg"),
    ("gmeta-3-fo", "per-fedavg-fo"),
    ("gmeta-5-fo", "per-fedavg-fo"),
    ("gmeta-3", "fedavg-1"),
    ("gmeta-3", "fedavg-5"),
    ("gmeta-3", "fedavg-10"),
)
SHORT = ("gmeta-3", "per-fedavg", "fedavg-5", "local")  # beside the best in the short table
MOST_SHOWN = 12  # methods in the table of those that are most often the best
MOST_TIED = 6  # named in the short table
COST = ("gradients", "hvps", "rounds", "bytes", "seconds")
EVIDENCE = {  # lines of the table in docs/when_nu_pays.md: problems, and steps at use
    "similar tasks": [("iid-digits", 10)],
    "different tasks": [("sensors", 10), ("omniglot-20", 10)],
    "one step": [("sensors", 1), ("omniglot-20", 1)],
    "ten steps": [("sensors", 3), ("omniglot-20", 3)],
    "equal gradients": [("sensors-gradients", 10), ("omniglot-20-gradients", 10)],
    "equal rounds": [("sensors", 10), ("omniglot-20", 10)],
}


@dataclass(frozen=True)
class Shown:
    """A problem with the records of all its folds."""

    name: str
    stages: Sequence[Stage]

    @cached_property
    def stage(self) -> Stage:
        return self.stages[0]

    @cached_property
    def methods(self) -> dict[str, list[Record]]:
        """By method or baseline: its record in every fold; only those that all folds have."""
        known = [records.read(stage.name) for stage in self.stages]
        names = [*self.stage.methods, *self.stage.baselines]
        return {name: [k[name] for k in known] for name in names if all(name in k for k in known)}

    @property
    def wanted(self) -> int:
        return len(self.stage.methods) + len(self.stage.baselines)

    @property
    def complete(self) -> bool:
        return len(self.methods) == self.wanted

    @property
    def title(self) -> str:
        words = ", equal gradients" if self.stage.equal_gradients else ""
        return f"{self.stage.about['title']}{words}"

    @property
    def higher(self) -> bool:
        return self.stage.higher_is_better

    @property
    def percent(self) -> bool:
        """Whether scores are accuracies."""
        return self.higher

    @cached_property
    def group(self) -> Group:
        """The agents that the rank is by: newcomers, where there are any."""
        first = next(r[0]["seeds"][0] for r in self.methods.values() if self._ran(r))
        return "unseen" if len(places.unpack(first["unseen"])) else "seen"

    @cached_property
    def column(self) -> int:
        """Of the scores after the last number of steps."""
        return len(self.stage.protocol.steps) - 1

    @staticmethod
    def _ran(found: Sequence[Record]) -> bool:
        return all("seeds" in record for record in found)

    def scores(self, name: str, group: Group, column: int) -> dict[int, Array]:
        return places.scores_of(self.methods[name], group, column)

    @cached_property
    def ranked(self) -> dict[str, Place]:
        """The places of all methods with finite scores for all first seeds, the best first."""
        return places.places(self._finite(self.stage.methods), self.higher, self.resampled)

    @cached_property
    def resampled(self) -> dict[str, dict[int, Array] | None]:
        """Scores on resamples of test samples, where agents are few."""
        return {
            name: places.resamples_of(of_folds, self.group)
            for name, of_folds in self.methods.items()
        }

    @cached_property
    def against_best(self) -> dict[str, Place]:
        """The places of baselines, beside the best method only."""
        if not self.ranked:
            return {}
        best = next(iter(self.ranked))
        both = self._finite([best, *self.stage.baselines])
        return places.differences(both, best, self.resampled)

    def _finite(self, names: Iterable[str]) -> dict[str, dict[int, Array]]:
        found = {}
        for name in names:
            if name not in self.methods or not self._ran(self.methods[name]):
                continue
            scores = self.scores(name, self.group, self.column)
            enough = set(self.stage.protocol.seeds) <= set(scores)
            if enough and all(np.isfinite(each).all() for each in scores.values()):
                found[name] = scores
        return found

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Methods without a place, with the cause."""
        found = []
        for name, of_folds in self.methods.items():
            if name in self.ranked or name in self.stage.baselines:
                continue
            causes = [
                record.get("refused") or record.get("untunable") or failure
                for record in of_folds
                for failure in [_first_failure(record)]
            ]
            cause = next((c for c in causes if c), "its scores are not finite")
            found.append((name, cause))
        return found

    def cost(self, name: str) -> dict[str, float]:
        """The mean cost of a scored training, summed over folds."""
        return {
            key: sum(np.mean([s.get(key, 0) for s in r["seeds"]]) for r in self.methods[name])
            for key in COST
        }

    @property
    def best_score(self) -> float:
        scores = self.scores(next(iter(self.ranked)), self.group, self.column)
        return places.mean(scores, list(scores))

    def tied(self) -> list[str]:
        """Methods that can't be told apart from the best one, without it."""
        return [name for name, place in list(self.ranked.items())[1:] if place.tied]


def _first_failure(record: Record) -> str | None:
    failed = (s for s in record.get("seeds", []) if "failure" in s)
    return next((f"seed {seed['seed']}: {seed['failure']}" for seed in failed), None)


def problems(every: Sequence[Stage]) -> list[Shown]:
    """All problems in their order, also those that are not measured."""
    by_name: dict[str, list[Stage]] = {}
    for stage in every:
        key = stage.problem + "-gradients" * stage.equal_gradients
        by_name.setdefault(key, []).append(stage)
    return [Shown(name, by_name[name]) for name in ORDER]


def number(value: float, percent: bool) -> str:
    """A score as text: accuracies in percent."""
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f}" if percent else f"{value:.3g}"


def signed(value: float, percent: bool) -> str:
    text = f"{100 * value:+.1f}" if percent else f"{value:+.2g}"
    return text.replace("-", "−")


def interval(place: Place, percent: bool) -> str:
    """A difference to the best with its interval."""
    if place.difference is None or place.interval is None:
        return "best"
    low, high = (signed(each, percent) for each in place.interval)
    return f"{signed(place.difference, percent)} ({low} … {high})"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scores_table(shown: Shown) -> str:
    """Every method and baseline, best first."""
    steps, percent, group = shown.stage.protocol.steps, shown.percent, shown.group
    rows = []
    for name, place in [*shown.ranked.items(), *shown.against_best.items()]:
        baseline = name in shown.stage.baselines
        by_step = [shown.scores(name, group, k) for k in range(len(steps))]
        seeds = list(by_step[-1])
        shared = shown.scores(name, group, len(steps))
        means = [number(places.mean(each, seeds), percent) for each in by_step]
        over_seeds = np.std([each.mean() for each in by_step[-1].values()], ddof=1)
        seen = "–"
        if group == "unseen":
            seen = number(places.mean(shown.scores(name, "seen", shown.column), seeds), percent)
        hurt = places.harmed(by_step[-1], shared, seeds, shown.higher)
        rows.append(
            [
                f"*{name}*" if baseline else name,
                "–" if baseline else f"{place.rank} ({place.ranks[0]}–{place.ranks[1]})",
                f"**{means[-1]}**" if place.tied and not baseline else means[-1],
                number(float(over_seeds), percent),
                interval(place, percent),
                "–" if place.p is None else f"{place.p:.2g}",
                *means[:-1],
                number(places.worst_tenth(by_step[-1], seeds, shown.higher), percent),
                "–" if math.isnan(hurt) else f"{100 * hurt:.0f} %",
                seen,
                str(len(seeds)),
            ]
        )
    before = [f"{k} steps" if k != 1 else "1 step" for k in steps[:-1]]
    headings = ["method", "rank (95 %)", f"{steps[-1]} steps", "± seeds", "to the best (95 %)", "p"]
    return table([*headings, *before, "worst 10 %", "harmed", "seen", "seeds"], rows)


def cost_table(shown: Shown) -> str:
    """What a training costs, and what the search chose."""
    rows = []
    for name in shown.ranked:
        cost, first = shown.cost(name), shown.methods[name]
        failed = sum("failure" in t for record in first for t in record["trials"])
        trials = sum(len(record["trials"]) for record in first)
        chosen = "; ".join(f"{k} {v:.3g}" for k, v in first[0]["chosen"].items())
        rows.append(
            [
                name,
                f"{cost['gradients']:,.0f}",
                f"{cost['hvps']:,.0f}",
                f"{cost['rounds']:,.0f}",
                f"{cost['bytes'] / 1e6:,.1f}",
                f"{cost['seconds']:.2g}",
                f"{trials - failed} of {trials}",
                chosen + (" (first fold)" if len(first) > 1 else ""),
            ]
        )
    headings = ["method", "gradients", "HVPs", "rounds", "MB", "CPU-s", "trials that ran"]
    return table([*headings, "chosen"], rows)


def short_table(every: Sequence[Shown]) -> str:
    """The best methods of every problem beside FedAvg, the paper's method, and training alone."""
    rows = []
    for shown in every:
        named = {}
        for name in SHORT:
            place = shown.ranked.get(name) or shown.against_best.get(name)
            scores = place and shown.scores(name, shown.group, shown.column)
            text = number(places.mean(scores, list(scores)), shown.percent) if scores else "–"
            named[name] = f"{text} ({place.rank})" if place and name in shown.ranked else text
        best = next(iter(shown.ranked))
        rows.append(
            [
                f"[{shown.title}](#{_anchor(shown.title)})",
                shown.stage.about["stands_for"],
                f"**{best}** {number(shown.best_score, shown.percent)}",
                _some(shown.tied()),
                *named.values(),
            ]
        )
    return table(["problem", "stands for", "best", "can't be told apart from it", *SHORT], rows)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - MOST_TIED
    shown = [*names[:MOST_TIED], *([f"{rest} more"] if rest > 0 else [])]
    return ", ".join(shown) or "none"


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def often_best(every: Sequence[Shown]) -> str:
    """The methods that are most often the best or can't be told apart from it."""
    ran: dict[str, list[Place]] = {}
    for shown in every:
        for name, place in shown.ranked.items():
            ran.setdefault(name, []).append(place)

    def order(name: str) -> tuple[int, float]:
        return -sum(p.tied for p in ran[name]), float(np.mean([p.rank for p in ran[name]]))

    rows = []
    for name in sorted(ran, key=order)[:MOST_SHOWN]:
        ranks = [place.rank for place in ran[name]]
        tied = sum(place.tied for place in ran[name])
        row = [name, f"{tied} of {len(ranks)}", f"{np.mean(ranks):.1f}", f"{max(ranks)}"]
        rows.append(row)
    return table(["method", "best, or not told apart", "mean rank", "worst rank"], rows)


def nu_counts(every: Sequence[Shown]) -> list[str]:
    """Sentences: on how many problems one method is beyond noise better or worse than another."""
    sentences = []
    for a, b in NU:
        better, worse, same = [], [], []
        for shown in every:
            place = _difference(shown, a, b)
            if place is None or place.difference is None or place.interval is None:
                continue
            if place.interval[0] * place.interval[1] <= 0:
                same.append(shown.title)
            elif (place.difference > 0) == shown.higher:
                better.append(shown.title)
            else:
                worse.append(shown.title)
        if number_of := len(better) + len(worse) + len(same):
            where = [
                f"{word} on {len(titles)} ({'; '.join(titles)})"
                for word, titles in (("better", better), ("worse", worse))
                if titles
            ]
            told = ", ".join(where) or "neither better nor worse on any"
            asked = f"{number_of} problem{'s' * (number_of > 1)}"
            sentences.append(f"{a} against {b}, {asked}: {told}.")
    return sentences


def nu_table(every: Sequence[Shown]) -> str:
    """What training for more steps gains on each problem."""
    rows = []
    for shown in every:
        if not shown.ranked:
            continue
        cells = []
        for a, b in NU:
            place = _difference(shown, a, b)
            if place is None:
                cells.append("–")
                continue
            better = place.difference is not None and (place.difference > 0) == shown.higher
            text = interval(place, shown.percent)
            sure = place.interval is not None and place.interval[0] * place.interval[1] > 0
            cells.append(f"**{text}**" if better and sure else text)
        rows.append([shown.title, *cells])
    return table(["problem", *(f"{a} − {b}" for a, b in NU)], rows)


def _difference(shown: Shown, a: str, b: str) -> Place | None:
    """The paired difference of two methods; None if one has no place."""
    if a not in shown.ranked or b not in shown.ranked:
        return None
    both = {name: shown.scores(name, shown.group, shown.column) for name in (b, a)}
    return places.differences(both, b, shown.resampled)[a]


def evidence(measured: Sequence[Shown]) -> dict[str, str]:
    """Sentences for docs/when_nu_pays.md: scores with ν = 3 minus those with ν = 1."""
    by_name = {shown.name: shown for shown in measured}
    equal = {
        name: " ".join(nu_counts([s for s in measured if s.stage.equal_gradients == gradients]))
        for name, gradients in (("at equal rounds", False), ("at equal gradients", True))
    }
    return {name: text for name, text in equal.items() if text} | {
        line: f"[the board](board.md), ν = 3 minus ν = 1: {'; '.join(texts)}"
        for line, asked in EVIDENCE.items()
        if (texts := [_gain(by_name[name], steps) for name, steps in asked if name in by_name])
    }


def _gain(shown: Shown, steps: int) -> str:
    """What ν = 3 gains over ν = 1 on a problem after some steps at use."""
    column = shown.stage.protocol.steps.index(steps)
    both = {name: shown.scores(name, shown.group, column) for name in NU[0]}
    resampled = shown.resampled if column == shown.column else places.NOT_RESAMPLED
    place = places.differences(both, NU[0][1], resampled)[NU[0][0]]
    better = "more" if shown.higher else "less"
    gained, reference = both.values()
    by_seed = [gained[seed].mean() - reference[seed].mean() for seed in gained if seed in reference]
    low, high = (signed(float(each), shown.percent) for each in (min(by_seed), max(by_seed)))
    notes = f"{better} is better; by seed {low} … {high}"
    return f"{interval(place, shown.percent)} on {shown.title}, k = {steps} ({notes})"


def write(of: Sequence[Stage] | None = None) -> list[Shown]:
    """Write the page and its chart for all stages, or tiny ones; the measured problems."""
    every = problems(stages() if of is None else of)
    measured = [shown for shown in every if shown.complete]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    WHERE.page.parent.mkdir(parents=True, exist_ok=True)
    picture = chart.write(measured, WHERE.page.parent) if measured else None
    text = environment.get_template(TEMPLATE.name).render(
        measured=measured,
        missing=[shown for shown in every if not shown.complete],
        picture=picture,
        protocol=every[0].stage.protocol,
        version=VERSION,
        one=ONE,
        scores_table=scores_table,
        cost_table=cost_table,
        nu_table=nu_table,
        nu_counts=nu_counts,
        short_table=short_table,
        often_best=often_best,
        number=number,
    )
    WHERE.page.write_text(text, "utf-8")
    if of is None:
        WHERE.evidence.write_text(json.dumps(evidence(measured), indent=1, ensure_ascii=False))
    return measured
