"""Metrics by name, against values worked out by hand and pairs compared one by one."""

import pytest
import torch

import nufed
from nufed import InputError
from nufed.evaluate import METRICS, accuracy, auc, balanced_accuracy, f1
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


def test_extremes():
    """Perfect and saturated outputs, one class alone, and outputs that are not numbers."""
    perfect = torch.nn.functional.one_hot(TARGETS, 3).float()
    one, three = torch.tensor([1, 1]), torch.tensor([[0.0, 1.0, 0.0]] * 2)
    for name, metric in METRICS.items():
        if metric is None:
            continue
        assert metric(perfect, TARGETS) == 1.0
        assert metric(three, one) == (0.5 if name == "auc" else 1.0)
        assert metric(perfect * float("nan"), TARGETS) != metric(perfect, TARGETS)
        assert str(metric(perfect * float("nan"), TARGETS)) == "nan"
        with pytest.raises(InputError, match=f"{name} needs one output per class"):
            metric(torch.zeros(2, 1), one)
    large = torch.tensor([[0.0, 50.0], [0.0, 60.0], [0.0, 70.0], [0.0, 80.0]])
    assert auc(large, torch.tensor([0, 0, 1, 1])) == 1.0  # although all probabilities round to 1


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
