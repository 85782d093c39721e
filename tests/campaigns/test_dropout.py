"""A federation with a dropout of 30 % reaches the same accuracy."""

import tomllib
from importlib.resources import files

import pytest

import nufed

STEPS = 3


def accuracy(rounds, seeds, dropout, out):
    """The quickstart with one method: the run, and the mean accuracy of its agents and seeds."""
    preset = files("nufed.lab.config") / "presets" / "quickstart.toml"
    tables = {
        **tomllib.loads(preset.read_text("utf-8")),
        "methods": {"fo": {"algorithm": "gmeta", "curvature": "first_order"}},
        "rounds": rounds,
        "seeds": list(range(seeds)),
        "faults": {"dropout": dropout},
        "baselines": [],
        "eval_every": rounds,
        "save_every": 0,
    }
    run = nufed.run(tables, ["workers=1"], out=out)
    (row,) = [row for row in run.rows() if row.group == "seen"]
    return run, 100 * row.personal.mean


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("rounds", "seeds", "points"),
    [(20, 1, 10), pytest.param(200, 10, 2, marks=pytest.mark.slow)],
    ids=["short", "full"],
)
def test_dropout_of_30_percent_does_not_reduce_accuracy(tmp_path, tell, rounds, seeds, points):
    _, right = accuracy(rounds, seeds, 0.0, tmp_path / "all")
    run, found = accuracy(rounds, seeds, 0.3, tmp_path / "dropped")
    lines = [line for trained in run.methods["fo"].values() for line in trained.metrics]
    assert len(lines) == seeds * (rounds + 1)
    asked = sum(len(line.cohort) for line in lines)
    lost = sum(len(line.dropped) for line in lines)
    assert abs(lost - 0.3 * asked) < 5 * (asked * 0.3 * 0.7) ** 0.5
    (told,) = run.unanswered()
    assert f"{lost:,} of {asked:,} requests" in told
    assert told in (run.path / "report.html").read_text("utf-8")
    assert abs(found - right) < points
    tell(
        f"dropout: {lost:,} of {asked:,} requests not answered in {rounds} rounds of {seeds} "
        f"seeds: {found:.2f} % after {STEPS} steps, {right:.2f} % without dropout"
    )
