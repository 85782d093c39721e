"""The rule of ``nufed advise CONFIG``, on pilots that can be checked by hand."""

import re

import numpy as np
import pytest

from nufed.lab.analysis.recommend import (
    KINDS,
    BoardCheck,
    Checked,
    Heterogeneity,
    PilotRecord,
    Tried,
    board_check,
    gap,
    mean_rank,
    recommend,
)
from nufed.lab.report.pilot_tables import advice_record, pilot_table, sentences, start_with
from nufed.theory import small_spread_gap

BASE = np.random.default_rng(0).normal(0.5, 0.1, size=20)


def tried(method, behind, noise=0.0, **more):
    """A method whose scores are behind BASE by a mean of exactly ``behind``."""
    own = np.random.default_rng(1).normal(size=20)
    own = noise * (own - own.mean()) / own.std()
    scores = BASE - behind + own
    settings = {**KINDS[method], "meta_lr": 0.1}
    values = {"score": scores.mean(), "scores": scores.tolist(), "settings": settings}
    return Tried(method=method, adapt_lr=0.1, steps=3, **values | more)


def pilot(*methods, **more):
    known = {
        "source": "mine", "seed": 0, "minutes": 2.0, "seconds": 9.0, "measure": "accuracy",
        "higher_is_better": True, "agents": 40, "trained": 30, "scored": 20, "newcomers": True,
        "samples": (10, 12.5, 20), "classes": 3, "parameters": 100, "steps": 3, "cohort": 5,
        "rounds": 25, "rounds_configured": 100, "smooth": True, "heterogeneity": [],
    }  # fmt: skip
    return PilotRecord(**known | more, tried=list(methods))


def test_the_boards_ranks_decide_among_those_near_the_best():
    # the difference's standard error is noise/√20 of agents that are resampled
    record = pilot(tried("ifca", 0), tried("ditto", 0.02, 0.1), tried("local", 0.04, 0.1))
    noise = 0.1 / np.sqrt(20)
    assert gap(record, "ditto", "ifca").mean == pytest.approx(0.02)
    assert gap(record, "ditto", "ifca").noise == pytest.approx(noise, rel=0.05)
    assert 0.02 < noise < 0.04
    ranks = {"ifca": 3.0, "ditto": 1.0, "local": 1.0}
    found = recommend(record, {"a": ranks, "b": {**ranks, "ditto": 2.0}})
    assert found.near == ("ifca", "ditto")
    assert found.method == "ditto"  # of ranks 2 and 1.5; ifca has 1 and 3
    assert recommend(record, {"a": ranks, "b": {**ranks, "ifca": 1.0}}).method == "ifca"
    assert recommend(record, {}).method == "ifca"  # without ranks the best of the pilot
    other = {"a": {"ifca": 1.0, "ditto": 2.0}}
    assert recommend(record, other).method == "ifca"
    assert mean_rank(other, "fedrep") == len(KINDS)  # a method without a rank is last


def test_a_method_that_is_clearly_behind_or_failed_is_never_recommended():
    failed = Tried(method="ditto", score=None, failure="it diverged")
    record = pilot(tried("ifca", 0.3), failed, tried("fedavg-5", 0))
    found = recommend(record, {"a": {"ifca": 1.0, "ditto": 1.0, "fedavg-5": 8.0}})
    assert found.method == "fedavg-5" and list(found.behind) == ["ifca"] and not found.alike
    lower = record.model_copy(update={"higher_is_better": False})
    assert recommend(lower, {}).method == "ifca"
    text = "\n".join(sentences(record, found, board_check()))
    assert "ditto can't be used here: it diverged." in text
    assert "ahead of every other method" in text


def test_few_agents_are_compared_over_their_samples():
    moved = np.random.default_rng(2).normal(0, 0.05, size=(20, 100)).tolist()
    flat = np.zeros((20, 100)).tolist()
    record = pilot(tried("ifca", 0, resampled=flat), tried("ditto", 0.01, 0.0, resampled=moved))
    found = gap(record, "ditto", "ifca")
    assert found.noise == pytest.approx(0.05 / np.sqrt(20), rel=0.05)


def test_training_alone_is_recommended_only_if_the_others_were_trained_long_enough():
    record = pilot(tried("local", 0), tried("fedavg-5", 0.1), tried("ditto", 0.2))
    assert recommend(record, {}).method == "local"
    short = record.model_copy(update={"rounds": 24})  # of 100
    found = recommend(short, {})
    assert found.method == "fedavg-5" and "local" not in found.near
    assert any(
        "24 of 100 rounds are too few" in text for text in sentences(short, found, board_check())
    )


def test_what_nu_gains_and_what_the_theory_allows():
    at = Heterogeneity(
        model="fedavg", agents=2, gradient=1.0, gamma_g=1.0, gamma_h=0.5, curvatures=[1.0, 2.0]
    )
    record = pilot(
        tried("per-fedavg", 0.1), tried("gmeta-3", 0), tried("gmeta-5", 0.05), heterogeneity=[at]
    )
    found = recommend(record, {})
    assert found.nu_gain.mean == pytest.approx(0.1)
    allowed = [small_spread_gap(1.5, 0.5, 1.0, nu, 3, 0.1) for nu in (1, 3)]
    assert found.most == pytest.approx(1 - allowed[1] / allowed[0]) and 0 < found.most < 1
    unstable = record.model_copy(
        update={"heterogeneity": [at.model_copy(update={"curvatures": [1.0, 11.0]})]}
    )
    assert recommend(unstable, {}).most is None  # α·λ is above 1
    text = "\n".join(sentences(record, found, board_check()))
    assert "ν = 3 gains 10.0 ± 0.0 points over ν = 1 at equal rounds: ν > 1 pays." in text
    assert f"ν = 3 can gain at most {found.most:.0%}" in text


def test_how_many_agents_would_tell_the_next_method_apart():
    record = pilot(tried("ifca", 0), tried("ditto", 0.03, 0.1))
    found = recommend(record, {})
    own = gap(record, "ditto", "ifca")
    assert found.alike == ["ditto"]
    assert found.agents_needed == int(np.ceil(20 * (1.96 * own.noise / 0.03) ** 2)) > 20


def test_the_text_says_what_to_start_with_and_how_sure_that_is():
    record = pilot(tried("ifca", 0), tried("fedavg-5", 0.1), tried("local", 0.2))
    found = recommend(record, {})
    assert re.search(r'\[methods.ifca\]\nalgorithm = "ifca"', start_with(record, found))
    checked = [
        Checked(
            problem=name, recommended="ifca", rank=rank, of=40, best="fedem", tied=rank < 3,
            fedavg=False, usual=True, usual_method="anil", possible=True,
        )
        for name, rank in (("a", 1), ("b", 2), ("c", 9))
    ]  # fmt: skip
    check = BoardCheck(standing={}, checked=checked)
    text = sentences(record, found, check)
    assert text[0].startswith("Start with ifca:")
    assert (
        "within noise of the best of all methods on 2 of 3 problems (at best one of those tried "
        "was on 3; median rank 2 of 40); always FedAvg with fine-tuning: 0, always the best one on "
        "the other problems: 3." in text[2]
    )
    assert "a federation pays" in text[3]
    assert [row[0] for row in pilot_table(record, found).rows] == ["ifca", "fedavg-5", "local"]
    content = advice_record(record, found, check)
    assert type(content).model_validate_json(content.model_dump_json()) == content
    alone = pilot(tried("local", 0), tried("fedavg-5", 0.1))
    assert start_with(alone, recommend(alone, {})) == ""
