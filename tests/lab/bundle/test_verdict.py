"""What the report of adapting may claim."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from nufed import Bundle, load_adapted, load_bundle
from nufed.errors import NumericalWarning
from nufed.lab.bundle.adapting import Report, Score
from nufed.lab.files import read_sealed, write_sealed

RANGE = {"low": 0.0, "high": 1.0, "mean": 0.5, "std": 0.3}


def report(samples=30, gain=1.0, noise=0.1, after=0.9, majority=0.5, outside=None, steps=1):
    curve = (Score(1.0, 0.6), Score(1.0 - gain, after))
    return Report(samples, steps, False, curve, gain, noise, majority, outside)


@pytest.mark.parametrize(
    ("changed", "verdict", "words"),
    [
        ({}, "helped", "adapting helped"),
        ({"samples": 10}, "helped", "adapting helped"),
        ({"samples": 9}, "undecided", "can't be told .* there are 9 samples, and 10 or more"),
        ({"after": 0.5}, "majority", r"most frequent class \(accuracy 50.0%\)"),
        ({"after": 0.5, "gain": -1.0}, "harmed", "adapting harmed"),
        ({"after": None, "majority": None}, "helped", "adapting helped"),
        ({"noise": 0.6}, "undecided", "can't be told .* within noise"),
        ({"outside": "far"}, "undecided", "can't be told .* far from those of training"),
    ],
)
def test_the_verdict(changed, verdict, words):
    found = report(**changed)
    assert found.verdict == verdict and found.helped == (verdict == "helped")
    assert re.search(words, found.words()[-1])


SETTINGS = {
    "input_shape": (5,),
    "adapt_lr": 1.0,
    "classes": ("a", "b"),
    "batch_size": 8,
    "build": "logistic",
    "args": {"input_shape": [5], "outputs": 2},
}


def bundle(**settings):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    return Bundle.of(module, **{**SETTINGS, **settings})


def data(rows):
    x = np.random.default_rng(0).random((rows, 5))
    return x, (x[:, 0] > 0.5).astype(int)


def test_two_samples_and_a_wrong_scale_tell_nothing(tmp_path):
    x, y = data(40)
    made = bundle(input_range=RANGE)
    assert made.adapt(x, y, steps=40).report.verdict == "helped"
    assert made.adapt(x[:2], y[:2], steps=3).report.verdict == "undecided"
    with pytest.warns(NumericalWarning, match="inputs range from .*was trained on from 0 to 1 "):
        adapted = made.adapt(255 * x, y, steps=40)
    assert adapted.report.verdict == "undecided"
    kept = load_adapted(adapted.save(tmp_path / "m.safetensors"))
    assert kept.report == adapted.report
    kept.predict(x)
    with pytest.warns(NumericalWarning, match="on the same scale"):
        kept.predict(255 * x)


def test_bundles_without_a_range_are_read_and_not_judged(tmp_path):
    x, y = data(40)
    path = bundle().save(tmp_path / "b.nufed")
    sealed = read_sealed(path)
    old = sealed.about["bundle"]
    old["format"] = 1
    del old["inputs"]["range"]
    write_sealed(path, sealed.about, sealed.tensors)
    assert load_bundle(path).adapt(255 * x, y).report.outside is None
    assert "inputs of training" not in load_bundle(path).card
    assert "inputs of training: from 0 to 1" in bundle(input_range=RANGE).card


def test_the_largest_number_of_steps_is_for_auto():
    x, y = data(20)
    assert len(bundle().adapt(x, y, steps="auto", max_steps=3).report.curve) == 4
    for wrong in ({"steps": 2, "max_steps": 3}, {"steps": "auto", "max_steps": 0}):
        with pytest.raises(ValueError, match="max_steps = "):
            bundle().adapt(x, y, **wrong)


def test_a_model_that_adapting_harms_is_returned_unadapted(tmp_path):
    """With steps that are far too large; one call returns the model that is the better one."""
    x, y = data(40)
    good = bundle().adapt(x, y, steps=200).module[1]
    made = Bundle.of(good, **{**SETTINGS, "adapt_lr": 500.0})
    found = made.adapt(x, y)
    assert found.report.verdict == "harmed" and found.report.refused
    assert "this model is the unadapted one" in found.report.words()[-1]
    x = torch.as_tensor(x, dtype=torch.float32)
    assert torch.equal(found.module(x), good(x))
    kept = load_adapted(found.save(tmp_path / "m.safetensors"))
    assert kept.report == found.report
    anyway = made.adapt(x, y, anyway=True)
    assert not anyway.report.refused and not torch.equal(anyway.module(x), good(x))
    small = made.adapt(x, y, lr=1e-3)
    assert small.report.verdict != "harmed" and small.about.adapt.lr == 1e-3
    for wrong in (0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match=r"lr = .*must be a number above 0"):
            made.adapt(x, y, lr=wrong)


def test_a_bundle_whose_steps_gained_nothing_takes_none():
    made = bundle(adapt_steps=0, lr_scale=0.0)
    assert "no step lowered the loss on validation samples" in made.card
    found = made.adapt(*data(40))
    assert found.report.steps == 0 and found.report.words()[-1] == "the model is left unchanged"
