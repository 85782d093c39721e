import math
from dataclasses import fields

import numpy as np
import pytest

from nufed.errors import RunError
from nufed.lab.runs import Estimate, Row, Run, RunDirectory, load_run
from nufed.lab.runs.results import _T975, Line, Trained


def test_the_table_of_students_t_is_right():
    """Integrate the density numerically up to each quantile."""
    for degrees, quantile in enumerate(_T975, start=1):
        x = np.linspace(0, quantile, 20_001)
        scale = math.gamma((degrees + 1) / 2) / (
            math.sqrt(degrees * math.pi) * math.gamma(degrees / 2)
        )
        density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        assert 0.5 + np.trapezoid(density, x) == pytest.approx(0.975, abs=5e-5)


def test_intervals_have_their_nominal_coverage():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(4000):
        estimate = Estimate.of(rng.normal(3.0, 2.0, size=4).tolist())
        inside += abs(estimate.mean - 3.0) <= estimate.half_width
    assert inside / 4000 == pytest.approx(0.95, abs=0.015)
    assert Estimate.of([1.5]) == Estimate(1.5, None)


def test_a_run_directory_is_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [RunDirectory.create("mine").path.name for _ in range(3)]
    assert names == ["mine-001", "mine-002", "mine-003"]
    used = tmp_path / "used"
    used.mkdir()
    RunDirectory.create("mine", used)  # empty: fine
    (used / "file").write_text("x")
    with pytest.raises(RunError, match="exists and is not empty"):
        RunDirectory.create("mine", used)
    with pytest.raises(RunError, match="can't be created"):
        RunDirectory.create("mine", used / "file" / "below")


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="can't be read as a run directory"):
        load_run(tmp_path)


def test_other_rooms_get_records_not_mappings_of_anything():
    """Whoever reads a run misspells no key: all that files hold is typed."""
    for cls in (Run, Trained, Line, Row):
        assert [field.name for field in fields(cls) if "Any" in str(field.type)] == []
    assert Run.privacy.__annotations__["return"] == "PrivacyRecord | None"
