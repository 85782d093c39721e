"""Tables: reading columns, learning a preparation from training rows, applying it anywhere."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nufed import InputError, Samples
from nufed.data import (
    Federation,
    Preparation,
    as_samples,
    as_table,
    learn_preparation,
    make_split,
    pooled,
    prepare,
    tally,
)

NAN = float("nan")


def samples(columns, **options):
    table = as_table(columns, **options)
    return as_samples((table, np.arange(len(table)) % 2))


def test_columns_are_numbers_or_categories_with_missing_values():
    table = as_table(
        {
            "age": ["63", " 41.5", "?", "-9"],
            "pain": ["typical", None, "NA", "none at all"],
            "sex": [1.0, 0, "1", 1],
            "flag": np.array([True, False, True, True]),
        },
        categorical=["sex"],
        missing=["-9"],
    )
    assert [column.words for column in table.columns] == [
        (),
        ("none at all", "typical"),
        ("0", "1"),
        ("False", "True"),
    ]
    expected = [[63, 1, 1, 1], [41.5, NAN, 0, 0], [NAN, NAN, 1, 1], [NAN, 0, 1, 1]]
    np.testing.assert_array_equal(table.values.numpy(), np.array(expected, float))


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ({"chol": [233, "hgih", "1"]}, {}, r"'chol' holds numbers and text \('hgih' at row 1, "),
        ({"chol": np.array([1, np.inf])}, {}, "'chol' is infinite at row 1"),
        ({"a": [1], "b": [1, 2]}, {}, r"the columns have \[1, 2\] values"),
        ({"sex": [1]}, {"categorical": ["sexe"]}, "there is no column 'sexe', .* mean 'sex'"),
        ({"id": [f"p{i}" for i in range(1001)]}, {}, "'id' has 1001 different texts"),
    ],
)
def test_columns_that_cannot_be_read_are_one_sentence(columns, options, sentence):
    with pytest.raises(InputError, match=sentence):
        as_table(columns, **options)


def test_closed_form_of_a_preparation():
    found = samples({"x": [1.0, 2, 6, None, 100], "c": ["b", "b", "a", None, "z"]})
    for fill, centre in (("median", 2.0), ("mean", 3.0)):
        made = learn_preparation(found, [np.array([0, 1, 2, 3])], fill)
        number, category = made.columns
        assert (number.centre, number.scale) == (centre, np.std([1, 2, 6]))
        assert (category.words, category.seen, category.usual) == (("a", "b", "z"), ("a", "b"), "b")
        inputs, notes = made.apply(as_table({"x": [5, None], "c": ["a", None]}))
        z = (5 - centre) / np.std([1, 2, 6])
        expected = [[z, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1]]
        torch.testing.assert_close(inputs, torch.tensor(expected, dtype=torch.float32))
        assert notes == [] and made.width == 6 == len(made.inputs)
    assert made.inputs[1:4] == ["x is missing", "c = a", "c = b"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=3, max_size=40), st.data())
def test_only_training_rows_are_learned_from(values, data):
    """Whatever the other rows hold changes no number and no category of the record."""
    count = len(values)
    train = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    words = [data.draw(st.sampled_from(["a", "b", "c", None])) for _ in range(count)]
    others = np.setdiff1d(np.arange(count), train)
    changed, others_words = list(values), list(words)
    for row in others:
        changed[row], others_words[row] = 1e9, "new"
    fill = data.draw(st.sampled_from(["median", "mean"]))
    learned = [
        learn_preparation(samples({"x": x, "c": c}, categorical=["c"]), [train], fill)
        for x, c in ((values, words), (changed, others_words))
    ]
    one, other = (
        [replace(column, words=column.seen, indicator=False) for column in made.columns]
        for made in learned
    )
    assert one == other


def test_a_data_frame_gives_the_same():
    columns = {
        "n": [1, None, 3],
        "x": [0.5, None, 2.0],
        "c": ["a", None, "b"],
        "d": ["u", "v", "u"],
    }
    frame = pd.DataFrame(columns).astype({"n": "Int64", "d": "category"})
    assert frame["n"].isna().sum() == 1
    one, other = as_table(columns), as_table(frame)
    assert one.columns == other.columns
    np.testing.assert_array_equal(one.values, other.values)
    made = learn_preparation(samples(columns), [np.arange(3)])
    assert torch.equal(made.apply(made.table(frame))[0], made.apply(one)[0])


def test_texts_that_mean_a_missing_value_mean_it_at_other_sites():
    made = learn_preparation(samples({"x": ["1", "-9", "3"]}, missing=["-9"]), [np.arange(3)])
    assert Preparation.read(made.describe()) == made
    assert made.apply(made.table({"x": ["-9", "2"]}))[0].tolist() == [[0, 1], [0, 0]]


def test_a_leak_of_test_rows_would_be_seen():
    found = samples({"x": [1.0, 2, 3, 1000]})
    right = learn_preparation(found, [np.arange(3)])
    assert right.columns[0].centre == 2
    assert learn_preparation(found, [np.arange(4)]).columns != right.columns


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=1, max_size=9),
        min_size=1,
        max_size=6,
    ),
    st.floats(-1e9, 1e9),
)
def test_counts_and_sums_of_agents_give_the_pooled_mean_and_deviation(agents, offset):
    values = [None if v is None else v + offset for own in agents for v in own]
    found = samples({"x": values}) if any(v is not None for v in values) else None
    if found is None:
        return
    ends = np.cumsum([len(own) for own in agents])
    rows = np.split(np.arange(len(values)), ends[:-1])
    (column,) = pooled(tally(found, own) for own in rows)
    known = np.array([v for v in values if v is not None])
    assert (column.present, column.missing) == (len(known), len(values) - len(known))
    np.testing.assert_allclose(column.mean, known.mean(), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(column.squares, ((known - known.mean()) ** 2).sum(), atol=1e-3)
    learned = learn_preparation(found, rows, "mean")
    assert learned.columns[0] == column.prepared()  # the same bits as from what sites send


def test_what_no_training_row_has_counts_as_missing():
    found = samples({"x": [1.0, 2, None, 7], "c": ["a", "a", "b", "new"], "e": [None, None, 1, 1]})
    made = learn_preparation(found, [np.array([0, 1])])
    x, _, e = made.columns
    assert x.indicator and not x.missing and e.empty
    inputs, notes = prepare(found, made)
    assert notes == [
        "in column 'c', 2 values that no training row has ('b', 'new') count as missing"
    ]
    assert inputs.inputs.shape == (4, made.width) and not inputs.columns
    by_name = dict(zip(made.inputs, inputs.inputs.T.tolist(), strict=True))
    assert by_name["x is missing"] == [0, 0, 0, 0]  # nothing could be learned for it
    assert by_name["c = a"] == [1, 1, 1, 1] and by_name["c = new"] == [0, 0, 0, 0]
    assert by_name["e"] == [0, 0, 0, 0] and by_name["e is missing"] == [1, 1, 1, 1]
    assert inputs.preparation == made and inputs.inputs.dtype == torch.float32


def test_columns_of_another_site():
    made = learn_preparation(samples({"x": [1.0, None], "sex": ["f", "m"]}), [np.arange(2)])
    number, seen = made.apply(as_table({"sex": ["m"], "id": ["p1"]}))
    assert number.tolist() == [[0, 1, 0, 1]]
    assert seen == ["columns of training that are not there (x) count as missing"]
    with pytest.raises(InputError, match=r"'x' holds 'tall' at row 0 .* trained on numbers there"):
        made.apply(as_table({"x": ["tall"], "sex": ["m"]}))
    with pytest.raises(InputError, match=r"has none of the columns x, sex: its columns are X"):
        made.apply(as_table({"X": [1]}))
    with pytest.raises(InputError, match="this model takes columns by name, and list has none"):
        made.table([[1, 2]])
    with pytest.raises(InputError, match="none of the columns that this model takes, x, sex"):
        made.table({"age": [1]})
    with pytest.raises(
        InputError, match="no column 'sex', and 'Sex' is none that this model takes"
    ):
        made.table({"x": [1], "Sex": ["m"]})
    coded = Preparation.read([{"name": "sex", "words": ["0", "1"], "seen": ["0"], "usual": "0"}])
    inputs, _ = coded.apply(coded.table({"sex": [0, 1.0, None], "more": ["a", "1", "?"]}))
    assert inputs.tolist() == [[1, 0], [1, 0], [1, 0]]  # 1 was never seen


def test_a_record_is_read_back():
    found = samples({"x": [1.0, 2, None, 7], "c": ["a", "a", "b", "new"]})
    made = learn_preparation(found, [np.array([0, 1, 2])])
    assert Preparation.read(made.describe()) == made
    good = made.describe()[0]
    for wrong, sentence in (
        ({**good, "center": 1.0}, "no 'center', only .* did you mean 'centre'"),
        ({**good, "centre": "1"}, "centre of a column is '1', not float"),
        ({**good, "missing": 1}, "missing of a column is 1, not bool"),
        ({**good, "scale": 0.0}, "column x: centre, scale"),
        ({"name": "c", "words": ["a"], "seen": ["b"]}, "column c: words, seen, usual"),
        ({"scale": 1.0}, "is a table with a name"),
    ):
        with pytest.raises(InputError, match=sentence):
            Preparation.read([wrong])
    with pytest.raises(InputError, match="must be different, and at least one"):
        Preparation.read([good, good])
    with pytest.raises(InputError, match="is a list of columns, not 3"):
        Preparation.read(3)


def test_raw_columns_are_never_trained_on_unprepared():
    found = samples({"x": [1.0, None, 3, 4]})
    split = make_split([np.arange(4)], 0, validation=0.0, test=0.25)
    with pytest.raises(InputError, match="raw columns of a table: learn a preparation"):
        Federation(found, split)
    made = learn_preparation(found, [split.train[0]])
    inputs, _ = Federation(prepare(found, made)[0], split).scored(0)
    assert inputs.isfinite().all()
    with pytest.raises(InputError, match="2 columns are named, and inputs have shape"):
        Samples(torch.zeros(4, 1), torch.zeros(4), columns=found.columns * 2)
    with pytest.raises(InputError, match="infinity"):
        replace(found, inputs=torch.full((4, 1), float("inf"))).check_finite()
