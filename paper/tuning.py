"""The search for step sizes: a grid in factors of 3, extended until its best point lies inside.

Every method has the same grid of β, and of α where its training depends on it (FedAvg's does not:
its α is chosen at evaluation, as every method's is). A point is scored by the mean validation
accuracy after three fine-tuning steps. While the best point of a method lies on an edge of the
grid, its neighbours beyond the edge are tried too.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from nufed.lab.runs import Run
from paper import stages

BASE = 0.01  # step sizes are this times powers of 3
FIRST = {"adapt_lr": range(-1, 2), "meta_lr": range(0, 4)}  # powers tried at first
MAX_RUNS = 6  # after which a search ends, wherever its best points lie

Point: TypeAlias = tuple[int, int]  # the powers of α and β
Scores: TypeAlias = dict[str, dict[Point, float]]  # by method


def step_size(power: int) -> float:
    """A step size of the grid.

    >>> [step_size(k) for k in (-1, 0, 1)]
    [0.00333, 0.01, 0.03]
    """
    return float(f"{BASE * 3.0**power:.3g}")


def next_points(method: str, scores: Mapping[Point, float]) -> list[Point]:
    """The points to try next: the first grid, then neighbours of the best point; none when done.

    >>> next_points("gmeta-fo", {(0, 0): 0.5, (0, 1): 0.6, (-1, 1): 0.4, (1, 1): 0.4, (0, 2): 0.5})
    []
    >>> next_points("fedavg", {(0, 0): 0.5, (0, 1): 0.6})
    [(0, 2)]
    """
    alphas = [0] if method == "fedavg" else FIRST["adapt_lr"]
    if not scores:
        return [(a, b) for a in alphas for b in FIRST["meta_lr"]]
    a, b = best(scores)
    around = [(a, b - 1), (a, b + 1)]
    if method != "fedavg":
        around += [(a - 1, b), (a + 1, b)]
    return [point for point in around if point not in scores]


def best(scores: Mapping[Point, float]) -> Point:
    """The point with the best score; a diverged training (NaN) ranks worst."""
    return max(scores, key=lambda point: (scores[point] == scores[point], scores[point]))


def tables_of(tables: dict[str, Any], points: Mapping[str, Iterable[Point]]) -> dict[str, Any]:
    """The configuration of a search with the methods at every point to be tried.

    ν is shared by the methods that have it; FedAvg's and Per-FedAvg's is fixed.
    """
    methods = methods_of(points)
    shared = dict(tables["method"])
    if all(own["algorithm"] != "gmeta" for own in methods.values()):
        del shared["adapt_steps"]
    return tables | {"method": shared, "methods": methods}


def methods_of(points: Mapping[str, Iterable[Point]]) -> dict[str, Any]:
    """Methods of a configuration: every method of the page at every point to be tried."""
    return {
        f"{name}_{a}_{b}": {
            **stages.FOUR[name],
            "adapt_lr": step_size(a),
            "meta_lr": step_size(b),
        }
        for name, own in points.items()
        for a, b in own
    }


def read_scores(run: Run, scores: Scores) -> None:
    """Add the scores of a run of :func:`methods_of`; NaN where training failed."""
    assert run.config.eval_on == "validation"
    rows = {row.name: row.personal.mean for row in run.rows() if row.group == "seen"}
    for label in run.config.methods:
        name, a, b = label.rsplit("_", 2)
        scores[name][int(a), int(b)] = rows.get(label, float("nan"))


def chosen(search: str, method: str) -> dict[str, float]:
    """The step sizes that a finished search chose for a method."""
    text = (stages.WHERE.results / f"{search}.json").read_text("utf-8")
    own = json.loads(text)["chosen"][method]
    return {key: own[key] for key in ("adapt_lr", "meta_lr")}
