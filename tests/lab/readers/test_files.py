"""Users' files: tables, arrays and folders of images, for adapting and for training."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from nufed import InputError
from nufed.data import as_samples
from nufed.lab.readers.files import LIMIT, read_data
from nufed.lab.readers.sources import SOURCES

own = SOURCES["file"]


@pytest.mark.parametrize(
    "text",
    [
        "width,height,kind\n1.5,2,oak\n3,4,elm\n",
        "width;height;kind\n1,5;2;oak\n3;4,0;elm\n",
        "width\theight\tkind\r\n1.5\t2\toak\r\n\r\n3\t4\telm\r\n",
        '\ufeff"width, cm";"height, cm"; kind\n1,5;2; oak\n3;4;elm\n',
        'kind,"width;height",h\noak,1.5,2\nelm,3,4\n',
    ],
)
def test_separators_and_decimal_commas_are_recognised(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    found = read_data(tmp_path / "a.csv", "kind")
    assert found.inputs.tolist() == [[1.5, 2], [3, 4]] and found.labels == ["oak", "elm"]
    samples = own(str(tmp_path / "a.csv"), label="kind")
    assert samples.classes == ("elm", "oak") and samples.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "a;b;kind\n1;2;x\n", "no column 'label' .*'a', 'b', 'kind'.*--label"),
        (
            "a.csv",
            "a,b,c,d,e,f,labels\n",
            r"'a', 'b', 'c', 'd', 'e', 'f', 'labels'.* mean 'labels'\?",
        ),
        ("a.csv", "a,label\n\n1,x\nnan,y\n", "line 4, column 'a' has 'nan', not a finite"),
        ("a.csv", "a,label\n1,x\n2,\n", "line 3 has an empty 'label'"),
        ("a.txt", "", r"must end in \.csv, \.parquet, \.npz or \.npy, or be a folder of images"),
        ("a.parquet", "PAR1", "is not a Parquet file"),
        ("a.npy", "x", "not an NPY file"),
    ],
)
def test_unusable_files_are_one_sentence(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_data(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_labels_that_are_all_empty_are_none_where_none_are_needed(tmp_path):
    (tmp_path / "a.csv").write_text("a,label\n1,\n2,\n")
    assert read_data(tmp_path / "a.csv", labelled=False).labels is None


def test_parquet_is_read_like_csv(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    columns = {"a": [1, 2, 3], "b": [True, False, True], "c": [0.5, 1.5, 2.5], "who": [7, 8, 7]}

    def write(**changed):
        pq.write_table(pa.table({**columns, "label": ["x", "y", "x"], **changed}), path)

    write()
    found = read_data(path, owner="who")
    assert found.inputs.tolist() == [[1, 1, 0.5], [2, 0, 1.5], [3, 1, 2.5]]
    assert found.labels == ["x", "y", "x"] and found.owners == ["7", "8", "7"]
    write(label=[10, 9, 10])
    assert own(str(path), owner="who").classes == ("9", "10")
    write(label=[0.5, 1.0, 2.0])
    assert own(str(path)).targets.tolist() == [0.5, 1, 2] and not own(str(path)).classes
    for changed, words in (
        ({"c": [0.5, None, 1.0]}, r"row 1 \(counted from 0\), column 'c' is missing"),
        ({"c": [0.5, 1.0, np.inf]}, r"row 2 .*column 'c' is missing or not finite"),
        ({"c": ["p", "q", "r"]}, "column 'c' is of type string"),
        ({"label": ["x", None, "y"]}, "row 1 .* has no 'label'"),
    ):
        write(**changed)
        with pytest.raises(InputError, match=words):
            read_data(path)
    write()
    monkeypatch.setenv(LIMIT, str(path.stat().st_size))
    write(**{name: values * 500 for name, values in columns.items()}, label=["x"] * 1500)
    with pytest.raises(InputError, match="is the limit"):
        read_data(path)
    monkeypatch.delenv(LIMIT)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r'pip install "nufed\[frames\]"'):
        read_data(path)


def test_npy_takes_its_targets_from_another_file(tmp_path):
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.arange(6.0).reshape(3, 2))
    np.save(y, np.array(["b", "a", "b"]))
    assert read_data(x, labelled=False).labels is None
    assert own(str(x), targets=str(y)).targets.tolist() == [1, 0, 1]
    with pytest.raises(InputError, match=r"holds inputs alone: .*--targets"):
        read_data(x)
    np.save(y, np.array([0.5, np.nan, 1]))
    with pytest.raises(InputError, match=r"y\.npy can't be used: the target of sample 1 .* NaN"):
        read_data(x, targets=y)
    np.save(y, np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"y\.npy can't be used: it is not an NPY file"):
        read_data(x, targets=y)


@pytest.fixture
def photos(tmp_path):
    """Two classes of two coloured images of 6×4 pixels each."""
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        (tmp_path / "photos" / kind / ".hidden").touch()
        for number in range(2):
            pixels = rng.integers(0, 256, (4, 6, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / kind / f"{number}.png")
    return tmp_path / "photos"


def test_folders_of_images(photos, monkeypatch):
    found = read_data(photos)
    assert found.inputs.shape == (4, 3, 4, 6) and found.inputs.dtype == np.uint8
    assert found.labels == ["cat", "cat", "dog", "dog"] and found.images[2] == "dog/0.png"
    with Image.open(photos / "dog/0.png") as image:
        assert np.array_equal(found.inputs[2], np.asarray(image).transpose(2, 0, 1))
    assert read_data(photos, shape=(1, 5, 5)).inputs.shape == (4, 1, 5, 5)
    alone = read_data(photos / "dog", labelled=False, shape=(4, 6))
    assert alone.inputs.shape == (2, 4, 6) and alone.labels is None
    samples = own(str(photos), size=[3, 2])
    assert samples.scale == 1 / 255 and samples.input_shape == (3, 3, 2)
    assert float(samples.take(np.arange(4))[0].max()) <= 1
    monkeypatch.setenv(LIMIT, "100")
    with pytest.raises(InputError, match="its images take 288 bytes, and 100 is the limit"):
        read_data(photos)
    monkeypatch.delenv(LIMIT)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r'pip install "nufed\[images\]"'):
        read_data(photos)


def test_unusable_images_are_named(photos):
    with pytest.raises(InputError, match="no folder per class"):
        read_data(photos / "cat")
    with pytest.raises(InputError, match=r"inputs of shape \(72,\)"):
        read_data(photos, shape=(72,))
    for name, content, words in (
        ("cat/notes.txt", b"x", "'cat/notes.txt' is not an image"),
        ("cat/9.png", b"x", "cat/9.png is no image"),
        (
            "cat/9.png",
            (photos / "cat/0.png").read_bytes()[:90],
            r"cat/9.png is no image \(image file is truncated",
        ),
        ("loose.png", b"x", "loose.png lies beside the folders of classes"),
    ):
        (photos / name).write_bytes(content)
        with pytest.raises(InputError, match=words) as caught:
            read_data(photos)
        assert "\n" not in str(caught.value)
        (photos / name).unlink()
    Image.new("I;16", (6, 4)).save(photos / "cat/9.png")
    with pytest.raises(InputError, match="not 8 bits per channel"):
        read_data(photos)
    Image.new("RGB", (5, 5)).save(photos / "cat/9.png")
    with pytest.raises(InputError, match=r"several sizes .*data\.args\.size"):
        own(str(photos))


def test_what_a_file_is_trained_on(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,who,label\n0,u,1\n255,v,3\n7,u,3\n")
    samples = own(str(path), owner="who", scale=1 / 255)
    assert samples.inputs.dtype == torch.uint8 and samples.classes == ("1", "3")
    assert samples.owners.tolist() == ["u", "v", "u"]
    assert own(str(path), owner="who", regression=True).targets.tolist() == [1, 3, 3]
    path.write_text("a,label\n0.5,1.5\n2,3\n")
    assert own(str(path)).targets.tolist() == [1.5, 3]
    for arguments, words in (
        ({}, "data.args.path = '': must name a file"),
        ({"path": 3}, "data.args.path = 3: must be text"),
        ({"path": str(path), "scale": 0.1}, "whole numbers in 0 … 255"),
        ({"path": str(path), "size": [3, 3]}, "is for a folder of images"),
        ({"path": str(path), "owner": "who"}, "no column 'who'.*data.args.owner"),
    ):
        with pytest.raises(InputError, match=words):
            own(**arguments)
    path.write_text("a,label\n0.5,x\n2,3\n")
    with pytest.raises(InputError, match="the label 'x' of sample 0"):
        own(str(path), regression=True)


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, row):
        return torch.ones(2), ["b", "a", "b"][row]


def test_labels_that_are_text_are_classes_in_their_order():
    x = np.zeros((3, 2))
    words = ["b", "a", "b"]
    for targets in (words, tuple(words), np.array(words), np.array(words, dtype=object)):
        samples = as_samples((x, targets))
        assert samples.classes == ("a", "b") and samples.targets.tolist() == [1, 0, 1]
    assert as_samples(Named()).targets.tolist() == [1, 0, 1]
    assert as_samples((x, words), classes=("b", "c", "a")).targets.tolist() == [0, 2, 0]
    assert as_samples((x, words), classes=("b", "c", "a")).outputs == 3
    for targets, message in (
        (["a", None, "b"], "target of sample 1 .* is None, and others are text"),
        (["a", "b", " "], "target of sample 2 .* is ' '"),
    ):
        with pytest.raises(InputError, match=message):
            as_samples((x, targets))
    with pytest.raises(InputError, match=r"unknown label 'a' of sample 1 .*: the classes are b, c"):
        as_samples((x, words), classes=("b", "c"))
