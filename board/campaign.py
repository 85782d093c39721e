"""Runs the stages of the board: searches every method, scores it, and scores contenders further.

Processes share the work through files: each takes methods that no other one is at. A method is
recorded when its search and its seeds are done; what a kill interrupts is one training.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from board import records
from board.problems import ONE, REFERENCE, Stage
from board.records import Record, Underway
from nufed import NumericalWarning
from nufed.data import Samples
from nufed.errors import InputError, RunError, in_short
from nufed.lab.analysis.places import Array, unpack
from nufed.lab.board import Contender
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.load import load_config
from nufed.lab.config.problem import build_samples

Say = Callable[[str], None]
WAIT = 5.0  # seconds between looks at what other processes have finished
NOISE = 1.96  # standard errors of a paired difference that are noise


class Bench:
    """A stage with its data loaded."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        data = load_config({k: v for k, v in stage.tables.items() if k == "data"}).data
        self.samples: Samples = build_samples(data)
        self._budget: float | None = None
        self.broken: dict[str, str] = {}  # methods with an error that nobody foresaw

    def contender(self, method: str) -> Contender:
        """A method, ready to be trained; its rounds are scaled at equal gradients."""
        stage = self.stage
        made = self._made(method)
        if not stage.equal_gradients:
            return made
        if self._budget is None:
            reference = made if method == REFERENCE else self._made(REFERENCE)
            self._budget = reference.work() * stage.tables["rounds"]
        work = made.work(1.0) if method.endswith(ONE) else made.work()
        return self._made(method, rounds=max(1, round(self._budget / work)))

    def _made(self, method: str, **run: int) -> Contender:
        stage = self.stage
        return Contender.of(
            stage.problem_of(method),
            method,
            stage.settings_of(method) | run,
            stage.ranges_of(method),
            self.samples,
            stage.protocol,
        )

    def baseline(self, name: str) -> Contender:
        """What scores a baseline: FedAvg, whose untrained model is fine-tuned."""
        return self._made("fedavg-5")


def run(stages: Sequence[Stage], part: tuple[int, int], say: Say) -> None:
    """Do all that is not done, as one of several processes."""
    benches = [bench for stage in stages if (bench := _open(stage, say)) is not None]
    while True:
        left = [bench for bench in benches if set(todo(bench.stage)) - set(bench.broken)]
        if not left:
            break
        with torch_threads(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # large steps are tried on purpose
            worked = False
            for bench in left:
                while _advance(bench, part, say):  # contenders follow when all are scored
                    worked = True
        if not worked:
            time.sleep(WAIT)
    broken = [f"{b.stage.name}: {name}: {why}" for b in benches for name, why in b.broken.items()]
    if broken:
        raise RunError(
            f"{len(broken)} methods failed with an unexpected error: {'; '.join(broken)}"
        )


def _open(stage: Stage, say: Say) -> Bench | None:
    if not any(todo(stage)):
        return None
    try:
        return Bench(stage)
    except InputError as error:
        say(f"{stage.name}: skipped: {error}")
        return None


def todo(stage: Stage) -> Iterator[str]:
    """The methods and baselines of a stage that lack something; contenders when all are scored."""
    known = records.read(stage.name)
    names = [*stage.methods, *stage.baselines]
    missing = [name for name in names if not is_scored(stage, name, known)]
    yield from missing
    if not missing:
        more = stage.protocol.more_seeds
        for name in contenders(stage, known):
            if not set(more) <= {seed["seed"] for seed in known[name]["seeds"]}:
                yield name


def is_scored(stage: Stage, name: str, known: dict[str, Record]) -> bool:
    """Whether a method's record is complete, and of these settings."""
    digest = stage.digest(name) if name in stage.methods else None
    return name in known and known[name].get("digest") == digest


def _advance(bench: Bench, part: tuple[int, int], say: Say) -> bool:
    """Work on all methods of a stage that no other process is at; whether there was any."""
    stage, worked = bench.stage, False
    for name in in_turn([n for n in todo(stage) if n not in bench.broken], part):
        with records.claimed(stage, name) as mine:
            if not mine or name not in todo(stage):
                continue
            began = time.process_time()
            try:
                record = finished(bench, name, records.read(stage.name).get(name))
            except Exception as error:  # the other methods continue; it is reported at the end
                bench.broken[name] = in_short(error)
                say(f"{stage.name}: {name}: unexpected error: {traceback.format_exc()}")
                continue
            records.write(stage.name, name, record)
            worked = True
            say(f"{stage.name}: {name}: {_summary(record)} ({time.process_time() - began:.0f} s)")
    return worked


def in_turn(names: Sequence[str], part: tuple[int, int]) -> list[str]:
    """This part's share of the names first, then the others'."""
    k, n = part
    return sorted(names, key=lambda name: (names.index(name) % n != k - 1, names.index(name)))


def finished(bench: Bench, name: str, before: Record | None) -> Record:
    """A method or baseline with its search and its seeds; with more seeds if it has these."""
    stage, protocol = bench.stage, bench.stage.protocol
    baseline = name in stage.baselines
    scored = before is not None and (baseline or before.get("digest") == stage.digest(name))
    wanted = [*protocol.seeds, *(protocol.more_seeds if scored else ())]
    if name in stage.methods and "needs" in stage.methods[name]:
        return {"digest": stage.digest(name), "refused": stage.methods[name]["needs"]}
    try:
        with_it = bench.baseline(name) if baseline else bench.contender(name)
    except InputError as error:
        return {"digest": stage.digest(name), "refused": str(error)}
    if baseline:
        return {"seeds": [getattr(with_it, name)(seed) for seed in protocol.seeds]}
    done = before if scored and before is not None else {}
    so_far = Underway(stage, name)
    trials = done.get("trials") or with_it.search(
        so_far.known("trial"), lambda trial: so_far.add({"trial": trial})
    )
    record: Record = {
        "digest": stage.digest(name),
        "rounds": with_it.setup.config.rounds,
        "searched": with_it.searched(),
        "trials": trials,
    }
    settings = with_it.best(trials)
    if settings is None:
        return {**record, "untunable": trials[0]["failure"]}
    known = {seed["seed"]: seed for seed in [*so_far.known("seed"), *done.get("seeds", [])]}
    for seed in wanted:
        if seed not in known:
            known[seed] = with_it.score(settings, seed)
            so_far.add({"seed": known[seed]})
    return {**record, "chosen": settings, "seeds": [known[seed] for seed in sorted(known)]}


def contenders(stage: Stage, known: dict[str, Record]) -> list[str]:
    """Methods within noise of the best one, by validation scores with the first seeds.

    Noise are 1.96 standard errors of the paired difference, over agents within seeds.
    """
    sign = 1 if stage.higher_is_better else -1
    scores: dict[str, list[Array]] = {}
    for name in stage.methods:
        seeds = [s for s in known[name].get("seeds", []) if s["seed"] in stage.protocol.seeds]
        if seeds and all("failure" not in seed for seed in seeds):
            scores[name] = [sign * unpack(seed["validation"])[:, 0] for seed in seeds]
    means = {name: np.mean([each.mean() for each in by_seed]) for name, by_seed in scores.items()}
    means = {name: mean for name, mean in means.items() if np.isfinite(mean)}
    if not means:
        return []
    best = max(means, key=lambda name: means[name])
    return [name for name in means if not _is_behind(scores[name], scores[best])]


def _is_behind(scores: Sequence[Array], best: Sequence[Array]) -> bool:
    gaps = [b - a for a, b in zip(scores, best, strict=True)]
    error = np.sqrt(sum(gap.var(ddof=1) / len(gap) for gap in gaps)) / len(gaps)
    return bool(np.mean([gap.mean() for gap in gaps]) > NOISE * error)


def _summary(record: Record) -> str:
    if "refused" in record:
        return f"can't run: {record['refused']}"
    if "untunable" in record:
        return f"no trial succeeded: {record['untunable']}"
    means = [unpack(seed["validation"]).mean() for seed in record["seeds"] if "validation" in seed]
    return f"validation {np.mean(means):.4g}" if means else "diverged"
