"""How the cost of a round grows with its agents, the model's size and ν.

    python benchmarks/growth.py [--turns 3] [--quick] [--out DIR]

measures rounds of gMeta on the direct engine, every size in a process of its own: the CPU-seconds
of a round, and the peak of resident memory above that without the model. Each size is compared
with its linear prediction: the line through the two sizes before it. Measured sizes are kept
in growth.json, so that a stopped benchmark resumes. Writes the chart beside it, and the table of
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import torch
from jobs import Sizes, lazy_data
from memory import ENVIRONMENT, resident

from nufed import Exact, FirstOrder, GMeta, Objective
from nufed.lab.report.figures import save_figures
from nufed.models import fcnn
from nufed.simulation import DirectEngine, Training

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- begin: growth -->", "<!-- end: growth -->"
INPUTS, CLASSES = 1000, 10
CURVATURES = {"first_order": FirstOrder(), "exact": Exact()}
SECONDS = 1.0  # of measured rounds in a process, at least
MOST_ROUNDS = 10


@dataclass(frozen=True)
class Round:
    """What is measured: a round of so many agents, with a model of so many numbers and ν steps."""

    agents: int
    numbers: int
    nu: int
    curvature: str = "first_order"

    @property
    def key(self) -> str:
        return f"{self.agents} agents, {self.numbers} numbers, nu {self.nu}, {self.curvature}"


@dataclass(frozen=True)
class Axis:
    """Rounds of increasing size; ``unit`` is what the size counts."""

    title: str
    unit: str
    rounds: dict[int, Round]

    @property
    def key(self) -> str:
        return self.title.replace("ν", "nu")


def axes(quick: bool) -> list[Axis]:
    agents = (2, 4, 6) if quick else (10, 30, 100, 300, 1000, 3000, 10_000)
    numbers = (10**4, 2 * 10**4, 10**5) if quick else tuple(10**k for k in range(4, 9))
    steps = (0, 1, 2) if quick else (0, 1, 2, 3, 4, 6, 8, 10)
    few, middle = (2, 10**4) if quick else (10, 10**6)
    return [
        Axis("agents in a round", "agents", {n: Round(n, 10**4, 1) for n in agents}),
        Axis("numbers of the model", "numbers", {n: Round(4, n, 1) for n in numbers}),
        *(
            Axis(
                f"ν, {name.replace('_', '-')}", "ν", {n: Round(few, middle, n, name) for n in steps}
            )
            for name in CURVATURES
        ),
    ]


def measure(wanted: Round) -> dict[str, float]:
    """CPU-seconds of a round, the least of several, and its peak memory in bytes."""
    torch.set_num_threads(1)
    sizes = Sizes(inputs=INPUTS, samples=50, pool=2000)
    small = Round(2, 2 * INPUTS, 1, wanted.curvature)
    rounds_of(lazy_data(2, sizes), small, most=1)  # loads libraries
    data = lazy_data(wanted.agents, sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    base = resident("VmRSS")
    times = rounds_of(data, wanted)
    return {"cpu": min(times), "peak": resident("VmHWM") - base}


def rounds_of(data, wanted: Round, most: int = MOST_ROUNDS) -> list[float]:
    """CPU-seconds of rounds after a first one."""
    torch.manual_seed(0)
    width = max(1, round((wanted.numbers - CLASSES) / (INPUTS + 1 + CLASSES)))
    objective = Objective(fcnn((INPUTS,), CLASSES, hidden=[width]))
    engine = DirectEngine(objective, data, 0)
    curvature = CURVATURES[wanted.curvature]
    algorithm = GMeta(wanted.nu, curvature=curvature, local_steps=1, batch_size=10, meta_lr=1e-3)
    training, times = Training(algorithm, engine, 1.0), list[float]()
    progress = training.round(training.start(objective.initial()))
    while len(times) < most and sum(times) < SECONDS:
        start = time.process_time()
        progress = training.round(progress)
        times.append(time.process_time() - start)
    return times


def in_own_processes(wanted: Round) -> dict[str, float]:
    """Time and memory of a round, a process for each: what shows memory would take time."""
    command = [sys.executable, __file__, "--only", json.dumps(vars(wanted))]
    found = {}
    for what, environment in (("cpu", {}), ("peak", ENVIRONMENT)):
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, **environment},
        )
        found[what] = json.loads(done.stdout)[what]
    return found


def with_predictions(sizes: list[int], values: list[float]) -> list[float | None]:
    """The linear prediction of every value: the line through those of the two sizes before."""
    points = list(zip(sizes, values, strict=True))
    predicted: list[float | None] = [None, None]
    for (x0, y0), (x1, y1), (x, _) in zip(points, points[1:], points[2:], strict=False):
        predicted.append(y1 + (y1 - y0) / (x1 - x0) * (x - x1))
    return predicted[: len(sizes)]


def table(results, every: list[Axis]) -> str:
    """Measured values and their ratios to predictions, a line for each size."""
    lines = ["| | size | CPU-ms per round | of its prediction | memory (MB) | of its prediction |"]
    lines.append("|---" * 6 + "|")
    for axis in every:
        rows = [results[one.key] for one in axis.rounds.values()]
        columns = [[row["cpu"] for row in rows], [row["peak"] for row in rows]]
        guesses = [with_predictions(list(axis.rounds), column) for column in columns]
        for number, size in enumerate(axis.rounds):
            cells = [axis.title if not number else "", f"{size:,}"]
            for column, guess, unit in zip(columns, guesses, (1e3, 1e-6), strict=True):
                wanted = guess[number]
                cells.append(f"{unit * column[number]:,.1f}")
                cells.append(f"{column[number] / wanted:.2f}" if wanted and wanted > 0 else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def chart(results, every: list[Axis]):
    """Cost against size, beside its predictions."""
    panels = []
    for what, unit, title in (("cpu", 1, "CPU-seconds per round"), ("peak", 1e-6, "memory (MB)")):
        row = []
        for axis in every:
            sizes = list(axis.rounds)
            values = [unit * results[one.key][what] for one in axis.rounds.values()]
            curves = {"measured": values, "predicted": with_predictions(sizes, values)}
            points = [
                {"x": x, "y": y, "kind": kind}
                for kind, curve in curves.items()
                for x, y in zip(sizes, curve, strict=True)
                if y is not None and y > 0
            ]
            kind = "linear" if axis.unit == "ν" else "log"
            ticks = alt.Axis(
                format="~s", grid=False, **({"values": sizes} if kind == "log" else {})
            )
            x = alt.X("x:Q", title=axis.title, scale=alt.Scale(type=kind), axis=ticks)
            y = alt.Y("y:Q", title=title, scale=alt.Scale(type=kind), axis=alt.Axis(tickCount=4))
            scale = alt.Scale(domain=list(curves), range=["#0072B2", "#E69F00"])
            colour = alt.Color("kind:N", title=None, scale=scale, legend=alt.Legend(orient="top"))
            marks = alt.Chart(alt.InlineData(values=points)).encode(x, y, colour)
            row.append(marks.mark_line(point=True).properties(width=210, height=150))
        panels.append(alt.hconcat(*row))
    return alt.vconcat(*panels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="processes per size, in turns")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(Round(**json.loads(options.only)))))
        return
    path, every = options.out / "growth.json", axes(options.quick)
    kept = json.loads(path.read_text()) if path.exists() else {}
    for turn in range(1, options.turns + 1):
        for wanted in dict.fromkeys(one for axis in every for one in axis.rounds.values()):
            row = kept.setdefault(wanted.key, {"turns": 0})
            if row["turns"] >= turn:
                continue
            found = in_own_processes(wanted)
            best = {name: min(row.get(name, value), value) for name, value in found.items()}
            kept[wanted.key] = {**best, "turns": turn}
            path.write_text(json.dumps(kept, indent=1) + "\n")
            print(f"{wanted.key}: {1e3 * best['cpu']:.1f} CPU-ms, {best['peak'] / 1e6:.1f} MB")
    save_figures([("growth", "", chart(kept, every))], options.out)
    print(text := table(kept, every))
    if options.out == HERE / "results":
        page = PAGE.read_text("utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
