"""What short commands cost: CPU-seconds of all their processes, and seconds.

    python benchmarks/short_runs.py [--turns 5] [--against CHECKOUT] [--long | --quick] [--out DIR]

measures `nufed run quickstart rounds=3`, `nufed report`, and a page of `nufed watch` that is drawn
again, with `--long` `nufed run omniglot` (that is `make run`) instead, in processes of their own.
With the path of another checkout of nufed, both run in turns, so that load on the machine affects
them alike, and the tables of their results must be equal. Writes its rows into short_runs.json, and
the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from measure import median, ratio

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- begin: short runs -->", "<!-- end: short runs -->"
NUFED = [sys.executable, "-m", "nufed"]
RUN = ["run", "quickstart", "rounds=3"]
QUICKSTART, MAKE_RUN = "`nufed run quickstart rounds=3`", "`make run` (`nufed run omniglot`)"
QUICK = ["seeds=[0]", "data.agents=6", "data.unseen_agents=1", "workers=1", "--quick"]
DRAW_AGAIN = """
import sys, time
from pathlib import Path
from nufed.lab.report.watch import training_state, watched_page
watched_page(training_state(Path(sys.argv[1])))
cpu, start = time.process_time(), time.perf_counter()
watched_page(training_state(Path(sys.argv[1])))
print(time.process_time() - cpu, time.perf_counter() - start)
"""


def commands(size: str, run: Path, folder: Path) -> dict[str, list[str]]:
    """The commands by what is shown; ``run`` is a finished run, ``folder`` is new every time."""
    quickstart = [*NUFED, *RUN, "--out", str(folder / "run")]
    if size == "quick":
        return {QUICKSTART: [*quickstart, *QUICK]}
    if size == "long":
        return {MAKE_RUN: [*NUFED, "run", "omniglot", "--out", str(folder / "run")]}
    return {
        QUICKSTART: quickstart,
        "`nufed report` of it": [*NUFED, "report", str(run), "--out", str(folder / "page")],
        "a page of `nufed watch`, drawn again": [sys.executable, "-c", DRAW_AGAIN, str(run)],
    }


def cost_of(command: list[str], source: Path) -> tuple[float, float]:
    """CPU-seconds of a command with its processes, and seconds."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as on users' machines
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    if DRAW_AGAIN in command:
        cpu, seconds = map(float, done.stdout.split())
        return cpu, seconds
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def results_of(run: Path) -> object:
    """The tables of a run without times and paths."""
    return json.loads((run / "results.json").read_text())["rows"]


def measure(sources: dict[str, Path], turns: int, size: str) -> dict[str, dict[str, dict]]:
    """Times by command and source; of short runs the first turn, not counted, fills caches."""
    times: dict[str, dict[str, dict]] = {}
    tables = {}
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "finished"
        if size == "short":
            cost_of([*NUFED, *RUN, "--out", str(run)], sources["now"])
        for turn, (name, source) in product(range(size != "short", turns + 1), sources.items()):
            folder = Path(place) / f"{turn}-{name}"
            for shown, command in commands(size, run, folder).items():
                cpu, seconds = cost_of(command, source)
                if turn:
                    row = times.setdefault(shown, {}).setdefault(name, {"cpu": [], "seconds": []})
                    row["cpu"].append(cpu)
                    row["seconds"].append(seconds)
                if (folder / "run").exists():
                    tables[shown, name] = results_of(folder / "run")
                    shutil.rmtree(folder / "run")
    for shown, name in tables:
        assert tables[shown, name] == tables[shown, "now"], f"{shown}: other results than {name}"
    return times


def table(results: dict[str, dict[str, dict]]) -> str:
    """Medians, and how many times less CPU time it takes than before, with the range over turns."""
    columns = ["before", "now"] if any("before" in row for row in results.values()) else ["now"]
    titles = [f"{name}: {what}" for name in columns for what in ("CPU-s", "seconds")]
    titles += ["CPU-s, before / now"] * (len(columns) - 1)
    lines = [f"| {' | '.join(['', *titles])} |", "|---" * (len(titles) + 1) + "|"]
    for shown, row in results.items():
        cells = [
            f"{median(row[name], what):.1f}" if name in row else ""
            for name in columns
            for what in ("cpu", "seconds")
        ]
        if "before" in row:
            found = ratio(row["before"], row["now"], what="cpu")
            cells.append(f"{found['median']:.2f} ({found['from']:.2f} to {found['to']:.2f})")
        elif len(columns) > 1:
            cells.append("")
        lines.append(f"| {' | '.join([shown, *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--long", action="store_const", const="long", dest="size", default="short")
    size.add_argument("--quick", action="store_const", const="quick", dest="size")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    sources = {"now": HERE.parent / "src"}
    if options.against:
        sources = {"before": options.against / "src", **sources}
    path = options.out / "short_runs.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    results = kept | measure(sources, options.turns, options.size)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(text := table(results))
    if options.out == HERE / "results":
        page = PAGE.read_text("utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
