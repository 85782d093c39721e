"""Benchmarks outside of `make bench`, with tiny sizes, to their end."""

import json
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


def test_a_federation_is_measured_in_seconds_and_memory():
    import large_federation

    seconds, peaks = large_federation.measure(rounds=2, sites=1, width=8, codec="int8")
    assert seconds > 0 and {"ServerApp", "SuperLink", "site"} <= peaks.keys()


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
