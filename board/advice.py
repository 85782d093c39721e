"""Checks the rule of `nufed advise CONFIG` against the board, with one problem held out at a time.

Each measured problem has a pilot in board/pilots, of two CPU-minutes at most (the check has the
time of the longest), with the seed of the search, and without a test sample. The rule gets the
pilot and the ranks of the *other* problems; what it recommends is compared with the best of all
methods by the board's own test. The result, and the ranks, are
src/nufed/lab/analysis/board_check.json, which nufed ships with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from board.page import Shown, problems
from board.problems import Stage, stages
from nufed.errors import InputError, RunError
from nufed.lab.analysis import places
from nufed.lab.analysis.recommend import (
    KINDS,
    BoardCheck,
    Checked,
    PilotRecord,
    recommend,
)
from nufed.lab.files import canonical, sha256
from nufed.lab.pilot import MINUTES, pilot
from nufed.lab.runs.json_files import write_json

PILOTS = Path(__file__).parent / "pilots"
CHECK = Path(__file__).parent.parent / "src/nufed/lab/analysis/board_check.json"
FEDAVG = "fedavg-5"


def write(
    of: Sequence[Stage] | None = None,
    say: Callable[[str], None] = print,
    folder: Path = PILOTS,
    target: Path = CHECK,
    minutes: float = MINUTES,
) -> BoardCheck:
    """Run the pilots that are missing, and write the check."""
    measured = [
        shown
        for shown in problems(stages() if of is None else of)
        if shown.complete and shown.ranked and not shown.stage.equal_gradients
    ]
    pilots = {}
    for shown in measured:
        try:
            pilots[shown.name] = _pilot_of(shown, folder, minutes, say)
        except InputError as error:  # such as data that is absent
            say(f"{shown.name}: no pilot: {error}")
    found = check([shown for shown in measured if shown.name in pilots], pilots)
    write_json(target, found.record())
    say(found.sentence)
    return found


def check(measured: Sequence[Shown], pilots: dict[str, PilotRecord]) -> BoardCheck:
    """The rule on every problem, given the other ones."""
    standing = {shown.name: ranks(shown) for shown in measured}
    checked = []
    for shown in measured:
        others = [each for each in measured if each is not shown]
        advice = recommend(pilots[shown.name], {each.name: standing[each.name] for each in others})
        usual = best_on(others) or FEDAVG
        ranked = list(shown.ranked)
        name = advice.method
        checked.append(
            Checked(
                problem=shown.name,
                recommended=name,
                rank=1 + _better(shown, name),
                of=len(ranked),
                best=ranked[0],
                tied=_tied(shown, name),
                possible=any(_tied(shown, kind) for kind in KINDS),
                fedavg=_tied(shown, FEDAVG),
                usual=_tied(shown, usual),
                usual_method=usual,
            )
        )
    seconds = max((pilots[shown.name].seconds for shown in measured), default=0.0)
    return BoardCheck(standing=standing, seconds=seconds, checked=checked)


def ranks(shown: Shown) -> dict[str, float]:
    """The ranks of the kinds of methods among each other; those without a score share the last."""
    means = _means(shown)
    order = sorted((n for n in KINDS if n in means), key=lambda n: means[n], reverse=True)
    return {name: float(order.index(name) + 1 if name in order else len(KINDS)) for name in KINDS}


def best_on(measured: Sequence[Shown]) -> str | None:
    """The method with the best mean rank of all on some problems; None without any."""
    listed = [list(shown.ranked) for shown in measured]
    everywhere = set.intersection(*map(set, listed)) if listed else set[str]()
    if not everywhere:
        return None
    return min(sorted(everywhere), key=lambda name: sum(names.index(name) for names in listed))


def _means(shown: Shown) -> dict[str, float]:
    """Mean scores of ranked methods and baselines, higher is better."""
    sign = 1 if shown.higher else -1
    names = [*shown.ranked, *shown.against_best]
    scores = {name: shown.scores(name, shown.group, shown.column) for name in names}
    return {
        name: sign * places.mean(each, shown.stage.protocol.seeds) for name, each in scores.items()
    }


def _better(shown: Shown, name: str) -> int:
    """How many methods have a better mean."""
    means = _means(shown)
    mine = means.get(name, float("-inf"))
    return sum(means[other] > mine for other in shown.ranked if other != name)


def _tied(shown: Shown, name: str) -> bool:
    """Whether a method or baseline can't be told apart from the best, or is the best."""
    place = shown.ranked.get(name) or shown.against_best.get(name)
    if place is None:
        return False
    better = place.difference is not None and (place.difference > 0) == shown.higher
    return place.tied or better


def _pilot_of(
    shown: Shown, folder: Path, minutes: float, say: Callable[[str], None]
) -> PilotRecord:
    """A problem's pilot, of its first fold if it has folds: read, or run and written."""
    tables = {k: v for k, v in shown.stage.tables.items() if k != "tune"}
    protocol = shown.stage.protocol
    tables |= {"seeds": [protocol.search_seed], "eval_steps": protocol.last}
    path, digest = folder / f"{shown.name}.json", sha256(canonical(tables))[:16]
    if path.exists():
        content = json.loads(path.read_text("utf-8"))
        if content["digest"] != digest:
            raise RunError(f"{path} is a pilot of another problem: remove it, to run it again")
        return PilotRecord.model_validate_json(json.dumps(content["pilot"]))
    began = time.process_time()
    record = pilot(tables, minutes=minutes, now=time.process_time)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": digest, "pilot": record.record()})
    say(f"{shown.name}: pilot of {time.process_time() - began:.0f} CPU-s")
    return record
