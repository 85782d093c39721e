"""Data sets of Hugging Face and Flower Datasets, from folders and objects, without a network."""

import socket

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError
from nufed.lab.config import load_config
from nufed.lab.config.problem import build_samples, build_split
from nufed.lab.config.trust import named_code
from nufed.lab.readers.hugging_face import from_datasets
from nufed.lab.readers.sources import SOURCES
from support import without_report

datasets = pytest.importorskip("datasets", reason='needs pip install "nufed[hf]"')

hf = SOURCES["hf"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(rows=12):
    """Two numeric columns, a class and a hospital."""
    kinds = datasets.Features(
        {
            "age": datasets.Value("int64"),
            "dose": datasets.Value("float32"),
            "label": datasets.ClassLabel(names=["well", "ill"]),
            "hospital": datasets.Value("string"),
        }
    )
    columns = {
        "age": [row % 20 for row in range(rows)],
        "dose": [0.5 * row for row in range(rows)],
        "label": [row % 2 for row in range(rows)],
        "hospital": [f"h{row % 3}" for row in range(rows)],
    }
    return datasets.Dataset.from_dict(columns, features=kinds)


def test_a_saved_folder_with_an_owner_column(tmp_path):
    table().save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table(), "test": table(6)}).save_to_disk(str(tmp_path / "two"))
    samples = hf(str(tmp_path / "one"), owner="hospital")
    assert samples.classes == ("well", "ill") and samples.owners[:4].tolist() == [
        "h0",
        "h1",
        "h2",
        "h0",
    ]
    assert samples.inputs.tolist()[:2] == [[0.0, 0.0], [1.0, 0.5]]
    assert len(hf(str(tmp_path / "two"), split="test", owner="hospital")) == 6
    only = hf(str(tmp_path / "one"), inputs="dose", target="age")
    assert only.input_shape == (1,) and len(only.classes) == 12


def test_files_in_a_folder_and_a_run(tmp_path):
    (tmp_path / "data").mkdir()
    table(60).to_parquet(str(tmp_path / "data/train.parquet"))
    config = {
        "rounds": 2,
        "data": {"source": f"hf:{tmp_path / 'data'}", "args": {"owner": "hospital"}},
        "model": {"name": "logistic"},
        "method": {"batch_size": 4},
    }
    with without_report():
        run = nufed.run(config, out=tmp_path / "run")
    assert run.agents == 3 and named_code(run.config) == {}
    for partition, agents in (("iid", 4), ("dirichlet", 5), ("given", 3)):
        changes = {"partition": partition, "agents": agents, "dirichlet": 1.0, "test": 0.2}
        data = load_config({**config, "data": {**config["data"], **changes}}).data
        assert len(build_split(data, build_samples(data), 0).agents) == agents


def test_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(4 * 6 * 5 * 3, dtype=np.uint8).reshape(4, 6, 5, 3)
    for colour in (False, True):
        own = [image.fromarray(each if colour else each[..., 0]) for each in pixels]
        data = datasets.Dataset.from_dict({"image": own, "label": ["a", "b", "a", "b"]})
        samples = from_datasets(data)
        right = np.moveaxis(pixels, -1, 1) if colour else pixels[..., 0]
        assert (samples.inputs.numpy() == right).all() and samples.scale == 1 / 255
        assert samples.classes == ("a", "b")
    uneven = [image.new("L", (5, 6)), image.new("L", (6, 5))]
    with pytest.raises(InputError, match=r"sample 1 .* has 6×5 pixels, the first has 5×6"):
        from_datasets(datasets.Dataset.from_dict({"image": uneven, "label": [0, 1]}))


def test_texts_with_a_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]")
    fast.save_pretrained(str(tmp_path / "tokenizer"))
    data = datasets.Dataset.from_dict({"text": ["to be or not", "be"], "label": ["x", "y"]})
    samples = from_datasets(data, tokenizer=str(tmp_path / "tokenizer"), length=3)
    assert samples.inputs.tolist() == [[1, 2, 3], [2, 0, 0]]
    with pytest.raises(InputError, match="has no padding token"):
        from_datasets(data, tokenizer=str(tmp_path / "tokenizer"), length=3, mask=True)
    fast.pad_token = "not"
    fast.save_pretrained(str(tmp_path / "padding"))
    masked = from_datasets(data, tokenizer=str(tmp_path / "padding"), length=3, mask=True).inputs
    assert masked["input_ids"].tolist() == [[1, 2, 3], [2, 4, 4]]
    assert masked["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/ann.txt").write_text("to be or not to be " * 5)
    windows = SOURCES["text"](
        path=str(tmp_path / "texts"), tokenizer=str(tmp_path / "tokenizer"), length=4, least=2
    )
    assert windows.inputs[0].tolist() == [1, 2, 3, 4] and windows.targets[0].tolist()[-1] == 1
    with pytest.raises(InputError, match=r"'text' holds text: .* data.args.tokenizer"):
        from_datasets(data)
    with pytest.raises(InputError, match=r"the tokenizer '.*nowhere' can't be read"):
        from_datasets(data, tokenizer=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"owner": "hospitl"}, r"data.args.owner = 'hospitl': .* did you mean 'hospital'"),
        ({"target": "no"}, "data.args.target = 'no': the data set has the columns 'age'"),
        ({"inputs": ["age", "x"]}, "data.args.inputs = 'x'"),
        ({"inputs": ["hospital"]}, "'hospital' holds text"),
    ],
)
def test_columns_that_are_refused(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        from_datasets(table(), **arguments)


def test_what_else_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"data.source = 'hf:no/such': can't be read as split"):
        hf("no/such")
    with pytest.raises(InputError, match="must name a folder or a cached data set"):
        hf()
    datasets.Dataset.from_dict({"a": [1.0], "label": [0]}).save_to_disk(tmp_path / "one")
    with pytest.raises(InputError, match=r"split = 'valid': must be left out"):
        hf(str(tmp_path / "one"), split="valid")
    with pytest.raises(InputError, match=r"list can't be used: give a datasets.Dataset"):
        from_datasets([1])
    with pytest.raises(InputError, match="name the column of targets"):
        from_datasets(datasets.Dataset.from_dict({"a": [1.0], "b": [2.0]}))
    uneven = datasets.Dataset.from_dict({"a": [[1.0], [1.0, 2.0]], "label": [0, 1]})
    with pytest.raises(InputError, match="column 'a' does not hold numbers in equal shapes"):
        from_datasets(uneven)


def test_flower_datasets():
    partitioners = pytest.importorskip(
        "flwr_datasets.partitioner", reason='needs pip install "nufed[flower-datasets]"'
    )
    natural = partitioners.NaturalIdPartitioner(partition_by="hospital")
    natural.dataset = table()
    samples = from_datasets(natural, inputs=["age", "dose"])
    by_owner = {str(name): samples.inputs[samples.owners == name, 0] for name in ("h0", "h1", "h2")}
    assert {name: own.tolist() for name, own in by_owner.items()} == {
        "h0": [0, 3, 6, 9],
        "h1": [1, 4, 7, 10],
        "h2": [2, 5, 8, 11],
    }
    owned = from_datasets(table(), inputs=["age", "dose"], owner="hospital")
    for name in by_owner:
        rows = (each.inputs[each.owners == name] for each in (samples, owned))
        assert torch.equal(*rows)
    even = partitioners.IidPartitioner(num_partitions=4)
    even.dataset = table()
    samples = from_datasets(even, inputs="dose")
    assert sorted(set(samples.owners)) == ["0", "1", "2", "3"]
    with pytest.raises(InputError, match="owner = 'hospital': must not be given"):
        from_datasets(even, owner="hospital")


def test_a_federated_dataset(monkeypatch):
    flower = pytest.importorskip(
        "flwr_datasets", reason='needs pip install "nufed[flower-datasets]"'
    )
    monkeypatch.setattr(
        datasets, "load_dataset", lambda **_: datasets.DatasetDict({"train": table()})
    )
    found = flower.FederatedDataset(dataset="any", partitioners={"train": 3}, shuffle=False)
    samples = from_datasets(found, inputs="age")
    assert sorted(set(samples.owners)) == ["0", "1", "2"] and len(samples) == 12
    with pytest.raises(InputError, match="split = 'test': must be one that is partitioned: train"):
        from_datasets(found, split="test")
