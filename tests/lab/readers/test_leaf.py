"""Folders of LEAF: numbers and texts, their users, and what is refused."""

import json
import tracemalloc

import pytest
import torch

import nufed
from nufed import InputError, load_run
from nufed.lab.config.trust import named_code
from nufed.lab.readers import leaf as reader
from nufed.lab.readers.sources import SOURCES
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
