"""The board: a tiny campaign from the first training to the page, its statistics and records."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from board import advice, campaign, page, presets, problems, records
from board.__main__ import chosen, part_of
from board.problems import ORDER, QUICK, WHERE, read_methods, stages

from nufed.errors import InputError, RunError
from nufed.lab import board
from nufed.lab.analysis import places
from nufed.lab.analysis.places import bootstrap, differences, holm, pack, unpack
from nufed.lab.analysis.recommend import PilotRecord, Tried, board_check
from nufed.lab.board import Contender, compare
from nufed.lab.config import load_config
from nufed.lab.config.load import only_methods

ROOT = Path(__file__).parent.parent


@pytest.fixture
def where(tmp_path):
    """A campaign in a temporary directory."""
    before = dict(vars(WHERE))
    vars(WHERE).update(
        runs=tmp_path / "runs", results=tmp_path / "results", page=tmp_path / "board.md"
    )
    yield tmp_path
    vars(WHERE).update(before)


@pytest.fixture
def tiny(where, monkeypatch):
    """Tiny versions of all stages, with two methods."""
    monkeypatch.setattr(problems, "QUICK_METHODS", ("fedavg-5", "gmeta-3"))
    return stages(quick=True)


def test_a_campaign_from_the_first_training_to_the_page(tiny, where):
    wanted = chosen(tiny, ["heart", "sensors-gradients"])
    assert [stage.name for stage in wanted] == ["heart-hungary", "sensors-gradients"]
    campaign.run(wanted, (1, 1), lambda text: None)
    heart, sensors = (records.read(stage.name) for stage in wanted)
    assert set(heart) == {"fedavg-5", "gmeta-3", "pooled", "untrained", "majority", "local"}
    assert all(len(heart[name]["trials"]) == QUICK.trials for name in ("fedavg-5", "gmeta-3"))
    # all methods at equal gradients spend the same, up to half a round
    spent = {
        name: record["seeds"][0]["gradients"] + 2 * record["seeds"][0]["hvps"]
        for name, record in sensors.items()
    }
    rounds = wanted[1].tables["rounds"]
    assert sensors["gmeta-3"]["rounds"] == rounds < sensors["gmeta-3-hvp1"]["rounds"]
    assert abs(spent["fedavg-5"] - spent["gmeta-3"]) <= spent["fedavg-5"] / (
        2 * sensors["fedavg-5"]["rounds"]
    )
    # nothing is trained again, and the records give the page
    campaign.run(wanted, (1, 1), pytest.fail)
    measured = page.write(tiny)
    assert [shown.name for shown in measured] == ["heart", "sensors-gradients"]
    text = WHERE.page.read_text("utf-8")
    assert "**Not measured yet:** Omniglot, 20-way 5-shot (0 of 6 methods and baselines)" in text
    best = next(iter(measured[0].ranked))
    scores = np.mean([unpack(s["unseen"])[:, -2].mean() for s in heart[best]["seeds"]])
    assert f"{100 * scores:.1f}" in text.split("\n## Heart")[1].split("\n\n")[1]
    (written,) = presets.write(measured, where / "presets")
    config = load_config(written)
    assert config.algorithms()[best].meta_lr == heart[best]["chosen"]["meta_lr"]


def test_an_interrupted_method_loses_no_training(tiny, where, monkeypatch):
    stage = next(stage for stage in tiny if stage.name == "heart-hungary")
    stage = replace(stage, methods={"fedavg-5": stage.methods["fedavg-5"]})
    bench = campaign.Bench(stage)
    whole = campaign.finished(bench, "fedavg-5", None)
    lines = (where / "runs/heart-hungary/fedavg-5.jsonl").read_text("utf-8").splitlines()
    kept = [*lines[:3], '{"trial": {"sett']  # the digest, both trials, and a line cut off
    (where / "runs/heart-hungary/fedavg-5.jsonl").write_text("\n".join(kept), "utf-8")
    monkeypatch.setattr(Contender, "_trial", lambda *_: pytest.fail("trained again"))
    again = campaign.finished(bench, "fedavg-5", None)

    def plain(record):
        seeds = [{k: v for k, v in s.items() if "seconds" not in k} for s in record["seeds"]]
        return {**record, "seeds": seeds}

    assert plain(again) == plain(whole)


def test_a_method_under_way_in_another_process_is_left_to_it(tiny, where):
    stage = next(stage for stage in tiny if stage.name == "heart-hungary")
    with records.claimed(stage, "fedavg-5") as mine:
        assert mine
    assert campaign.in_turn(["a", "b", "c", "d"], (2, 2)) == ["b", "d", "a", "c"]


def test_records_of_another_version_are_refused(where):
    records.write("heart", "fedavg-5", {"seeds": []})
    path = WHERE.results / "heart.json"
    path.write_text(path.read_text("utf-8").replace('"protocol":1', '"protocol":0'), "utf-8")
    with pytest.raises(RunError, match="version 0 of the protocol"):
        records.read("heart")


def test_contenders_are_within_noise_of_the_best_by_validation(tiny):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, (2, 50))
    means = {"best": 0.8, "near": 0.8, "far": 0.6}
    stage = replace(tiny[0], methods={name: {} for name in means})
    known = {}
    for name, mean in means.items():
        scores = [mean + noise[seed] + rng.normal(0, 0.05, 50) for seed in range(2)]
        seeds = [{"seed": k, "validation": pack(each[:, None])} for k, each in enumerate(scores)]
        known[name] = {"seeds": seeds}
    assert set(campaign.contenders(stage, known)) == {"best", "near"}
    known["near"]["seeds"][1] = {"seed": 1, "failure": "it diverged"}
    assert campaign.contenders(stage, known) == ["best"]


def test_packed_scores_come_back():
    values = np.array([[0.5, np.nan], [1 / 3, np.inf], [-2.0, 1e9]])
    back = unpack(pack(values))
    assert back.shape == (3, 2)
    assert back[:2, 0] == pytest.approx([0.5, 1 / 3], rel=1e-3)
    assert np.isnan(back[0, 1]) and np.isinf(back[1:, 1]).all()
    assert unpack(pack([])).shape == (0, 1)


def test_the_bootstrap_has_the_standard_error_of_a_mean():
    rng = np.random.default_rng(1)
    scores = [rng.normal(0.5, 0.2, 40) for _ in range(3)]
    drawn = bootstrap([scores])[:, 0]
    error = np.sqrt(sum(s.var() / 40 for s in scores)) / 3
    assert drawn.mean() == pytest.approx(np.mean(scores), abs=4 * error / 100)
    assert drawn.std() == pytest.approx(error, rel=0.05)


def test_few_agents_have_intervals_over_their_samples():
    """With one agent there is nothing to draw among agents, but its samples can be others."""
    scores = {name: {0: np.array([0.7]), 1: np.array([0.7])} for name in "ab"}
    shared = np.random.default_rng(3).normal(0, 0.05, (1, 100))
    own = np.random.default_rng(4).normal(0, 0.05, (1, 100))
    same = places.differences(scores, "a", {n: {0: shared, 1: shared} for n in "ab"})["b"]
    assert same.interval == pytest.approx((0, 0))  # paired: both have the same resamples
    other = {"a": {0: shared, 1: shared}, "b": {0: own, 1: own}}
    low, high = places.differences(scores, "a", other)["b"].interval
    width = 1.96 * (own - shared).std()  # not divided by the root of the number of seeds
    assert (low, high) == pytest.approx((-width, width), abs=0.3 * width)


def test_differences_are_paired_and_ranks_have_intervals():
    rng = np.random.default_rng(2)
    hard = {seed: rng.normal(0, 1, 60) for seed in range(3)}  # of an agent, for every method
    near = {seed: hard[seed] + 0.1 + rng.normal(0, 0.01, 60) for seed in hard}
    same = {seed: hard[seed] + rng.normal(0, 0.01, 60) for seed in hard}
    found = places.places({"same": same, "base": hard, "near": near}, higher=True)
    assert next(iter(found)) == "near" and found["near"].tied and found["near"].p is None
    assert not found["base"].tied and found["base"].difference == pytest.approx(-0.1, abs=0.01)
    assert {found["base"].ranks, found["same"].ranks} == {(2, 3)}
    assert differences({"base": hard, "same": same}, "base")["same"].tied
    lower = places.places({"base": hard, "near": near}, higher=False)
    assert list(lower) == ["base", "near"]


def test_holm_is_never_below_the_raw_value_and_keeps_the_order():
    raw = [0.04, 0.001, 0.5, 0.02]
    corrected = holm(raw)
    assert corrected == pytest.approx([0.08, 0.004, 0.5, 0.06])


def test_harm_and_the_worst_tenth():
    personal, shared = {0: np.array([0.9, 0.2, 0.5])}, {0: np.array([0.5, 0.5, 0.5])}
    assert places.harmed(personal, shared, [0], True) == pytest.approx(1 / 3)
    assert places.harmed(personal, shared, [0], False) == pytest.approx(1 / 3)
    assert np.isnan(places.harmed(personal, {0: np.full(3, np.nan)}, [0], True))
    assert places.worst_tenth(personal, [0], True) == pytest.approx(0.2)
    assert places.worst_tenth(personal, [0], False) == pytest.approx(0.9)


def test_every_method_is_on_the_board():
    from nufed.algorithms import ALGORITHMS

    used = {table.get("algorithm", name) for name, table in read_methods().items()}
    assert used == set(ALGORITHMS.working())


def test_all_problems_are_valid_and_their_search_seed_is_not_scored():
    assert {path.stem for path in (problems.HERE / "problems").glob("*.toml")} == {
        name.removesuffix("-gradients") for name in ORDER
    }
    for stage in stages():
        table = {"algorithm": "fedavg"}
        config = board.method_config(stage.problem_of("fedavg-5"), "fedavg-5", table)
        assert config.data.validation and config.metric in ("auto", "bits_per_character")
        assert stage.protocol.search_seed not in stage.protocol.seeds + stage.protocol.more_seeds


def test_the_protocol_states_its_numbers():
    text = (problems.HERE / "protocol.md").read_text("utf-8")
    numbers = board.PROTOCOL
    assert f"**{numbers.trials} trials**" in text and f"seed {numbers.search_seed}," in text
    assert f"version {problems.VERSION}" in text
    for problem in {stage.problem for stage in stages()}:
        assert f"| `{problem}` |" in text


def test_a_method_of_ones_own_on_the_board(tiny, monkeypatch, tmp_path):
    stage = next(stage for stage in tiny if stage.name == "heart-hungary")
    tables = {**stage.tables, "methods": {"gmeta-3": stage.methods["gmeta-3"] | {"meta_lr": 0.1}}}
    del tables["methods"]["gmeta-3"]["exact"]
    monkeypatch.setattr(board, "_tables_of", lambda problem: tables)
    ranges = {"methods": {"mine": {"weight": [1, 2]}}}
    mine = {"methods": {"mine": {"algorithm": "ditto"}}, "tune": ranges}
    rows = compare("heart", mine, protocol=QUICK)
    assert [row.name for row in rows] == ["mine", "gmeta-3 (board)"]
    assert rows[1].place is None and rows[0].place is not None
    assert len(rows[0].record["trials"]) == QUICK.trials
    assert all(1 <= trial["settings"]["weight"] <= 2 for trial in rows[0].record["trials"])
    with pytest.raises(InputError, match=r"no \[methods.NAME\]"):
        compare("heart", {}, protocol=QUICK)


def test_an_unknown_problem_is_named():
    with pytest.raises(InputError, match="is not a measured problem of the board"):
        compare("hart", {"methods": {"ditto": {}}})


def test_some_methods_of_a_configuration():
    tables = only_methods("quickstart", ["fedavg"])
    assert list(load_config(tables).methods) == ["fedavg"]
    assert "adapt_steps" not in tables["method"]  # only the others have it
    with pytest.raises(InputError, match=r"did you mean .*fedavg"):
        only_methods("quickstart", ["fedvag"])


def test_parts():
    assert part_of("2/3") == (2, 3)
    for text in ("3/2", "0/2", "1", ""):
        with pytest.raises(SystemExit, match="K/N"):
            part_of(text)


MEASURED = sorted((ROOT / "board/results").glob("*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_row_of_the_page_is_recomputed_from_saved_scores(path):
    """The best method's mean, from the agents' scores and nothing of the page's code."""
    shown = next(
        (s for s in page.problems(stages()) if path.stem in [each.name for each in s.stages]), None
    )
    if shown is None or not shown.complete:
        pytest.skip("not all methods are measured")
    best = next(iter(shown.ranked))
    column = len(shown.stage.protocol.steps) - 1
    by_fold = []
    for stage in shown.stages:
        content = json.loads((ROOT / f"board/results/{stage.name}.json").read_text("utf-8"))
        by_fold.append({s["seed"]: s for s in content["methods"][best]["seeds"]})
    seeds = sorted(set.intersection(*map(set, by_fold)))
    means = [
        np.concatenate([unpack(fold[seed][shown.group])[:, column] for fold in by_fold]).mean()
        for seed in seeds
    ]
    text = page.number(float(np.mean(means)), shown.percent)
    section = (ROOT / "docs/board.md").read_text("utf-8").split(f"\n## {shown.title}\n")[1]
    row = next(line for line in section.splitlines() if line.startswith(f"| {best} |"))
    assert re.search(rf"\| \**{re.escape(text)}\** \|", row)


def test_the_records_are_small():
    assert sum(path.stat().st_size for path in MEASURED) < 3 * 2**20


def test_presets_to_start_with_have_the_settings_of_the_board(tmp_path):
    stage = next(stage for stage in stages() if stage.name == "sinusoid")
    chosen_by = {
        name: {"optimizer_lr": 0.01 * k, "meta_lr": 0.1 * k}
        for k, name in enumerate(presets.STARTED.values(), 1)
    }
    methods = {name: [{"chosen": settings}] for name, settings in chosen_by.items()}
    shown = SimpleNamespace(name="sinusoid", stage=stage, methods=methods)
    config = load_config(presets._start(shown, tmp_path))
    algorithms = config.algorithms()
    assert list(algorithms) == ["fedavg", "per-fedavg", "gmeta", "fedavg-10-steps"]
    for name, algorithm in algorithms.items():
        right = chosen_by[presets.STARTED[name]]
        assert algorithm.meta_lr == right["meta_lr"]
        assert algorithm.server_optimizer.optimizer_lr == right["optimizer_lr"]
    assert algorithms["fedavg-10-steps"].local_steps == 10
    assert algorithms["gmeta"].adapt_steps == 3
    assert {algorithms[n].outer_samples for n in ("gmeta", "per-fedavg")} == {"disjoint"}
    assert stage.protocol.search_seed not in config.seeds and config.rounds == 150


def test_the_rule_of_advise_is_checked_with_one_problem_held_out(tiny, where, monkeypatch):
    wanted = [
        replace(stage, about={**stage.about, "baselines": ["local"]})
        for stage in tiny
        if stage.name in ("cifar-10", "sensors")
    ]
    rng = np.random.default_rng(0)
    for stage in wanted:
        for name, level in zip(
            ["fedavg-5", "gmeta-3", "pooled", "local"], rng.normal(size=4), strict=True
        ):
            scores = {g: pack(level + 0.1 * rng.normal(size=(4, 4))) for g in ("seen", "unseen")}
            record = {"digest": "", "seeds": [{"seed": seed, **scores} for seed in QUICK.seeds]}
            if name in (*stage.methods, "local"):
                records.write(stage.name, name, record)
    measured = [page.Shown(stage.problem, [stage]) for stage in wanted]
    monkeypatch.setattr(advice, "problems", lambda of: measured)
    asked = []

    def pilot(tables, **how):
        asked.append(tables)
        tried = [
            Tried(method=name, score=score, scores=[score, score])
            for name, score in (("local", 0.0), ("fedavg-5", 0.5), ("gmeta-3", 0.5))
        ]
        about = dict.fromkeys(
            ("agents", "trained", "scored", "classes", "parameters", "steps", "cohort", "rounds"), 2
        )
        return PilotRecord(
            **about, source="x", seed=1000, minutes=2.0, seconds=1.0, measure="accuracy",
            higher_is_better=True, newcomers=True, samples=(2, 2.0, 2), rounds_configured=2,
            smooth=True, heterogeneity=[], tried=tried,
        )  # fmt: skip

    monkeypatch.setattr(advice, "pilot", pilot)
    said: list[str] = []
    paths = {"folder": where / "pilots", "target": where / "check.json"}
    found = advice.write(wanted, said.append, **paths)
    assert [tables["seeds"] for tables in asked] == [[1000], [1000]]
    assert json.loads((where / "check.json").read_text("utf-8")) == found.record()
    for shown, other, row in zip(measured, measured[::-1], found.checked, strict=True):
        ranks = found.standing[shown.name]
        means = advice._means(shown)
        three = sorted(("local", "fedavg-5", "gmeta-3"), key=lambda n: -means[n])
        assert [ranks[name] for name in three] == [1, 2, 3] and ranks["ifca"] == 8
        # of two that are alike in the pilot, the other problem's ranks decide, not its own
        theirs = found.standing[other.name]
        order = {"fedavg-5": 1, "gmeta-3": 2}  # in the pilot, at equal scores
        assert row.recommended == min(order, key=lambda name: order[name] + theirs[name])
        assert row.best == next(iter(shown.ranked))
        assert row.tied == shown.ranked[row.recommended].tied
        assert row.rank == 1 + sum(means[n] > means[row.recommended] for n in shown.ranked)
    again = advice.write(wanted, said.append, **paths)  # pilots are read
    assert again == found and len(asked) == 2
    with pytest.raises(RunError, match="is a pilot of another problem"):
        measured[0].stage.tables["rounds"] += 1
        advice.write(wanted, said.append, **paths)


def test_the_shipped_check_of_advise_follows_from_the_records():
    shipped = board_check()
    shown = {each.name: each for each in page.problems(stages())}
    assert shipped.checked
    for row in shipped.checked:
        content = json.loads((advice.PILOTS / f"{row.problem}.json").read_text("utf-8"))
        record = PilotRecord.model_validate_json(json.dumps(content["pilot"]))
        others = {k: v for k, v in shipped.standing.items() if k != row.problem}
        assert advice.recommend(record, others).method == row.recommended
    row = min(shipped.checked, key=lambda each: each.of)  # the others take seconds
    of = shown[row.problem]
    assert of.complete and advice.ranks(of) == shipped.standing[row.problem]
    for name, right in ((row.recommended, row.tied), ("fedavg-5", row.fedavg)):
        assert advice._tied(of, name) == right
    right = sum(each.tied for each in shipped.checked)
    assert f"on {right} of {len(shipped.checked)} problems" in shipped.sentence
