"""Benchmarks outside of `make bench`, with tiny sizes, to their end."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")


def test_the_overhead_is_what_a_round_takes_beside_its_share_of_the_work(monkeypatch):
    import ray_overhead

    (row,) = ray_overhead.measure(ray_overhead.QUICK, 1, None).values()
    assert row["seconds"].keys() == {"one process", "two workers"}

    def seconds(hidden, rounds, workers, address):
        return 7 + rounds * (3 if address else 4 / workers)

    monkeypatch.setattr(ray_overhead, "seconds_of_a_run", seconds)
    (row,) = ray_overhead.measure(ray_overhead.QUICK, 2, "auto").values()
    assert (row["overhead"], row["pays from"]) == (1.0, 2.0)


def test_the_cost_of_compression_is_a_row_for_every_codec_and_method(capsys):
    import compression

    compression.measure("digits", rounds=1, seeds=1, codecs=["off", "int8"])
    names = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if "|" in line]
    methods = ["fedavg", "gmeta"]
    first = [["| initial model", m] for m in methods], [["| off", m] for m in methods]
    assert names[:4] == [row for pair in zip(*first, strict=True) for row in pair]
    assert names[4:] == [["| int8", m] for m in methods]


@pytest.mark.slow
def test_a_federation_is_measured_in_seconds_and_memory():
    import large_federation

    seconds, peaks = large_federation.measure(rounds=2, sites=1, width=8, codec="int8")
    assert seconds > 0 and {"ServerApp", "SuperLink", "site"} <= peaks.keys()


def test_the_memory_of_a_mostly_frozen_run_is_summed_over_its_processes(monkeypatch):
    import frozen_memory as benchmark

    monkeypatch.setattr(benchmark, "AGENTS", 4)
    row = benchmark.run(2, {"algorithm": "fedavg"})
    up, block = (width * benchmark.WIDTH + benchmark.WIDTH for width in (64, 480))
    assert row["peak"] > row["frozen"] == 4 * (up + 2 * block)
    assert row["trained"] == 480 * 410 + 410 + 410 * 10 + 10
    seen = iter([[], [1]])
    monkeypatch.setattr(benchmark, "children", lambda process: next(seen))
    assert benchmark.proportional(os.getpid()) == 0  # a process began meanwhile


def test_the_rules_for_the_step_size_at_use_are_compared(monkeypatch, tmp_path, capsys):
    import step_size_rule

    out = tmp_path / "rules.json"
    words = ["--quick", "--runs", str(tmp_path / "runs"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["step_size_rule.py", *words])
    step_size_rule.main()
    (problem,) = json.loads(out.read_text()).values()
    assert {gain["against"] for gain in problem["gains"]} == {"trained", "old"}
    for row in problem["rows"]:
        assert row["samples"] > 0 and row["scales"]["trained"] == 1
    assert "| digits | gmeta-fo |" in capsys.readouterr().out


def test_the_table_of_rules_on_the_page_is_that_of_the_results():
    import step_size_rule

    results = json.loads(step_size_rule.RESULTS.read_text())
    assert step_size_rule.section(results) in step_size_rule.PAGE.read_text("utf-8")


def test_p_values_are_corrected_for_their_number():
    import step_size_rule

    rows = [{"p": 0.01}, {"p": 0.5}, {"p": 0.02}]
    step_size_rule.holm(rows)
    assert [row["holm"] for row in rows] == pytest.approx([0.03, 0.5, 0.04])


def test_growth_is_measured_against_the_line_through_the_two_sizes_before(
    monkeypatch, tmp_path, capsys
):
    import growth

    assert growth.with_predictions([1, 2, 4, 8], [3, 5, 9, 20]) == [None, None, 9, 17]
    monkeypatch.setattr(growth, "in_own_processes", growth.measure)
    measured = []
    for turns in ("1", "1", "2"):  # the second time nothing is left to measure
        monkeypatch.setattr(
            "sys.argv", ["growth.py", "--quick", "--turns", turns, "--out", str(tmp_path)]
        )
        growth.main()
        measured.append(capsys.readouterr().out.count("CPU-ms,"))
    assert measured == [10, 0, 10]
    rows = json.loads((tmp_path / "growth.json").read_text())
    assert all(row["turns"] == 2 and row["cpu"] > 0 for row in rows.values())
    assert (tmp_path / "growth.png").exists()
    assert "| ν, exact | 0 |" in growth.table(rows, growth.axes(quick=True))


def test_a_short_run_is_measured_with_its_processes(monkeypatch, tmp_path, capsys):
    import short_runs

    words = ["--quick", "--turns", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["short_runs.py", *words])
    short_runs.main()
    ((name, row),) = json.loads((tmp_path / "short_runs.json").read_text()).items()
    assert name in capsys.readouterr().out and row["now"]["cpu"][0] > 0.5  # torch is imported


def test_two_checkouts_are_measured_in_turns_and_must_have_equal_tables(monkeypatch, tmp_path):
    import short_runs

    asked = []

    def run(command, source):
        asked.append(source.name)
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"rows": [source.name * different]}))
        return 2.0 if source.name == "old" else 1.0, 3.0

    jobs = {"a run": ["run"], "another": ["run"]}
    monkeypatch.setattr(
        short_runs,
        "commands",
        lambda size, run, folder: {name: [*job, str(folder / "run")] for name, job in jobs.items()},
    )
    monkeypatch.setattr(short_runs, "cost_of", run)
    sources, different = {"before": Path("old"), "now": Path("new")}, False
    times = short_runs.measure(sources, 2, "quick")
    assert asked == ["old", "old", "new", "new"] * 2
    assert times["another"]["now"] == {"cpu": [1.0, 1.0], "seconds": [3.0, 3.0]}
    assert "| a run | 2.0 | 3.0 | 1.0 | 3.0 | 2.00 (2.00 to 2.00) |" in short_runs.table(times)
    different = True
    with pytest.raises(AssertionError, match="a run: other results than before"):
        short_runs.measure(sources, 1, "quick")


def test_tables_of_costs_on_the_page_are_those_of_the_results():
    import growth
    import short_runs

    page, results = growth.PAGE.read_text("utf-8"), growth.HERE / "results"
    kept = json.loads((results / "growth.json").read_text())
    assert growth.table(kept, growth.axes(quick=False)) in page
    assert short_runs.table(json.loads((results / "short_runs.json").read_text())) in page
