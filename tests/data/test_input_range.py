"""Inputs whose scale is far from 1, or far from that of training, are warned about."""

import json
import re

import numpy as np
import pytest
import torch

import nufed
from nufed import Samples
from nufed.data import as_samples
from nufed.data.samples import MOST_NUMBERS, InputRange, input_ranges, scale_warnings
from nufed.errors import NumericalWarning

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (40, 4, 4)).astype(np.uint8)


def told(data):
    samples = as_samples(data)
    return scale_warnings(samples, input_ranges(samples))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (BYTES, "from 0 to 255 .* if they are bytes, give nufed.Samples with scale=1/255"),
        (BYTES.astype(np.float32), "from 0 to 255 .* divide them by 255"),
        (RNG.normal(size=(40, 3)) * 1e4, "standardise every feature"),
        (RNG.normal(size=(40, 3)) * 1e-5, "standardise every feature"),
        (np.full((40, 3), 2.0), "the inputs are all 2: check how they were read"),
        ((np.ones((40, 1)) * 7, RNG.normal(size=(40, 1))), "numbers of input 0 are all 7"),
    ],
)
def test_a_scale_far_from_one_is_one_sentence_with_the_likely_remedy(inputs, words):
    (sentence,) = told((inputs, np.arange(40) % 2))
    assert re.search(words, sentence)


@pytest.mark.parametrize(
    "inputs",
    [
        RNG.normal(size=(40, 3)),
        BYTES / 255,
        RNG.integers(0, 17, (40, 8)).astype(float),
        RNG.integers(0, 5000, (40, 8)),  # tokens
    ],
)
def test_usual_scales_and_tokens_are_not_warned_about(inputs):
    assert told((inputs, np.arange(40) % 2)) == []


def test_bytes_that_nufed_scales_are_judged_as_the_model_sees_them():
    bytes_ = Samples(torch.from_numpy(BYTES), torch.zeros(40), scale=1 / 255)
    assert told(bytes_) == []
    assert "from -300 to" in told(Samples(bytes_.inputs, bytes_.targets, shift=-300.0))[0]


def test_a_range_is_that_of_all_numbers():
    x = RNG.normal(size=(50, 7)) * 3 + 1
    found = InputRange.of(torch.from_numpy(x))
    assert (found.low, found.high) == (x.min(), x.max())
    assert (found.mean, found.std) == pytest.approx((x.mean(), x.std()), rel=1e-5)
    large = torch.zeros(3 * MOST_NUMBERS // 8, 8, dtype=torch.uint8)
    large[1::2] = 200
    assert InputRange.of(large).high == 200 and 80 < InputRange.of(large).std <= 100
    huge = InputRange.of(torch.tensor([[-1e300], [1e300]], dtype=torch.float64))
    assert huge.std == pytest.approx(1e300)


def test_another_scale_than_that_of_training():
    trained = InputRange.of(torch.from_numpy(BYTES / 255))
    few = torch.from_numpy(BYTES[:3] / 255)
    for times, far in ((1, False), (2, False), (0.2, False), (255, True), (1 / 255, True)):
        assert InputRange.of(few * times).far_from(trained, few.numel()) is far
    assert InputRange.of(few * 0 - 40).far_from(trained, few.numel())
    assert not InputRange.of(few[:1, :1, :1]).far_from(trained, 1)  # one number has no spread


@pytest.mark.usefixtures("no_report")
def test_a_run_warns_and_records_it(tmp_path):
    """In the results, the report's list and the bundle; class names travel along."""
    names = np.array(["oak", "elm"])[BYTES[:, 0, 0] % 2]
    config = {
        "rounds": 1,
        "workers": 1,
        "baselines": [],
        "data": {"agents": 2, "samples_per_agent": 20},
        "model": {"name": "logistic"},
        "method": {"batch_size": 4},
        "methods": {"fedavg": {}},
    }
    with pytest.warns(NumericalWarning, match="range from 0 to 255 .* scale=1/255"):
        run = nufed.run(config, data=(BYTES, names), out=tmp_path / "run")
    (warned,) = run.warnings()
    assert warned.about == "data" and str(warned) == warned.message
    results = json.loads((run.path / "results.json").read_text())
    assert [w["about"] for w in results["warnings"]] == ["data"]
    assert run.inputs.range.high == 255 and run.inputs.classes == ["elm", "oak"]
    bundle = nufed.load_bundle(run.path / "bundles" / "fedavg.nufed")
    assert bundle.about.inputs.range.high == 255 and "from 0 to 255" in bundle.card
    answers = {p.answer for p in bundle.adapt(BYTES, names.tolist()).predict(BYTES)}
    assert answers <= {"elm", "oak"}
