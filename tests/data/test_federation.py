import re

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from nufed import Federation, InputError, Samples
from nufed.data import as_samples, make_split
from nufed.lab.readers.sources import SOURCES
from support import federation


def test_batches_come_from_the_training_part_without_replacement():
    data = federation(samples=24)
    inputs = data.samples.inputs
    for agent in data.split.agents:
        own = {tuple(row) for row in inputs[data.split.train[agent]].tolist()}
        for batch in data.batches(agent, 0, "train", 3).draw("adapt", 18, 4):
            drawn = [tuple(row) for row in batch.inputs.tolist()]
            assert len(set(drawn)) == 18 and set(drawn) <= own


def test_batches_hold_no_validation_or_test_sample():
    split = make_split([np.arange(24)], 0, validation=0.25, test=0.25)
    marked = Federation(as_samples((np.arange(24.0)[:, None], np.zeros(24, dtype=int))), split)
    drawn = marked.batches(0, 0, "train").draw("outer", 12)[0].inputs.flatten()
    assert sorted(drawn.tolist()) == sorted(split.train[0].tolist())


def test_batches_are_independent_of_each_other():
    data = federation(samples=240)
    first, second = data.batches(0, 0, "train", 1).draw("adapt", 90, 2)
    shared = len(
        {tuple(r) for r in first.inputs.tolist()} & {tuple(r) for r in second.inputs.tolist()}
    )
    assert 25 < shared < 65  # of 180 rows each takes 90: 45 shared on average
    other = data.batches(0, 0, "train", 2).draw("adapt", 90)[0]
    assert not torch.equal(first.inputs, other.inputs) and first.seed != other.seed


def test_an_agent_too_small_for_a_batch_is_named_with_the_ways_out():
    data = federation(samples=24)
    message = r"agent 0 has 18 training samples and batch_size is 19: lower batch_size.*use_all"
    with pytest.raises(InputError, match=message):
        data.check_batch_size(19)
    with pytest.raises(InputError, match=message):
        data.batches(0, 0, "train").draw("outer", 19)
    data.check_batch_size(18)
    lenient = Federation(data.samples, data.split, small_agents="use_all")
    (batch,) = lenient.batches(0, 0, "train").draw("outer", 100)
    assert len(batch.targets) == 18


def test_bytes_stay_bytes_until_a_batch_is_taken():
    digits = SOURCES["digits"]()
    assert digits.inputs.dtype == torch.uint8 and digits.inputs.max() == 16
    inputs, targets = digits.take(np.array([3, 1]))
    assert inputs.dtype == torch.float32 and 0.9 < inputs.max() <= 1
    assert targets.tolist() == [3, 1]
    assert torch.bincount(digits.targets).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]


def test_own_data_in_several_forms():
    x = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    y = np.array([0, 2, 1, 0, 1, 2])
    expected = torch.from_numpy(x)
    for data in (
        (x, y),
        [torch.from_numpy(x).float(), y.tolist()],
        TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y)),
        Samples(torch.from_numpy(x).float(), torch.from_numpy(y), classes=("a", "b", "c")),
    ):
        samples = as_samples(data)
        assert torch.equal(samples.inputs, expected) and samples.outputs == 3
        assert samples.targets.dtype == torch.int64
    regression = as_samples((x, y.astype(float)[:, None]))
    assert regression.classes == () and regression.outputs == 1
    several = as_samples(((x, x), y, list("aabbcc")))
    assert len(several.take(np.array([1]))[0]) == 2 and several.owners.tolist() == list("aabbcc")
    named = as_samples(({"left": x, "right": x}, y))
    assert set(named.take(np.array([1]))[0]) == {"left", "right"}


def test_numbers_of_another_byte_order_are_taken():
    assert as_samples((np.ones((2, 2), ">f4"), np.array([0, 1], ">i8"))).targets.tolist() == [0, 1]


def test_a_class_number_far_beyond_the_samples_is_refused():
    x = np.zeros((3, 2))
    with pytest.raises(InputError, match=r"target of sample 1 .* is class 1000000000: 3 samples"):
        as_samples((x, [0, 10**9, 1]))
    assert as_samples((x, [0, 999, 1])).outputs == 1000  # few samples may be of rare classes
    with pytest.raises(InputError, match="class 1000: 3 samples may be of classes 0 … 999"):
        as_samples((x, [0, 1, 1000]))
    assert as_samples((x, [0, 1, 1000]), classes=tuple(map(str, range(1001)))).outputs == 1001
    assert as_samples((np.zeros((2000, 1)), np.arange(2000))).outputs == 2000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_are_refused_and_named(bad):
    x, y = np.zeros((4, 2)), np.zeros((4, 1))
    spoiled = x.copy()
    spoiled[2, 1] = bad
    for data, what in (
        ((spoiled, y), "input of sample 2"),
        ((x, spoiled), "target of sample 2"),
        (((x, spoiled), y), "input 1 of sample 2"),
        (({"a": spoiled}, [0, 1, 0, 1]), "input 'a' of sample 2"),
        ((spoiled, ["p", "q", "p", "q"]), "input of sample 2"),
        ((spoiled.astype(np.float16), y), "input of sample 2"),
        (TensorDataset(torch.from_numpy(spoiled), torch.zeros(4)), "input of sample 2"),
        (Samples(torch.from_numpy(spoiled), torch.zeros(4)), "input of sample 2"),
    ):
        word = "NaN" if np.isnan(bad) else f"{bad}inity"
        where = re.escape(f"the {what} (counted from 0) holds {word} at index [1]: remove")
        with pytest.raises(InputError, match=where):
            as_samples(data)
    with pytest.raises(InputError, match=r"sample 2 \(counted from 0, of agent 'c'\) holds"):
        as_samples((spoiled, y, list("abcd")))
    with pytest.raises(InputError, match="scale = "):
        Samples(torch.zeros(2, 1, dtype=torch.uint8), torch.zeros(2), scale=bad)
    with pytest.raises(InputError, match="class numbers run from nan to nan"):
        Samples(torch.zeros(2, 1), torch.tensor([0.0, np.nan]), classes=("a",))


def test_numbers_beyond_the_dtype_of_the_model_are_named():
    samples = as_samples((np.array([[1.0], [1e300]]), [0, 1]))
    samples.check_finite(torch.float64)
    with pytest.raises(InputError, match=r"sample 1 .* beyond 3\.4e\+38"):
        samples.check_finite(torch.float32)


def test_read_only_arrays_are_accepted_without_a_warning():
    x = np.zeros((6, 2), dtype=np.float32)
    x.setflags(write=False)
    assert len(as_samples((x, np.arange(6)))) == 6


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Endless(), "Endless can't be used as data: it must have a length"),
        (TensorDataset(torch.zeros(3), torch.zeros(3), torch.zeros(3)), "TensorDataset can't"),
        (torch.zeros(3), "data of type Tensor can't be used"),
        ((np.zeros((3, 2)), np.zeros(4)), r"arrays of \[3, 4\] rows"),
        ((np.zeros((0, 2)), np.zeros(0)), "at least one"),
        ((np.zeros((2, 2)), [-1, 0]), r"run from -1 to 0.*0 … 0"),
        ((np.array([["a"], ["b"]]), [0, 1]), "dtype <U1 can't be used"),
    ],
)
def test_unusable_data_is_refused(data, message):
    with pytest.raises(InputError, match=message):
        as_samples(data)
