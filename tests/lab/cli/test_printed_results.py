"""Tables of results lose no digit: piped at full width, in narrow terminals in blocks."""

import csv
import io
import json
import re

import pytest

import nufed as library
from nufed.lab.cli.printed_results import blocks
from nufed.lab.cli.terminal import natural_width, table
from nufed.lab.report.tables import Table
from support import without_report

LONG = "a-method-with-quite-a-long-name"
CONFIG = {
    "rounds": 1,
    "workers": 1,
    "seeds": [0, 1],
    "data": {"agents": 5, "samples_per_agent": 20, "validation": 0.2},
    "method": {"adapt_steps": 1, "batch_size": 5},
    "methods": {
        LONG: {"algorithm": "gmeta", "curvature": "first_order"},
        "fedavg": {"algorithm": "fedavg"},
    },
    "baselines": ["majority", "local"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with without_report():
        return library.run(CONFIG, out=tmp_path_factory.mktemp("runs") / "run").path


def words(line):
    return line.replace(" %", "%").split()


def test_piped_tables_have_all_columns_and_digits(run, nufed):
    printed = nufed("report", run, "--no-figures", cwd=run).stdout
    assert "…" not in printed
    lines = printed.splitlines()
    (head,) = [line for line in lines if line.lstrip().startswith("global")]
    for name in ("personal", "− local", "− best", "worst 10 %", "balanced", "minority"):
        assert name in head
    rows = json.loads((run / "results.json").read_text())["rows"]
    for row in rows:
        (line,) = [line for line in lines if line.startswith(row["name"] + " ")]
        assert f"{100 * row['personal']['mean']:.1f}%" in words(line)
        assert line == line.rstrip()


def test_a_narrow_terminal_shows_whole_numbers(run, nufed, monkeypatch):
    """As in a terminal that is 44 columns wide."""
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "44", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    found = nufed("report", run, "--no-figures", "--out", run.parent / "narrow", cwd=run).stdout
    text = re.sub(r"\x1b\[[\d;]*m", "", found)  # without styles
    rows = json.loads((run / "results.json").read_text())["rows"]
    for row in rows:
        own = [line for line in text.splitlines() if line.startswith(row["name"] + " ")]
        shown = [word for line in own for word in words(line)]
        assert f"{100 * row['personal']['mean']:.1f}%" in shown
    assert "…" not in text and "global" not in text.split("agents seen")[1]  # left out


@pytest.mark.parametrize("width", [10, 30, 60, 200])
def test_blocks_keep_every_column_that_is_not_optional(width):
    headings = ["", *(f"column {i}" for i in range(8))]
    rows = [["name", *(f"{i}.123456 %" for i in range(8))]]
    shown = Table(headings, rows, (), ("column 7", "column 2"))
    parts = list(blocks("t", shown, width))
    kept = [heading for part in parts for heading in part.headings[1:]]
    wanted = headings[1:] if width == 200 else [h for h in headings[1:] if h[-1] not in "27"]
    assert kept == wanted
    assert [c for part in parts for c in part.rows[0][1:]] == [
        rows[0][headings.index(h)] for h in wanted
    ]
    for part in parts:
        needed = natural_width(table(part.rows, part.headings, title="t", right=True, gap=1))
        assert needed <= max(width, 20)  # a name and one column need 20


def test_csv_has_the_numbers_of_results_json(run, nufed):
    printed = nufed("report", run, "--no-figures", "--csv", cwd=run).stdout
    found = list(csv.DictReader(io.StringIO(printed)))
    results = json.loads((run / "results.json").read_text())
    assert len(found) == len(results["rows"]) == 4
    for line, row in zip(found, results["rows"], strict=True):
        assert (line["name"], line["group"], line["kind"]) == (row["name"], "seen", row["kind"])
        assert float(line["personal"]) == row["personal"]["mean"]
        half = row["personal"]["half_width"]
        assert line["personal_half_width"] == ("" if half is None else repr(half))
        own = {p["against"]: p for p in results["paired"] if p["name"] == row["name"]}
        assert line["minus_local"] == (repr(own["local"]["mean"]) if own else "")
    best = found[0]["name"]
    assert found[0]["minus_best"] == ""
    (other,) = [p for p in results["paired"] if p["against"] == best]
    assert float(found[1]["minus_best"]) == other["mean"]
    both = nufed("report", run, "--csv", "--json", cwd=run)
    assert both.returncode == 2 and "give one of them" in both.stderr


def test_what_auto_was_resolved_to_is_shown(run, nufed):
    printed = nufed("report", run, "--no-figures", cwd=run).stdout
    assert "dirichlet (by 'auto'), α_d (dirichlet) = 0.01" in printed
    assert "5 agents, 20 samples each" in printed
    assert "dirichlet (by &#39;auto&#39;), α_d" in (run / "report.html").read_text()
