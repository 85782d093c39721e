"""Every method runs on the digits with its defaults, to results and a report."""

import pytest

import nufed
from nufed.algorithms import ALGORITHMS
from nufed.errors import NumericalWarning


def test_every_method_runs_on_the_digits_with_its_defaults(tmp_path):
    tables = {
        "rounds": 2,
        "baselines": [],
        "data": {"agents": 6, "samples_per_agent": 40},
        "method": {"batch_size": 10},
        "methods": {name: {} for name in ALGORITHMS},
    }
    without_part = [
        pytest.warns(NumericalWarning, match=f"{name}.*the model has no such part")
        for name in ("fedbn", "fedsa_lora")
    ]
    with without_part[0], without_part[1]:
        run = nufed.run(tables, out=tmp_path / "run", figures=False)
    assert {row.name.split()[0] for row in run.rows()} == set(ALGORITHMS)
    assert (run.path / "report.html").exists()
