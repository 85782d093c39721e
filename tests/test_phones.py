"""A round's memory in simulation depends on its cohort, not on the number of agents."""

from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_million_agents_take_no_memory(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import phones

    (row,) = phones.measure(10**6, [20])
    assert row[0] == 20
    assert row[2] < 8  # MB: less than a number of 8 bytes for each agent
