"""Metrics by name, against values worked out by hand and pairs compared one by one."""

import pytest
import torch

import nufed
from nufed import InputError, load_run
from nufed.evaluate import METRICS, accuracy, auc, balanced_accuracy, f1, summarise
from nufed.evaluate.metrics import OF_TOKENS, bits_per_character, perplexity
from support import without_report

# answers 0 0 1 2 2 0 for targets 0 0 0 1 2 2: TP 2 0 1, FP 1 1 1, FN 1 1 1
ANSWERS = torch.tensor([0, 0, 1, 2, 2, 0])
TARGETS = torch.tensor([0, 0, 0, 1, 2, 2])
OUTPUTS = torch.nn.functional.one_hot(ANSWERS, 4).float()  # of a fourth class nobody has


def test_by_hand():
    assert accuracy(OUTPUTS, TARGETS) == 3 / 6
    assert balanced_accuracy(OUTPUTS, TARGETS) == pytest.approx((2 / 3 + 0 + 1 / 2) / 3)
    assert f1(OUTPUTS, TARGETS) == pytest.approx((4 / 6 + 0 + 2 / 4) / 3)
    # a class that is only answered counts with 0: TP 1, FN 1 of class 0, FP 1 of class 3
    answers = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert f1(answers, torch.tensor([0, 0])) == pytest.approx((2 / 3 + 0) / 2)
    # two classes: 3 of the 4 pairs are in order
    two = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 4.0]])
    assert auc(two, torch.tensor([0, 0, 1, 1])) == 0.75
    assert auc(-two, torch.tensor([0, 0, 1, 1])) == 0.25
    assert auc(0 * two, torch.tensor([0, 0, 1, 1])) == 0.5  # ties


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_auc_against_all_pairs(classes):
    """With samples that are tied, and with a class that nobody has."""
    generator = torch.Generator().manual_seed(classes)
    for different in (9, 1000):
        rows = torch.randn(different, classes, generator=generator, dtype=torch.float64)
        outputs = rows[torch.randint(0, different, (40,), generator=generator)]
        targets = torch.randint(0, max(2, classes - 1), (40,), generator=generator)
        probabilities, areas = outputs.exp() / outputs.exp().sum(1, keepdim=True), []
        for c in set(targets.tolist()):
            own, rest = probabilities[targets == c, c], probabilities[targets != c, c]
            wins = [(a > b) + (a == b) / 2 for a in own.tolist() for b in rest.tolist()]
            areas.append(sum(wins) / len(wins))
        assert auc(outputs, targets) == pytest.approx(sum(areas) / len(areas), abs=1e-12)


def test_perplexity_and_bits():
    """Probabilities 1/2, 1/4 and 1/8 of three tokens; a fourth is not predicted."""
    shares = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4, [0.125, 0.875, 0, 0], [1.0, 0, 0, 0]])
    tokens = torch.tensor([[0, 3], [0, -100]])
    outputs = shares.log().reshape(2, 2, 4)
    assert bits_per_character(outputs, tokens) == pytest.approx((1 + 2 + 3) / 3)
    assert perplexity(outputs, tokens) == pytest.approx(2 ** ((1 + 2 + 3) / 3))
    classes = torch.tensor([0, 3, 0])  # the same of classes
    assert perplexity(shares[:3].log(), classes) == pytest.approx(4.0)
    assert str(perplexity(outputs * float("nan"), tokens)) == "nan"
    assert perplexity(torch.tensor([[0.0, 1e6]]), torch.tensor([0])) == float("inf")
    with pytest.raises(InputError, match=r"next_token = true"):
        perplexity(outputs[:, 0], tokens)


def test_extremes():
    """Perfect and saturated outputs, one class alone, and outputs that are not numbers."""
    perfect = torch.nn.functional.one_hot(TARGETS, 3).float()
    one, three = torch.tensor([1, 1]), torch.tensor([[0.0, 1.0, 0.0]] * 2)
    for name, metric in METRICS.items():
        if metric is None or name in OF_TOKENS:
            continue
        assert metric(perfect, TARGETS) == 1.0
        assert metric(three, one) == (0.5 if name == "auc" else 1.0)
        assert metric(perfect * float("nan"), TARGETS) != metric(perfect, TARGETS)
        assert str(metric(perfect * float("nan"), TARGETS)) == "nan"
        with pytest.raises(InputError, match=f"{name} needs one output per class"):
            metric(torch.zeros(2, 1), one)
    large = torch.tensor([[0.0, 50.0], [0.0, 60.0], [0.0, 70.0], [0.0, 80.0]])
    assert auc(large, torch.tensor([0, 0, 1, 1])) == 1.0  # although all probabilities round to 1


def right(outputs, targets):
    return accuracy(outputs, targets)


def wrong(outputs, targets):
    return 1 - accuracy(outputs, targets)


def test_less_of_a_metric_may_be_better(tmp_path):
    """The share of wrong answers gives the choices and, mirrored, the scores of that of right."""
    config = {
        "rounds": 6,
        "workers": 1,
        "eval_every": 2,
        "keep": "best",
        "baselines": ["untrained"],
        "data": {"agents": 5, "samples_per_agent": 60, "dirichlet": 0.3, "validation": 0.2},
        "methods": {
            "fedavg": {"meta_lr": 0.3, "batch_size": 6},
            "ditto": {"meta_lr": 0.001, "batch_size": 6},
        },
    }
    lower = {**config, "metric_better": "lower"}
    with without_report():
        a = nufed.run(config, metric=right, out=tmp_path / "right", figures=False)
        b = nufed.run(lower, metric=wrong, out=tmp_path / "wrong", figures=False)
    assert (b.measure.name, b.measure.higher_is_better) == ("wrong", False)
    assert load_run(b.path).config.metric_better == "lower"
    assert not load_run(b.path).measure.higher_is_better
    assert [row.name for row in a.rows()] == [row.name for row in b.rows()]
    for method in config["methods"]:
        one, other = (run.methods[method][0] for run in (a, b))
        assert one.step_sizes.chosen[0].scale == other.step_sizes.chosen[0].scale
        assert one.round == other.round
        sums = [x.score[1] + y.score[1] for x, y in zip(one.final, other.final, strict=True)]
        assert sums == pytest.approx([1.0] * 5)
        ends = (summarise(own.final, 1, run.measure) for own, run in ((one, a), (other, b)))
        assert sum(end.worst_tenth for end in ends) == pytest.approx(1.0)
    with pytest.raises(InputError, match='"lower": is for a metric of your own, and metric is'):
        nufed.run(lower, out=tmp_path / "no")


def test_names_in_a_configuration(tmp_path):
    """The run records what it was scored by; each score is the metric of the same outputs."""
    config = {
        "rounds": 1,
        "workers": 1,
        "baselines": ["majority", "untrained"],
        "data": {"agents": 4, "samples_per_agent": 60, "dirichlet": 1.0},
        "model": {"args": {"hidden": [8]}},
        "method": {"algorithm": "fedavg", "batch_size": 6},
    }
    found = {}
    with without_report():
        for name in ("accuracy", "balanced_accuracy", "f1", "auc"):
            run = nufed.run({**config, "metric": name}, out=tmp_path / name, figures=False)
            assert run.measure.name == name and run.measure.higher_is_better
            found[name] = run.methods["fedavg"][0].final
    for one, other in zip(found["accuracy"], found["balanced_accuracy"], strict=True):
        assert other.score == pytest.approx(one.balanced)
    assert all(0 <= s <= 1 for each in found.values() for own in each for s in own.score)
    with pytest.raises(InputError, match="did you mean 'f1'"):
        nufed.run({**config, "metric": "f11"}, out=tmp_path / "no")
