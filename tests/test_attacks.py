"""The tables of attacks: what is compared, who is scored, and statements from intervals."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from nufed.lab.config import load_config
from nufed.lab.runs.results import Estimate

ROOT = Path(__file__).parent.parent


@pytest.fixture
def attacks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import attacks

    return attacks


@pytest.fixture
def page(attacks):
    return attacks.attacks_page


def test_runs_differ_in_the_rule_the_attack_and_the_split_only(attacks, page):
    for split in page.SPLITS:
        for attack in page.ATTACKS:
            config = load_config(attacks.settings(split, attack))
            own = [m.model_dump(exclude_unset=True) for m in config.methods.values()]
            assert own == [{"algorithm": "gmeta", "aggregation": rule} for rule in page.RULES]
            assert config.eval_on == "test" and config.data.source == "digits"
            assert config.faults.corruption == (0 if attack == "none" else attacks.CORRUPT)
            assert len(config.seeds) >= 3
            kept = {"data", "faults", "max_update_norm", "baselines"}
            same = load_config(attacks.settings("iid", "none")).model_dump(exclude=kept)
            assert config.model_dump(exclude=kept) == same


def test_only_honest_agents_are_scored(attacks):
    def scores(seed):
        corrupt = attacks.corrupt_agents(seed)
        assert len(corrupt) == 6
        return [SimpleNamespace(agent=a, score=(0.0, float(a not in corrupt))) for a in range(30)]

    found = SimpleNamespace(config=SimpleNamespace(seeds=[0, 1, 2]))
    part = {seed: SimpleNamespace(scores=scores(seed)) for seed in (0, 2)}
    assert attacks.honest(found, part, 1) == [1.0, None, 1.0]
    assert attacks.honest(found, part, 0) == [0.0, None, 0.0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [((0.02, 0.01), 1), ((-0.02, 0.01), -1), ((0.01, 0.02), 0), ((-0.01, 0.02), 0), (None, 0)],
)
def test_statements_follow_from_intervals(page, found, expected):
    assert page.sign(found and Estimate(*found)) == expected


def test_what_adaptation_repairs_is_taken_between_the_same_seeds(page):
    def cell(before, after):
        return {"rules": {rule: {"0": before, "3": after} for rule in page.RULES}}

    none, attacked = cell([0.9, 0.7], [0.95, 0.9]), cell([0.5, 0.3], [0.9, 0.85])
    results = page.Results({"splits": {"iid": {"none": none, "scale": attacked}}})
    repaired = results.repaired("iid", "scale", "mean")
    assert repaired.mean == pytest.approx(0.35) and repaired.half_width == pytest.approx(0)
    assert results.damage("iid", "scale", "mean", "3").mean == pytest.approx(0.05)
    results = page.Results({"splits": {"iid": {"none": none, "scale": cell([None, 0.3], [0, 0])}}})
    assert results.repaired("iid", "scale", "mean") is None
    assert page.percent([None, 0.3]) == "diverged in 1 of 2"


def test_the_page_is_generated_from_the_numbers(page):
    about = json.loads((ROOT / page.RESULTS).read_text("utf-8"))
    text = (ROOT / page.PAGE).read_text("utf-8")
    shown = re.search(f"{page.BEGIN}\n(.*)\n{page.END}", text, re.DOTALL)[1]
    assert shown == page.section(about)
