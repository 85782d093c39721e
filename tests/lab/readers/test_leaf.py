"""Folders of LEAF: numbers and texts, their users, and what is refused."""

import json
import tomllib
import tracemalloc

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError, load_run
from nufed.lab.cli.data_commands import data_app
from nufed.lab.config.trust import named_code
from nufed.lab.readers import leaf as reader
from nufed.lab.readers.sources import SOURCES, source_of
from support import without_report

leaf = SOURCES["leaf"]


def write(path, people, name="all_data.json", **changed):
    """A file of LEAF; ``people`` are (x, y) by name."""
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(people),
        "num_samples": [len(x) for x, _ in people.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in people.items()},
    }
    (path / name).write_text(json.dumps(content | changed))
    return path


def numbers(user, samples=4, pixels=3):
    return [[user + 0.5 * p for p in range(pixels)] for _ in range(samples)], [user % 2] * samples


def test_users_are_agents(tmp_path):
    write(tmp_path, {"ann": numbers(0), "bob": numbers(1, samples=2)}, "a.json")
    write(tmp_path, {"eve": numbers(2, samples=3), "none": ([], [])}, "b.json")
    samples = leaf(str(tmp_path))
    assert samples.owners.tolist() == ["ann"] * 4 + ["bob"] * 2 + ["eve"] * 3
    assert samples.inputs.dtype == torch.float32 and samples.input_shape == (3,)
    assert samples.inputs[:, 0].tolist() == [0] * 4 + [1] * 2 + [2] * 3
    assert samples.targets.tolist() == [0] * 4 + [1] * 2 + [0] * 3 and samples.classes == ("0", "1")


@pytest.mark.parametrize("inside", ["", "data"])
def test_test_users_of_their_own_are_unseen_and_others_are_joined(tmp_path, inside):
    folder = tmp_path / inside
    write(folder / "train", {"ann": numbers(0), "bob": numbers(1)})
    write(folder / "test", {"eve": numbers(2)})
    assert leaf(str(tmp_path)).unseen_owners == ("eve",)
    write(folder / "test", {"ann": numbers(0, samples=1), "bob": numbers(1, samples=1)})
    samples = leaf(str(tmp_path))
    assert samples.unseen_owners == () and (samples.owners == "ann").sum() == 5


def test_texts(tmp_path):
    write(tmp_path, {"ann": (["to b", "o be"], ["e", " "]), "bob": (["be t"], ["o"])})
    samples = leaf(str(tmp_path))
    assert samples.classes == (" ", "b", "e", "o", "t")
    assert samples.inputs.tolist() == [[4, 3, 0, 1], [3, 0, 1, 2], [1, 2, 0, 4]]
    assert [samples.classes[number] for number in samples.targets] == ["e", " ", "o"]
    write(tmp_path, {"ann": (["to b"], ["o be"])})
    samples = leaf(str(tmp_path))
    assert samples.classes == () and samples.inputs.tolist() == [[4, 3, 0, 1]]
    assert samples.targets.tolist() == [[3, 0, 1, 2]]


def test_a_run_on_a_folder(tmp_path):
    users = {f"u{n}": numbers(n, samples=12) for n in range(4)}
    write(tmp_path / "here", users)
    config = {
        "rounds": 2,
        "data": {"source": f"leaf:{tmp_path / 'here'}"},
        "model": {"name": "logistic"},
        "method": {"batch_size": 4},
    }
    with without_report():
        nufed.run(config, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.agents == 4 and named_code(run.config) == {}  # a place, not code to import
    with without_report(), pytest.raises(InputError, match=r"holds no .json file of users"):
        (tmp_path / "empty").mkdir()
        nufed.run(config, [f"data.source=leaf:{tmp_path / 'empty'}"], out=tmp_path / "other")
    with without_report(), pytest.raises(InputError, match=r"data.args.path = '': must name a"):
        nufed.run(config, ["data.source=leaf:"], out=tmp_path / "other")


@pytest.mark.parametrize("people", ["numbers", "texts"])
def test_an_imported_folder_is_the_same_data(people, tmp_path, monkeypatch, capsys):
    train, test = {"ann": numbers(0), "bob": numbers(1, samples=2)}, {"eve": numbers(2)}
    if people == "texts":
        train, test = {"ann": (["to b", "o be"], ["e", " "])}, {"eve": (["be t"], ["ö"])}
    write(tmp_path / "leaf" / "train", train)
    write(tmp_path / "leaf" / "test", test)
    monkeypatch.chdir(tmp_path)
    out = command(monkeypatch, capsys, "leaf", "leaf")
    source, partition = tomllib.loads(out)["data"].values()
    (name, place), right = source_of(source), leaf(str(tmp_path / "leaf"))
    assert partition == "given"
    assert name == "leaf" and place == {"path": "leaf.npz"}
    found = leaf(**place)
    assert found.fingerprint == right.fingerprint and found.unseen_owners == ("eve",)
    assert torch.equal(found.inputs, right.inputs) and found.inputs.dtype == right.inputs.dtype
    with pytest.raises(InputError, match=r"--out leaf.npz: exists already; name another"):
        command(monkeypatch, capsys, "leaf", "leaf")
    with pytest.raises(InputError, match=r"--out a.json: must end in .npz"):
        command(monkeypatch, capsys, "leaf", "leaf", "--out", "a.json")
    with pytest.raises(InputError, match=r"--out no/a.npz: there is no folder no; name another"):
        command(monkeypatch, capsys, "leaf", "leaf", "--out", "no/a.npz")
    with pytest.raises(InputError, match="'csv': must be leaf"):
        command(monkeypatch, capsys, "csv", "leaf")


def command(monkeypatch, capsys, *words):
    """What ``nufed data import`` prints on standard output."""
    data_app(["import", *words], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"owner": np.array([0, 9])}, "not made by `nufed data import leaf`"),
        ({"owner": np.array([0, -1])}, "owner must hold a number of owners per sample"),
        ({"owner": np.array([0.0, 0.0])}, "owner must hold a number"),
        ({"owner": np.array([0])}, "must have the same number of rows"),
        ({"owners": np.array([3])}, "must hold names"),
        ({"targets": np.array([0, 7])}, "class numbers run from 0 to 7"),
        ({"unseen": np.array(["eve"])}, "unseen_owners names 'eve'"),
        ({"inputs": np.array([[0.0], [np.nan]])}, "holds NaN"),
        ({"inputs": np.array([["a"], ["b"]])}, "not made by `nufed data import leaf`"),
        ({"inputs": None}, "it has no array inputs"),
    ],
)
def test_other_files_are_refused_in_one_sentence(changed, sentence, tmp_path):
    arrays = {
        "inputs": np.zeros((2, 1), np.float32),
        "targets": np.array([0, 1]),
        "owner": np.array([0, 0]),
        "owners": np.array(["ann"]),
        "classes": np.array(["a", "b"]),
        "unseen": np.array([], dtype=np.str_),
    }
    file = tmp_path / "a.npz"
    np.savez(file, **arrays)
    assert leaf(str(file)).owners.tolist() == ["ann", "ann"]
    np.savez(file, **{name: x for name, x in (arrays | changed).items() if x is not None})
    with pytest.raises(InputError, match=sentence) as caught:
        leaf(str(file))
    assert str(caught.value).startswith(f"{file} can't be used: ") and "\n" not in str(caught.value)
    file.write_bytes(b"PK")
    with pytest.raises(InputError, match="not made by `nufed data import leaf`"):
        leaf(str(file))


GOOD = {"ann": numbers(0)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"users": None}, "layout of LEAF"),
        ({"users": "ann"}, "users must be a list"),
        ({"users": ["ann", "ann"]}, "list of different names"),
        ({"users": ["eve"]}, "layout of LEAF .KeyError: 'eve'"),
        ({"user_data": []}, "layout of LEAF"),
        ({"user_data": {"ann": [1]}}, "layout of LEAF"),
        ({"user_data": {"ann": {"x": [[1.0]], "y": [0, 1]}}}, "x and y of user ann must be lists"),
        ({"user_data": {"ann": {"x": 3, "y": 4}}}, "must be lists of the same length"),
        ({"user_data": {"ann": {"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}}}, "layout of LEAF"),
        ({"user_data": {"ann": {"x": [{"a": 1}], "y": [0]}}}, "must hold numbers in equal shapes"),
        ({"user_data": {"ann": {"x": [[None]], "y": [0]}}}, "must hold numbers in equal shapes"),
        (
            {"user_data": {"ann": {"x": ["ab", "c"], "y": ["d", "e"]}}},
            "different lengths: pad them",
        ),
        ({"user_data": {"ann": {"x": ["ab"], "y": [1]}}}, "its targets are not"),
        ({"user_data": {"ann": {"x": [[float("nan")]], "y": [1]}}}, "sample 0 .* holds NaN"),
        ({"user_data": {"ann": {"x": [[1e999]], "y": [1]}}}, "holds infinity"),
        ({"user_data": {"ann": {"x": [], "y": []}}}, "it is empty"),
    ],
)
def test_other_contents_are_refused_in_one_sentence(change, sentence, tmp_path):
    write(tmp_path, GOOD, **change)
    with pytest.raises(InputError, match=sentence) as caught:
        leaf(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"users": [' + b"9" * 9999 + b"]}"]
)
def test_what_is_no_json_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=r"a.json can't be used: it does not have the layout"):
        leaf(str(tmp_path))


def test_two_files_of_a_user_different_shapes_and_sizes(tmp_path, monkeypatch):
    write(tmp_path, GOOD, "a.json")
    write(tmp_path, GOOD, "b.json")
    with pytest.raises(InputError, match=r"b.json can't be used: user 'ann' is also in another"):
        leaf(str(tmp_path))
    write(tmp_path, {"bob": numbers(0, pixels=4)}, "b.json")
    with pytest.raises(InputError, match="samples of different shapes or types"):
        leaf(str(tmp_path))
    monkeypatch.setenv("NUFED_DATA_LIMIT", str(reader.JSON_GROWTH * 60))
    with pytest.raises(InputError, match=r"a.json can't be used: it has .* is the limit"):
        leaf(str(tmp_path))
    for path in ("", 3):
        with pytest.raises(InputError, match="must name a folder"):
            leaf(path)
    with pytest.raises(InputError, match=r"nowhere holds no .json file of users"):
        leaf(str(tmp_path / "nowhere"))
    (tmp_path / "c.json").mkdir()
    monkeypatch.delenv("NUFED_DATA_LIMIT")
    with pytest.raises(InputError, match=r"c.json can't be used: it is not a regular file"):
        leaf(str(tmp_path))


def test_json_takes_no_more_memory_than_is_counted():
    for item in (b"[]", b"1.5", b'"a"', b"0", b"[0]", b"{}", b'{"":0}'):
        text = b"[" + (item + b",") * 50_000 + item + b"]"
        tracemalloc.start()
        kept = json.loads(text)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept and most < reader.JSON_GROWTH * len(text) + 2**16
