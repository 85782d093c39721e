"""`nufed bounds`, from plain numbers and from runs."""

from dataclasses import replace

import pytest

import nufed
from nufed import InputError, theory
from nufed.errors import RunError
from nufed.lab.analysis.bounds import bounds_of_numbers, bounds_of_run
from nufed.lab.config import load_config
from nufed.lab.files import write_sealed
from nufed.lab.report.analysis_tables import bounds_notes, bounds_tables
from nufed.lab.report.run_page import build_report
from nufed.lab.runs import load_run
from nufed.theory import BatchSizes, ProblemConstants
from support import with_figures

NUMBERS = """
adapt_lr = 0.1
adapt_steps = 2
batch_size = 8
meta_lr = {meta_lr}
local_steps = 4
rounds = 1000
agents = 50
cohort = 10
initial_gap = 2.0
[constants]
B = 2.0
L = 1.5
"ρ" = 0.7
gradient_noise = 0.9
hessian_noise = 0.4
gradient_kurtosis = 1.1
hessian_kurtosis = 0.3
gradient_dissimilarity = 0.6
hessian_dissimilarity = 0.2
"""
CONSTANTS = ProblemConstants(2.0, 1.5, 0.7, 0.9, 0.4, 1.1, 0.3, 0.6, 0.2)


def test_numbers(tmp_path):
    (tmp_path / "n.toml").write_text(NUMBERS.format(meta_lr=0.001))
    found = bounds_of_numbers(tmp_path / "n.toml")
    assert [row.steps for row in found.by_steps] == [0, 1, 2]
    (method,) = found.methods
    promised = method.promised
    assert promised.smoothness == theory.meta_smoothness(CONSTANTS, 0.1, 2)
    assert promised.bias == theory.exact_error(CONSTANTS, 0.1, BatchSizes.equal(8, 2)).bias
    assert promised.admissible
    assert promised.total == pytest.approx(sum(promised.terms.values()))
    assert not bounds_notes(found)
    (tmp_path / "n.toml").write_text(NUMBERS.format(meta_lr=1.0))
    over = bounds_of_numbers(tmp_path / "n.toml")
    assert (
        not over.methods[0].promised.admissible
        and "above the limit of Theorem 1" in bounds_notes(over)[0]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rounds = 1000", "roundz = 1000"), "the key 'rounds' is missing|unknown key 'roundz'"),
        (("L = 1.5\n", ""), "missing or unknown: smoothness"),
        (("L = 1.5", "L = 0.0"), "smoothness = 0.0: must be above 0"),
        (("kurtosis = 1.1", "kurtosis = 0.1"), "gradient_kurtosis = 0.1: must be at least"),
        (("kurtosis = 0.3", "kurtosis = 0.01"), "hessian_kurtosis = 0.01: must be at least"),
        (("cohort = 10", "cohort = 60"), "cohort = 60: must lie in 1 … 50"),
        (("adapt_lr = 0.1", "adapt_lr = -0.1"), "alpha = -0.1"),
        (("adapt_lr = 0.1", "adapt_lr = = 1"), "can't be read as TOML"),
        (("batch_size = 8", "batch_size = 0"), "batch_size = 0"),
        (("adapt_steps = 2", "adapt_steps = 2000"), "adapt_steps = 2000"),
        (("adapt_lr = 0.1", "adapt_lr = 1e200"), "too large to compute"),
        (("initial_gap = 2.0", "initial_gap = inf"), "initial_gap = inf"),
        (("L = 1.5", "L = 1.5\nsmoothness = 2.0"), "by its letter and by its name"),
        (("rounds = 1000", "rounds = 9\ncurvature = 'hessian_free'"), "needs fd_step"),
    ],
)
def test_bad_numbers_are_one_sentence(change, message, tmp_path):
    (tmp_path / "n.toml").write_text(NUMBERS.format(meta_lr=0.001).replace(*change))
    with pytest.raises(ValueError, match=message) as caught:
        bounds_of_numbers(tmp_path / "n.toml")
    assert "\n" not in str(caught.value)


RUN = {
    "rounds": 4,
    "save_every": 2,
    "participation": 0.5,
    "data": {"agents": 5, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "hf": {"algorithm": "gmeta", "curvature": "hessian_free"},
    },
}


def test_a_run_with_a_smooth_model(tmp_path):
    model = {"args": {"hidden": [6], "activation": "tanh"}}
    methods = {**RUN["methods"], "ditto": {"algorithm": "ditto"}}
    run = nufed.run({**RUN, "model": model, "methods": methods}, out=tmp_path / "run")
    found = bounds_of_run(run)
    assert found.smooth and [row.steps for row in found.by_steps] == [0, 1, 2]
    assert [row.method for row in found.methods] == ["fedavg", "hf"]
    for row in found.methods:
        for key in ("bias", "error", "dissimilarity"):  # predicted ≥ measured
            assert getattr(row.measured, key) <= getattr(row.promised, key) + 1e-9
    rounds = [s.round for s in found.stationarity if s.method == "hf"]
    assert rounds == [0, 2, 4] and all(s.value > 0 for s in found.stationarity)
    assert [each.method for each in found.not_covered] == ["ditto"]
    assert "Not covered: ditto: " in " ".join(bounds_notes(found))
    assert [title for title, _ in bounds_tables(found)][-1].startswith("Theorem 1")
    write_sealed(run.path / "bounds.json", found.record())
    assert load_run(run.path).bounds() == found
    with with_figures():
        build_report([load_run(run.path)], run.path)
    page = (run.path / "report.html").read_text()
    assert "hessian_lipschitz (ρ)" in page and "bounds-stationarity" in page


def test_a_run_with_kinks_has_no_rho_and_says_so(tmp_path):
    run = nufed.run({**RUN, "model": {"args": {"hidden": [6]}}}, out=tmp_path / "run")
    found = bounds_of_run(run)
    assert not found.smooth and found.constants["hessian_lipschitz"] is None
    assert found.by_steps == []  # no smoothness, no bounds, whatever ν is
    assert all(row.promised is None and row.measured for row in found.methods)
    assert any("not smooth" in note for note in bounds_notes(found))
    assert any("none" in row for _, table in bounds_tables(found) for row in table.rows)


def test_other_data_is_refused_and_learned_step_sizes_are_not_covered(tmp_path):
    run = nufed.run(RUN, out=tmp_path / "run")
    text = (run.path / "config.toml").read_text()

    def changed(before, after):
        (tmp_path / "config.toml").write_text(text.replace(before, after))
        return replace(run, config=load_config(tmp_path / "config.toml"))

    with pytest.raises(RunError, match="the split of seed 0 is not that of"):
        bounds_of_run(changed("dirichlet = 0.5", "dirichlet = 0.6"))
    with pytest.raises(InputError, match="was given its data as Python objects"):
        bounds_of_run(changed('"digits"', '"given in Python"'))
    learned = bounds_of_run(changed("[methods.hf]", "[methods.hf]\nrates_lr = 0.1"))
    assert [row.method for row in learned.methods] == ["fedavg"]
    assert "one fixed step size" in learned.not_covered[0].reason


def test_a_run_without_a_method_that_is_covered_is_refused(tmp_path):
    own = {"method": {"batch_size": 6}, "methods": {"own": {"algorithm": "ditto"}}}
    run = nufed.run({**RUN, **own}, out=tmp_path / "run", figures=False)
    with pytest.raises(InputError, match=r"no method that the paper's bounds cover \(own: "):
        bounds_of_run(run)
