"""What a site sends is clipped and noisy, and its epsilon is never understated."""

import builtins
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nufed.errors import InputError, RunError, TrainingError
from nufed.flower.app.epsilon import Round, max_releases, released_epsilon, server_epsilon
from nufed.flower.app.privacy import (
    Ledger,
    Privacy,
    Spent,
    check_plan,
    check_release,
    check_round,
    clip_jointly,
    planned,
    protect,
    system_normals,
)

DELTA = 1e-5
LITTLE = Privacy(clip=1.0, noise=1e-12)  # negligible noise


def normal_cdf(x):
    return math.erfc(-x / math.sqrt(2)) / 2  # accurate in the left tail too


def smallest(delta_of, delta):
    """The smallest epsilon at which a decreasing function is at most delta."""
    low, high = 0.0, 1.0
    while delta_of(high) > delta:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def exact_gaussian(shift, delta):
    """Epsilon of N(0, 1) against N(shift, 1): Balle & Wang 2018, equation 6."""

    def delta_of(epsilon):
        far = epsilon / shift
        return normal_cdf(shift / 2 - far) - math.exp(epsilon) * normal_cdf(-shift / 2 - far)

    return smallest(delta_of, delta)


def exact_mixtures(upper, lower, deviation, delta):
    """Epsilon of two mixtures {centre: weight} of Gaussians, by integration, in this direction."""
    x = np.linspace(-14 * deviation - 2, 14 * deviation + 2, 200_001)

    def density(mixture):
        return sum(w * np.exp(-(((x - c) / deviation) ** 2) / 2) for c, w in mixture.items()) / (
            deviation * math.sqrt(2 * math.pi)
        )

    p, q = density(upper), density(lower)
    step = x[1] - x[0]
    return smallest(lambda e: np.maximum(p - math.exp(e) * q, 0).sum() * step, delta)


def length(state):
    return math.sqrt(sum(float(v.square().sum()) for v in state.values()))


def test_a_long_change_keeps_its_direction_and_gets_the_length_of_the_clip():
    change = torch.randn(1000, dtype=torch.float64)
    clipped = clip_jointly({"model": change}, 0.5)["model"]
    assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-12)
    assert torch.allclose(clipped / clipped.norm(), change / change.norm(), rtol=1e-12)


def test_a_short_change_is_left_as_it_is():
    change = torch.tensor([0.3, -0.4], dtype=torch.float64)
    assert torch.equal(clip_jointly({"model": change}, 0.51)["model"], change)
    assert torch.equal(clip_jointly({"model": 0 * change}, 0.51)["model"], 0 * change)


def test_vectors_are_clipped_together_by_one_factor():
    changes = {"model": torch.tensor([3.0, 0.0]).double(), "control": torch.tensor([4.0]).double()}
    clipped = clip_jointly(changes, 1.0)
    assert clipped["model"].tolist() == pytest.approx([0.6, 0.0])
    assert clipped["control"].tolist() == pytest.approx([0.8])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_is_sent_is_what_was_received_and_the_clipped_change(dtype):
    received = {"model": torch.tensor([10.0, 20.0], dtype=dtype), "rates": torch.ones(3)}
    vectors = {"model": torch.tensor([13.0, 24.0], dtype=dtype)}
    sent = protect(vectors, received, LITTLE)
    assert sent.keys() == {"model"} and sent["model"].dtype == dtype
    assert torch.allclose(sent["model"].double(), torch.tensor([10.6, 20.8]).double(), rtol=1e-3)
    assert vectors["model"].tolist() == [13.0, 24.0] and received["model"].tolist() == [10.0, 20.0]


def test_the_noise_is_normal_with_the_right_deviation_and_independent():
    n = 200_000
    received = {"a": torch.zeros(n, dtype=torch.float64), "b": torch.zeros(n, dtype=torch.float64)}
    sent = protect(received, received, Privacy(clip=0.5, noise=3.0))
    a, b = sent["a"] / 1.5, sent["b"] / 1.5
    six = 6 / math.sqrt(n)
    for values in (a, b):
        assert abs(float(values.mean())) < six
        assert abs(float(values.square().mean()) - 1) < six * math.sqrt(2)
        assert abs(float(values.pow(4).mean()) - 3) < six * math.sqrt(96)
        for z in (-2.0, -0.5, 1.0, 3.0):
            share, p = float((values < z).double().mean()), normal_cdf(z)
            assert abs(share - p) < six * math.sqrt(p * (1 - p))
    pairs = [(a, b), (a[:-1], a[1:]), (a[: n // 2], a[n // 2 :]), (a.square() - 1, b.square() - 1)]
    for x, y in pairs:
        spread = float(x.std() * y.std()) / math.sqrt(len(x))
        assert abs(float((x * y).mean())) < 6 * spread


def test_no_seed_repeats_the_noise():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  # the global generator that must not matter
        before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
        drawn.append(system_normals(100))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert not (drawn[0] == drawn[1]).any()
    assert len(system_normals(0)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_leaves_a_site_whose_change_is_not_finite(bad):
    received = {"model": torch.zeros(2), "control": torch.zeros(1)}
    vectors = {"model": torch.tensor([0.0, bad]), "control": torch.zeros(1)}
    with pytest.raises(TrainingError, match="non-finite, so nothing is sent"):
        protect(vectors, received, LITTLE)


def test_noise_that_a_dtype_can_not_hold_is_not_sent():
    vectors = {"model": torch.zeros(50, dtype=torch.float16)}
    with pytest.raises(TrainingError, match=r"too large for torch\.float16"):
        protect(vectors, vectors, Privacy(clip=1e6, noise=1.0))


def test_vectors_that_were_not_received_are_refused():
    with pytest.raises(InputError, match=r"'control' has shape \(2,\), but .* received nothing"):
        protect({"control": torch.zeros(2)}, {"model": torch.zeros(2)}, LITTLE)
    with pytest.raises(InputError, match=r"'model' has shape \(1,\), but .* received \(2,\)"):
        protect({"model": torch.zeros(1)}, {"model": torch.zeros(2)}, LITTLE)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"clip": 0.0}, "clip = 0.0: must be a number above 0"),
        ({"noise": math.inf}, "noise = inf"),
        ({"noise": None}, "noise = None"),
        ({"delta": 1.0}, "delta = 1.0: must be above 0 and below 1"),
        ({"epsilon": -1}, "epsilon = -1"),
        ({"epsilon_server": math.nan}, "epsilon_server = nan"),
        ({"clip": True}, "clip = True"),
    ],
)
def test_invalid_settings_are_refused(wrong, says):
    with pytest.raises(InputError, match=says):
        Privacy(**{"clip": 1.0, "noise": 1.0, **wrong})


@pytest.mark.parametrize(("noise", "releases"), [(0.7, 1), (1.0, 20), (5.0, 1), (20.0, 300)])
def test_epsilon_against_the_server_is_the_exact_one_of_composed_gaussians(noise, releases):
    exact = exact_gaussian(2 * math.sqrt(releases) / noise, DELTA)
    assert server_epsilon(noise, releases, DELTA) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("noise", "agents", "rounds"), [(1.0, 4, 20), (5.0, 10, 3)])
def test_epsilon_without_sampling_is_the_exact_one_of_the_noisy_sum(noise, agents, rounds):
    exact = exact_gaussian(2 * math.sqrt(rounds / agents) / noise, DELTA)
    everyone = {Round(agents, agents, agents): rounds}
    assert released_epsilon(noise, everyone, DELTA) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("agents", "cohort"), [(50, 10), (50, 1), (10, 4), (10, 5), (10, 9)])
@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_epsilon_with_sampling_is_never_below_the_true_one_of_a_round(agents, cohort, noise):
    share, deviation = cohort / agents, noise * math.sqrt(cohort)
    rest = 1 - share
    # the replaced site among sites that send nothing, and among sites that send what it sends now
    pairs = [({1: share, 0: rest}, {-1: share, 0: rest}), ({2: share, 0: rest}, {0: 1})]
    pairs += [(lower, upper) for upper, lower in pairs]
    true = max(exact_mixtures(*pair, deviation, DELTA) for pair in pairs)
    stated = released_epsilon(noise, {Round(agents, cohort, cohort): 1}, DELTA)
    unsampled = released_epsilon(noise, {Round(cohort, cohort, cohort): 1}, DELTA)
    assert true <= stated < unsampled


def test_epsilon_of_many_rounds_is_not_below_that_of_one_pair_of_neighbours():
    from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism

    one = from_mixture_gaussian_mechanism(
        standard_deviation=math.sqrt(10),
        sensitivities=[0.0, 2.0],
        sampling_probs=[0.8, 0.2],
        pessimistic_estimate=False,
        value_discretization_interval=3e-3,
        use_connect_dots=False,
    )
    true = one.self_compose(30).get_epsilon_for_delta(DELTA)
    everyone, some = ({Round(agents, 10, 10): 30} for agents in (10, 50))
    assert 0.5 < true <= released_epsilon(1.0, some, DELTA) < released_epsilon(1.0, everyone, DELTA)


@pytest.mark.parametrize("agents", [10, 50])
def test_epsilon_rises_with_rounds_and_dropouts_and_falls_with_noise_and_delta(agents):
    def epsilon(noise=1.5, rounds=10, accepted=10, delta=DELTA):
        return released_epsilon(noise, {Round(agents, 10, accepted): rounds}, delta)

    assert 0 == epsilon(rounds=0) < epsilon(rounds=1) < epsilon() < epsilon(rounds=11)
    assert epsilon(noise=1.6) < epsilon() < epsilon(accepted=9) < epsilon(accepted=1)
    assert epsilon(delta=1e-4) < epsilon()
    mixed = {Round(agents, 10, 10): 5, Round(agents, 10, 9): 5}
    assert epsilon() < released_epsilon(1.5, mixed, DELTA) < epsilon(accepted=9)


PRIVACY = Privacy(clip=1.0, noise=3.0)


def a_ledger():
    ledger = Ledger(3.0).with_round(20, 5, 5).with_round(20, 5, 4).with_round(20, 5, 5)
    ledger = ledger.with_requests([2, 7]).with_requests([2]).with_requests([2])
    return ledger.with_release(2, "first", 1).with_release(2, "first", 2).with_release(7, "own", 1)


def test_a_ledger_adds_up_rounds_and_the_site_with_most_releases():
    spent = a_ledger().spent(PRIVACY)
    rounds = {Round(20, 5, 5): 2, Round(20, 5, 4): 1}
    expected = Spent(released_epsilon(3.0, rounds, DELTA), server_epsilon(3.0, 2, DELTA))
    assert spent == expected
    assert Ledger(3.0).spent(PRIVACY) == Spent(0.0, 0.0)


def test_an_update_sent_again_costs_nothing_and_a_recomputed_one_is_charged():
    ledger = a_ledger()
    assert ledger.with_release(2, "first", 2) == ledger
    assert ledger.with_release(2, "first", 1) == ledger
    assert ledger.with_release(2, "first", 5).released_by(2) == 5, "two that never arrived"
    assert ledger.with_release(2, "second", 1).released_by(2) == 3, "its store was lost"
    assert ledger.released_by(2) == 2 and ledger.released_by(0) == 0
    for nonsense in (0, -1, 2.0, "2"):
        with pytest.raises(InputError, match="must be 1 or more"):
            ledger.with_release(2, "first", nonsense)


def test_a_claimed_number_of_updates_is_charged_up_to_the_number_of_requests():
    ledger = a_ledger().with_release(7, "own", 10**6)
    assert (ledger.released_by(7), ledger.charged_to(7), ledger.charged_to(2)) == (10**6, 1, 2)
    assert ledger.spent(PRIVACY) == a_ledger().spent(PRIVACY)
    late = ledger.with_release(2, "first", 3)  # after the deadline: it still counts
    assert late.charged_to(2) == 3
    assert late.spent(PRIVACY).server == server_epsilon(3.0, 3, DELTA)


def test_a_ledger_from_a_file_has_spent_the_same():
    ledger = a_ledger()
    again = Ledger.from_json(json.loads(json.dumps(ledger.as_json())))
    assert again == ledger and again.spent(PRIVACY) == ledger.spent(PRIVACY)
    with pytest.raises(InputError, match=r"noise = 4\.0, but the rounds so far had 3\.0"):
        again.spent(replace(PRIVACY, noise=4.0))


@pytest.mark.parametrize(
    "damage",
    [
        {"noise": 0.0},
        {"noise": "3.0"},
        {"rounds": [[20, 5, 6, 1]]},
        {"rounds": [[20, 5, 0, 1]]},
        {"rounds": [[20, 5, 5, -1]]},
        {"rounds": [[20, 5, 5.0, 1]]},
        {"rounds": [[20, 5, 1]]},
        {"rounds": [[20, 5, 5, 2], [20, 5, 5, 1]]},
        {"rounds": None},
        {"releases": {"2": {"first": 0}}},
        {"releases": {"2": {"first": True}}},
        {"releases": {"2": {"": 1}}},
        {"releases": {"-2": {"first": 1}}},
        {"releases": {"02": {"first": 1}}},
        {"releases": {"two": {"first": 1}}},
        {"releases": {"2": 1}},
        {"releases": []},
        {"requests": {"2": 0}},
        {"requests": {"-2": 1}},
        {"requests": {"02": 1}},
        {"requests": {"2": "1"}},
        {"requests": None},
        {"more": 1},
    ],
)
def test_a_damaged_ledger_is_refused(damage):
    with pytest.raises(RunError, match="the privacy ledger is damaged"):
        Ledger.from_json({**a_ledger().as_json(), **damage})
    with pytest.raises(RunError, match="the privacy ledger is damaged"):
        Ledger.from_json([])


def test_planned_spending_is_exact_without_failures():
    ledger = Ledger(3.0)
    for number in range(6):
        ledger = ledger.with_round(4, 4, 4).with_requests(range(4))
        for agent in range(4):
            ledger = ledger.with_release(agent, "own", number + 1)
    assert planned(PRIVACY, agents=4, cohort=4, rounds=6) == ledger.spent(PRIVACY)
    assert planned(PRIVACY, agents=4, cohort=4, rounds=0) == Spent(0.0, 0.0)


def test_a_site_is_rarely_picked_more_often_than_the_upper_bound():
    generator = np.random.default_rng(0)
    cohorts = generator.random((300, 100, 20)).argsort(axis=2)[:, :, :4]  # of 300 trainings
    often = [np.bincount(training.ravel()).max() for training in cohorts]
    most = max_releases(agents=20, cohort=4, rounds=100)
    assert sum(n > most for n in often) <= 3 and most < max(often) + 6
    assert max_releases(agents=4, cohort=4, rounds=7) == 7


def test_a_plan_over_a_budget_is_refused_at_the_start():
    spent = check_plan(PRIVACY, 4, 4, 6)
    enough = replace(PRIVACY, epsilon=spent.released, epsilon_server=spent.server)
    assert check_plan(enough, 4, 4, 6) == spent
    says = r"epsilon = 1: 6 rounds with 4 of 4 agents and noise 3 come to .* plan fewer rounds"
    with pytest.raises(InputError, match=says):
        check_plan(replace(enough, epsilon=1.0), 4, 4, 6)
    with pytest.raises(InputError, match=r"epsilon_server = .* against the server"):
        check_plan(replace(enough, epsilon=None), 4, 4, 7)
    with pytest.raises(InputError, match=r"delta = 0\.25: must be below 1/agents = 0\.25"):
        check_plan(replace(PRIVACY, delta=0.25), 4, 4, 6)


def test_a_round_that_would_go_over_the_budget_is_refused():
    ledger = Ledger(3.0).with_round(4, 4, 4)
    budget = ledger.with_round(4, 4, 4).spent(PRIVACY).released
    check_round(replace(PRIVACY, epsilon=budget), ledger, 4, 4, 4)
    with pytest.raises(TrainingError, match="a round with 3 updates would bring epsilon"):
        check_round(replace(PRIVACY, epsilon=budget), ledger, 4, 4, 3)
    check_round(PRIVACY, ledger, 4, 4, 1)


def test_a_site_sends_no_more_than_its_own_budget_allows():
    limited = replace(PRIVACY, epsilon_server=server_epsilon(3.0, 5, DELTA))
    check_release(limited, 4)
    with pytest.raises(TrainingError, match="after 5 would bring this site's epsilon"):
        check_release(limited, 5)
    check_release(PRIVACY, 10**6)


def test_without_the_accountant_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r'pip install "nufed\[privacy\]"'):
        server_epsilon(1.0, 1, DELTA)
    protect({"model": torch.zeros(2)}, {"model": torch.zeros(2)}, PRIVACY)
