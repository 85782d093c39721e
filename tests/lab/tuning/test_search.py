"""The search without training: budgets, promotions and proposals, on made-up scores."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from nufed.lab.analysis.tuning_findings import (
    best_so_far,
    edges,
    sensitivities,
)
from nufed.lab.report.tune_page import doubts, edge_text, ranking_notes
from nufed.lab.runs.tuning_record import (
    MethodSearch,
    Range,
    RungScore,
    SearchRecord,
    Trial,
    TuningRecord,
)
from nufed.lab.tuning.search import check_budget, propose, rungs_of, search

LR = Range(setting="meta_lr", low=1e-3, high=1.0, log=True)
MIX = Range(setting="mixing", low=0.0, high=1.0)
KIND = Range(setting="curvature", choices=["exact", "first_order"])
STEPS = Range(setting="local_steps", low=1, high=8, log=True, whole=True)


def plan(
    methods, budget=30.0, rounds=27, halvings=2, sampler="random", higher=True, ranges=(LR,), **more
):
    """A search over made-up methods, by their work per round."""
    searched = {
        name: MethodSearch(ranges=list(ranges), configured={"meta_lr": 0.01}, work=rounds * work)
        for name, work in methods.items()
    }
    return SearchRecord(
        command="nufed tune mine.toml",
        config={"seeds": [0], "name": "made-up"},
        data_sha256="",
        splits={},
        measure="accuracy" if higher else "loss",
        higher_is_better=higher,
        budget=budget,
        unit=check_budget(budget, {n: m.work for n, m in searched.items()}, more.get("per")),
        seed=0,
        repeat_seeds=[1, 2],
        sampler=sampler,
        agents="seen",
        rungs=rungs_of(rounds, halvings),
        methods=searched,
        software={},
        **more,
    )


def peak(settings, best=0.1):
    """A score that falls with the distance from the best step size, in factors of 10."""
    return 1 - 0.2 * abs(math.log10(settings["meta_lr"] / best))


class Training:
    """Counts what is trained; costs ``ratio`` times what was predicted."""

    def __init__(self, methods, ratio=1.0, score=peak):
        self.methods, self.ratio, self.score = methods, ratio, score
        self.rounds, self.over, self.log = {}, set(), []

    def __call__(self, asked, rounds):
        assert not self.over & {each.number for each in asked}
        self.log.append((rounds, [each.number for each in asked]))
        found = []
        for each in asked:
            assert rounds > self.rounds.get(each.number, 0)
            self.rounds[each.number] = rounds
            work = round(self.ratio * rounds * self.methods[each.method])
            score = self.score(each.settings)
            failure = None if math.isfinite(score) else "it diverged"
            told = {"score": None if failure else score, "failure": failure}
            found.append(RungScore(rounds=rounds, loss=1.0, gradients=work, **told))
        return found

    def predict(self, method, settings):
        return self.methods[method]

    def discard(self, asked):
        self.over.add(asked.number)


def searched(methods, ratio=1.0, score=peak, **how):
    made, training = plan(methods, **how), Training(methods, ratio, score)
    return made, training, search(made, training.predict, training, training.discard)


def spent(trials, method):
    return sum(trial.last.work for trial in trials if trial.method == method)


@settings(max_examples=25)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1),
    st.integers(12, 40),
    st.integers(1, 40),
    st.integers(0, 3),
    st.sampled_from([0.5, 0.9, 1.0, 1.3, 3.0]),
)
def test_no_budget_is_exceeded_by_more_than_a_rung(methods, budget, rounds, halvings, ratio):
    how = {"budget": budget, "rounds": rounds, "halvings": halvings}
    made, training, trials = searched(methods, ratio, **how)
    for method, work in methods.items():
        full = [t for t in trials if t.method == method and t.after(rounds)]
        assert full  # a choice can be made
        used, over = spent(trials, method), max(0.0, ratio - 1) * 9 * rounds * work
        if ratio <= 1:
            assert used <= made.allowed + 1e-6
        assert used <= made.allowed + rounds * work * ratio + over
        if ratio == 1:
            assert used > made.allowed - rounds * work
    assert training.over == {trial.number for trial in trials}


def test_batches_are_fixed_and_all_methods_train_together():
    _, training, trials = searched({"a": 1, "b": 2}, budget=20)
    rounds, numbers = zip(*training.log, strict=True)
    assert rounds[:3] == (7, 14, 27)
    assert numbers[0] == list(range(18)) and len(numbers[1]) == 6 and len(numbers[2]) == 2
    a, b = ([t.settings for t in trials if t.method == m and t.batch == 0] for m in "ab")
    assert a == b  # the same proposals for both


def test_failed_trials_are_never_promoted_and_the_search_goes_on():
    def score(settings):
        return math.nan if settings["meta_lr"] > 0.05 else peak(settings)

    _, _, trials = searched({"a": 1}, score=score)
    failed = [t for t in trials if t.failure]
    assert failed and all(len(t.rungs) == 1 for t in failed)
    assert any(t.after(27) for t in trials)
    # trials that fail at once cost nothing, and end, too
    _, training, trials = searched({"a": 1}, ratio=0, score=lambda settings: math.nan)
    assert len(trials) == math.ceil(30 * 27 / 7)
    assert not any(t.after(27) for t in trials) and all(t.failure for t in trials)
    assert {rounds for rounds, asked in training.log if asked} == {7}


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_proposals_depend_on_seed_batch_and_results_only(sampler):
    ranges = [LR, MIX, KIND, STEPS]
    made = plan({"a": 1}, sampler=sampler, ranges=ranges)
    _, _, trials = searched({"a": 1})
    tried = [
        t.model_copy(
            update={
                "settings": t.settings | {"mixing": 0.5, "curvature": "exact", "local_steps": 3}
            }
        )
        for t in trials
    ]
    first, again = (propose(made, "a", tried, 9, batch=2) for _ in range(2))
    assert first == again and len(first) == 9
    for each in first:
        assert all(own.contains(each[own.setting]) for own in ranges)
        assert isinstance(each["local_steps"], int)
    other = made.model_copy(update={"seed": 4})
    assert propose(other, "a", tried, 9, batch=2) != first


def test_tpe_searches_where_scores_are_good():
    _, _, trials = searched({"a": 1}, sampler="tpe", budget=20)
    late = [t.settings["meta_lr"] for t in trials if t.batch >= 4]
    near = sum(0.03 < value < 0.3 for value in late)
    assert near > 0.6 * len(late)  # a third would be by chance


def test_the_grid_is_tried_once_and_then_the_search_ends():
    _, _, trials = searched({"a": 1}, sampler="grid", budget=500, ranges=[LR])
    values = sorted(t.settings["meta_lr"] for t in trials)
    assert values == [0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0]
    ratios = [b / a for a, b in pairwise(values)]
    assert all(2.5 < ratio < 3.5 for ratio in ratios)
    assert MIX.grid() == [0.0, 0.333, 0.667, 1.0] and KIND.grid() == ["exact", "first_order"]
    assert STEPS.grid() == [1, 3, 8]


def test_random_settings_are_log_uniform():
    drawn = propose(plan({"a": 1}), "a", [], 400, batch=1)
    logs = sorted(math.log10(each["meta_lr"]) for each in drawn)
    for share in (0.25, 0.5, 0.75):
        assert logs[int(share * len(logs))] == pytest.approx(-3 + 3 * share, abs=0.25)


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
@pytest.mark.parametrize("best", [30.0, 1e-5])
def test_declared_ranges_grow_while_the_best_is_at_their_end(sampler, best):
    def score(settings):
        return math.nan if settings["meta_lr"] > 300 else peak(settings, best)

    how = {"sampler": sampler, "budget": 60, "score": score}
    made, _, trials = searched({"a": 1}, format=2, **how)
    chosen = record(made, trials).choice("a").settings["meta_lr"]
    assert abs(math.log10(chosen / best)) < 0.5
    (own,) = record(made, trials).ranges("a")
    ends = (1e-3, 100) if best > 1 else (1e-6, 1)
    assert (own.low, own.high) == pytest.approx(ends)
    assert not edges(record(made, trials))
    _, _, again = searched({"a": 1}, format=2, **how)
    assert again == trials
    for fixed in ({"format": 1}, {"format": 2, "ranges": [LR.model_copy(update={"origin": "x"})]}):
        made, _, trials = searched({"a": 1}, **how, **fixed)
        assert all(LR.contains(trial.settings["meta_lr"]) for trial in trials)
        assert len(edges(record(made, trials))) == 1


def test_ranges_stay_where_a_maximum_is_inside_or_larger_values_fail():
    made, _, trials = searched({"a": 1}, format=2)
    assert record(made, trials).ranges("a") == [LR]
    made, _, trials = searched(
        {"a": 1}, format=2, score=lambda s: math.nan if s["meta_lr"] > 0.5 else peak(s, 10)
    )
    assert record(made, trials).ranges("a") == [LR]
    # beside another setting, failed trials may have failed because of that one
    best = trial(0, "a", 0.5, [1, 1, 0.9])
    others = [trial(1, "a", 0.01, [0.3]), trial(2, "a", 0.8, [None])]
    assert LR.open_side(best, [best, *others]) is None
    both = [t.model_copy(update={"settings": t.settings | {"x": 1}}) for t in (best, *others)]
    assert LR.open_side(both[0], both) == "upper"
    everything = searched({"a": 1}, format=2, budget=90, score=lambda s: peak(s, 1e9))
    assert record(everything[0], everything[2]).ranges("a")[0].high == pytest.approx(1e3)


def test_a_budget_of_trials_is_spent_on_as_many_of_every_method():
    made, _, trials = searched({"a": 1, "b": 12}, budget=20, per="trial")
    for method in "ab":
        own = [t for t in trials if t.method == method]
        assert len(own) == 20 and any(t.after(27) for t in own)
        assert record(made, trials).used(method) == 1
    made, _, trials = searched({"a": 1, "b": 12}, budget=20)
    assert len([t for t in trials if t.method == "b"]) < 5  # by gradients


def test_too_few_trials_for_a_conclusion_are_said_to_be_so():
    made, _, trials = searched({"a": 1, "b": 6}, budget=12)
    (few,) = doubts(record(made, trials))
    own = [t for t in trials if t.method == "b"]
    assert few == (
        f"b: {len(own)} trials, 1 of them trained to the end, are too few for a conclusion about 1 "
        "setting: increase --budget, or count it --per trial."
    )
    made, _, trials = searched({"a": 1}, budget=20, sampler="grid")  # the whole grid
    assert len(trials) == 7 and not doubts(record(made, trials))


def record(made, trials, repeats=()):
    full = [t for t in trials if t.after(27)]
    sign = 1 if made.higher_is_better else -1
    chosen = {}
    for method in made.methods:
        own = [t for t in full if t.method == method]
        if own:
            chosen[method] = max(own, key=lambda t: sign * t.after(27).score).number
    return TuningRecord(search=made, trials=trials, repeats=list(repeats), chosen=chosen)


def trial(number, method, value, scores, seed=0):
    rungs = [
        RungScore(rounds=k, score=s, loss=1.0, gradients=k) if s is not None else
        RungScore(rounds=k, failure="it diverged", gradients=k)
        for k, s in zip((7, 14, 27), scores, strict=False)
    ]  # fmt: skip
    settings = {"meta_lr": value}
    return Trial(number=number, method=method, batch=0, seed=seed, settings=settings, rungs=rungs)


def test_what_a_factor_of_three_loses_is_read_from_the_trials_there():
    trials = [
        trial(0, "a", 0.1, [0.5, 0.7, 0.9]),
        trial(1, "a", 0.12, [0.5, 0.7, 0.85]),
        trial(2, "a", 0.3, [0.4, 0.6, 0.8]),
        trial(3, "a", 0.033, [0.35, 0.45]),
        trial(4, "a", 1.0, [0.1]),
    ]
    (own,) = sensitivities(record(plan({"a": 1}), trials))
    assert own.larger.score == pytest.approx(0.1) and own.larger.rounds == 27
    assert own.smaller.score == pytest.approx(0.25) and own.smaller.rounds == 14
    (own,) = sensitivities(record(plan({"a": 1}), [trials[0], trial(3, "a", 0.3, [None])]))
    assert own.larger.score is None and own.smaller is None


@pytest.mark.parametrize("higher", [True, False])
def test_best_so_far_never_gets_worse(higher):
    made, _, trials = searched({"a": 1, "b": 3}, higher=higher, budget=40)
    points = best_so_far(record(made, trials))
    for method in "ab":
        own = [p for p in points if p["method"] == method]
        scores = [p["score"] for p in own]
        assert scores == sorted(scores, reverse=not higher)
        assert own[-1]["work"] == pytest.approx(spent(trials, method) / made.unit)
        assert own[-1]["work"] <= made.budget


def test_choices_at_an_edge_are_named_with_the_command_that_widens_the_range():
    made = plan({"a": 1, "b": 1}, ranges=[LR])
    inside, at_edge = trial(0, "a", 0.1, [1, 1, 0.9]), trial(1, "b", 0.98, [1, 1, 0.9])
    (edge,) = edges(record(made, [inside, at_edge]))
    assert edge_text(edge) == (
        "b: meta_lr = 0.98 lies at the upper edge of its range, 0.001 to 1: a better value may lie "
        "beyond"
    )
    assert edge.command == "nufed tune mine.toml 'tune.methods.b={meta_lr = [0.001,10.0]}'"
    (edge,) = edges(record(made, [inside, trial(1, "b", 0.001, [1, 1, 0.9])]))
    assert edge.side == "lower" and "[0.0001,1.0]" in edge.command


def test_the_certainty_of_the_ranking_is_said_in_words():
    made = plan({"a": 1, "b": 1})
    trials = [trial(0, "a", 0.1, [1, 1, 0.9]), trial(1, "b", 0.1, [1, 1, 0.8])]
    same = [trial(0, "a", 0.1, [0.9], 1), trial(1, "b", 0.1, [0.7], 1),
            trial(0, "a", 0.1, [0.8], 2), trial(1, "b", 0.1, [0.7], 2)]  # fmt: skip
    first, second = ranking_notes(record(made, trials, same))
    assert first.startswith("The order a, b is the same with all 2 other seeds; few seeds can't")
    assert second.startswith("a is better than b by 0.15 on average, and with 2 of 2 other seeds")
    swapped = [*same[:3], trial(1, "b", 0.1, [0.85], 2)]
    first, second = ranking_notes(record(made, trials, swapped))
    assert first == "The order a, b is not certain: it differs between seeds."
    assert "with 1 of 2 other seeds" in second
    better = [*trials, trial(2, "a", 0.3, [1, 1, 0.85])]
    also = [*same, trial(2, "a", 0.3, [0.95], 1), trial(2, "a", 0.3, [0.95], 2)]
    doubt, *few = doubts(record(made, better, also))
    assert [line.partition(":")[0] for line in few] == ["a", "b"]
    assert doubt.startswith("a: trial 2 did better with other seeds than the chosen one (trial 0)")
    failed, _ = doubts(record(made, [trials[0], trial(1, "b", 0.1, [None])], same[::2]))
    assert failed == "b: every trial failed, the first because it diverged"
