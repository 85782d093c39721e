"""benchmarks/nu_gap.py: predicted and measured gaps on quadratics, and the page made of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")


def test_a_short_measurement_is_near_its_prediction_resumes_and_makes_the_page(tmp_path):
    import nu_gap

    path, page = tmp_path / "nu-gap.json", tmp_path / "page.md"
    sizes = nu_gap.Sizes(
        kappas=(16,), seeds=1, agents=(12, 8), rounds=12, methods=("ν = 1", "ν = 10")
    )
    first = nu_gap.compute(path, replace(sizes, methods=("ν = 1",)))
    kept = json.dumps(first)
    found = nu_gap.compute(path, sizes)
    assert len(found) == 4 and kept == json.dumps({key: found[key] for key in first})
    assert found == json.loads(path.read_text("utf-8"))

    key = ("correlated", "16", "ν = 10", 10)
    predicted, measured = (nu_gap.ratios(found, which)[key] for which in ("predicted", "measured"))
    assert measured == pytest.approx(predicted, rel=0.2) and measured[0] < 0.7
    nu_gap.write(found, path, page)
    text = page.read_text("utf-8")
    assert f"{predicted[0]:.2f} / {measured[0]:.2f} ± –" in text
    assert path.with_suffix(".svg").stat().st_size > 5000 and "nan" not in text
    for cells in (line.count("|") for line in text.splitlines() if line.startswith("|")):
        assert cells >= 4


def test_the_page_is_that_of_the_results():
    import nu_gap

    found = json.loads(nu_gap.RESULTS.read_text("utf-8"))
    page = nu_gap.PAGE.read_text("utf-8")
    assert "\n".join(nu_gap.measured_table(found)) in page
    assert f"{len(found)} of {nu_gap.planned(nu_gap.Sizes())} trainings" in page


def test_what_the_board_has_not_measured_is_not_printed(tmp_path, monkeypatch):
    import nu_gap

    monkeypatch.setattr(nu_gap, "BOARD", tmp_path / "board.json")
    assert nu_gap.slots()("equal rounds") == "not measured yet"
    nu_gap.BOARD.write_text(json.dumps({"equal rounds": "a sentence"}))
    assert [nu_gap.slots()(name) for name in ("equal rounds", "samples")] == [
        "a sentence",
        "not measured yet",
    ]
    asked = re.findall(r'board\("([^"]+)"\)', nu_gap.TEMPLATE.read_text("utf-8"))
    assert len(asked) == len(set(asked)) == 9
