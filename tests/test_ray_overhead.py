"""The benchmark of Ray's overhead, with tiny models and without Ray."""

from pathlib import Path


def test_the_overhead_is_what_a_round_takes_beside_its_share_of_the_work(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import ray_overhead

    (row,) = ray_overhead.measure(ray_overhead.QUICK, 1, None).values()
    assert row["seconds"].keys() == {"one process", "two workers"}

    def seconds(hidden, rounds, workers, address):
        return 7 + rounds * (3 if address else 4 / workers)

    monkeypatch.setattr(ray_overhead, "seconds_of_a_run", seconds)
    (row,) = ray_overhead.measure(ray_overhead.QUICK, 2, "auto").values()
    assert (row["overhead"], row["pays from"]) == (1.0, 2.0)
