"""Time and bytes of a federation's sites, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from nufed.report.tables import Table
from nufed.runs import Run
from nufed.runs.federation_status import TrafficLine

MAX_ROUNDS, MAX_SITES = 100, 20  # in the table by round; traffic.jsonl has all


def sites_table(run: Run) -> Table | None:
    """What each site answered, how long it took, and its bytes; None if that is not recorded."""
    lines = run.traffic()
    if not lines:
        return None
    seed = run.config.seeds[0]
    rows = []
    for agent in sorted({line.agent for line in lines}):
        own = [line for line in lines if line.agent == agent]
        answered = [line for line in own if line.bytes_up]
        trained = [line.seconds for line in answered if line.phase == "train"]
        rows.append(
            [
                run.who(seed, agent).removeprefix("site "),
                f"{len(answered)} of {len(own)}",
                f"{sum(trained) / len(trained):.1f}" if trained else "–",
                f"{max(trained):.1f}" if trained else "–",
                f"{sum(line.bytes_down for line in own) / 1e6:.3f}",
                f"{sum(line.bytes_up for line in own) / 1e6:.3f}",
            ]
        )
    headings = ["", "answered", "seconds to train, mean", "longest", "MB down", "MB up"]
    return Table(headings, rows, [False] * len(rows))


def rounds_table(run: Run) -> Table | None:
    """Seconds and kilobytes of every site in the last rounds; None if that is not recorded."""
    lines = run.traffic()
    if not lines:
        return None
    seed = run.config.seeds[0]
    agents = sorted({line.agent for line in lines})[:MAX_SITES]
    cells: dict[tuple[int, int], list[TrafficLine]] = {}
    for line in lines:
        cells.setdefault((line.round, line.agent), []).append(line)
    rounds = sorted({line.round for line in lines})[-MAX_ROUNDS:]
    rows = [[str(k), *(_cell(cells.get((k, agent), ())) for agent in agents)] for k in rounds]
    names = [run.who(seed, agent).removeprefix("site ") for agent in agents]
    return Table(["round", *names], rows, [False] * len(rows))


def _cell(lines: Sequence[TrafficLine]) -> str:
    """Of all requests of a round, also of attempts that were repeated."""
    if not lines:
        return "–"
    seconds = sum(line.seconds for line in lines)
    down, up = (sum(getattr(line, key) for line in lines) for key in ("bytes_down", "bytes_up"))
    return f"{seconds:.1f} s, {down / 1e3:.1f} ↓ {up / 1e3:.1f} ↑"
