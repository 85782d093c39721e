"""What others prepared (names, splits, run directories) can't reach outside, and is never run."""

import ast
import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

import nufed
from nufed import InputError, Split
from nufed.errors import RunError
from nufed.runs import RunDirectory, load_config, load_run
from nufed.runs.checkpoint import load_checkpoint, signed
from nufed.runs.part import check_done
from support import federation
from test_resume import CONFIG, begun

PART = "methods/fo/seed-0"
OUTSIDE = ["..", ".", "../x", "a/b", "/etc", "a\\b", ".hidden", "", "a\n", "a\0b", "C:x", "~", "-x"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_could_leave_a_directory_are_refused(name):
    for config in ({"name": name}, {"methods": {name: {}}}):
        with pytest.raises(InputError, match=r"must be made of letters, digits"):
            load_config(config)
    with pytest.raises(InputError, match="algorithm"):
        load_config({"method": {"algorithm": name}})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was ended in the middle of its last part."""
    config = CONFIG | {"seeds": [0], "baselines": ["majority"], "save_every": 2}
    return begun(tmp_path_factory.mktemp("stopped") / "run", 17, config)


def everything(folder):
    """What a directory holds, and where links in it lead."""
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize(
    "place",
    [
        "lock",
        "config.toml",
        ".config.toml.tmp",
        "timing.jsonl",
        "results.json",
        "report.html",
        "figures",
        "splits",
        "methods",
        "methods/hf",
        "methods/hf/seed-0",
        "methods/hf/seed-0/metrics.jsonl",
        "methods/hf/seed-0/checkpoint-000004.safetensors",
        "methods/hf/seed-0/.checkpoint-000008.json.tmp",
        "methods/hf/seed-0/model-round-000006.safetensors",
        "methods/unheard-of",
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_in_a_run_directory_is_not_followed(tmp_path, stopped, place, relative):
    run = shutil.copytree(stopped, tmp_path / "run")
    path, outside = run / place, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    elif place in ("figures", "methods/unheard-of"):
        outside.mkdir()
    else:
        outside.write_text("mine")
    target = os.path.relpath(outside, path.parent) if relative else outside
    path.symlink_to(target, target_is_directory=outside.is_dir())
    before = everything(tmp_path)
    for reach in (nufed.resume, load_run):
        with pytest.raises(RunError, match=r"is a symbolic link.*cp -RL .*run COPY") as caught:
            reach(run)
        assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


FOREIGN = ["lock", "timing.jsonl", "config.toml", "run.json", "log.txt", "methods/hf/seed-0/x.json"]


@pytest.mark.parametrize("place", FOREIGN)
def test_a_hard_link_to_another_file_is_neither_read_nor_written(tmp_path, stopped, place):
    run = shutil.copytree(stopped, tmp_path / "run")
    path, outside = run / place, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("mine")
    path.hardlink_to(outside)
    before = everything(tmp_path)
    for reach in (nufed.resume, load_run):
        with pytest.raises(RunError, match=r"is a hard link to another file.*cp -RL"):
            reach(run)
    assert everything(tmp_path) == before


@pytest.mark.timeout(60)  # opening a FIFO that nobody writes to would wait without end
@pytest.mark.parametrize("place", FOREIGN)
@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_a_special_file_is_refused_before_it_is_opened(tmp_path, stopped, place, kind, monkeypatch):
    run = shutil.copytree(stopped, tmp_path / "run")
    (run / place).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(run / place)
    else:
        monkeypatch.chdir((run / place).parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind((run / place).name)
    if place == "run.json":
        with pytest.raises(RunError, match=r"has no run\.json"):
            nufed.resume(run)
    else:
        with pytest.raises(RunError, match=rf"{place} is a special file \(a FIFO"):
            nufed.resume(run)
    with pytest.raises(RunError, match=rf"{place} is a special file \(a FIFO"):
        load_run(run)


def test_the_run_directory_itself_may_be_reached_through_a_link(tmp_path, stopped):
    (tmp_path / "link").symlink_to(stopped)
    assert RunDirectory(tmp_path / "link").existing() == tmp_path / "link"


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd", "seed-0/../x", "other.json"])
def test_an_end_that_names_other_files_is_refused(tmp_path, stopped, name):
    part = shutil.copytree(stopped / PART, tmp_path / "part")
    about = json.loads((part / "done.json").read_text())["content"]
    about["files"] |= {name: "0" * 64}
    (part / "done.json").write_bytes(signed(about))
    with pytest.raises(RunError, match="which is no file of a part"):
        check_done(part)


@pytest.mark.parametrize("rounds", ["../../x", "9", None, [9]])
def test_an_end_whose_rounds_are_no_number_is_refused(tmp_path, stopped, rounds):
    part = shutil.copytree(stopped / PART, tmp_path / "part")
    about = json.loads((part / "done.json").read_text())["content"]
    (part / "done.json").write_bytes(signed(about | {"rounds": rounds}))
    with pytest.raises(RunError, match=r"done.json does not fit: rounds: .*integer"):
        check_done(part)


@pytest.mark.parametrize("content", [None, [], "../x", {"rounds": 9, "files": "../x"}])
def test_an_end_of_another_form_is_refused(tmp_path, content):
    (tmp_path / "done.json").write_bytes(signed(content))
    with pytest.raises(RunError, match="is damaged"):
        check_done(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("round", "../../x"),
        ("round", 7),
        ("round", None),
        ("metrics_bytes", -3),
        ("metrics_bytes", 10**9),
        ("metrics_bytes", "../x"),
        ("state_sha256", ["../x"]),
        ("belongs_to", "../x"),
    ],
)
def test_a_crafted_manifest_is_not_used(tmp_path, stopped, key, value):
    part = shutil.copytree(stopped / PART, tmp_path / "part")
    for path in part.glob("checkpoint-*.json"):
        content = json.loads(path.read_text())["content"]
        belongs = content["belongs_to"]
        path.write_bytes(signed(content | {key: value}))
    found, problems = load_checkpoint(part, belongs)
    assert found is None and len(problems) == 2
    assert all("can't be used" in problem for problem in problems)


def test_names_of_agents_become_no_paths(tmp_path):
    split = federation(agents=6).split
    names = ("../up", "/etc/passwd", "..", "a/b", "</script><script>alert(1)</script>", "5")
    hostile = Split(split.train, split.validation, split.test, names)
    (tmp_path / "work").mkdir()
    hostile.save(tmp_path / "work" / "split.safetensors")
    before = set(tmp_path.rglob("*"))
    config = CONFIG | {
        "rounds": 1,
        "seeds": [0],
        "methods": {},
        "baselines": [],
        "data": {"split_file": str(tmp_path / "work" / "split.safetensors")},
    }
    run = nufed.run(config, out=tmp_path / "work" / "run")
    made = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(run.path) for path in made)
    assert not any("up" in path.name or "passwd" in path.name for path in made)
    assert "<script>alert" not in (run.path / "report.html").read_text("utf-8")


FORBIDDEN = re.compile(
    r"\b(_?c?pickle|cloudpickle|dill|joblib|marshal|shelve|allow_pickle)\b"
    r"|^torch\b.*\bload\b|^((__)?builtins(__)?\.)?(eval|exec|__import__)$",
    re.IGNORECASE,
)


def unsafe(tree):
    """What in a syntax tree could run code that a file brings along."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                used = [alias.name for alias in names]
            case ast.ImportFrom(str(module), names):
                used = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Name(str(name)) | ast.keyword(str(name)):
                used = [name]
            case ast.Attribute():
                used = [ast.unparse(node)]
            case _:
                continue
        refused = isinstance(node, ast.keyword) and ast.unparse(node.value) == "False"
        yield from (name for name in used if FORBIDDEN.search(name) and not refused)


def test_no_module_can_run_code_that_a_file_brings_along():
    sources = list(Path(nufed.__file__).parent.rglob("*.py"))
    found = {path.name: list(unsafe(ast.parse(path.read_text("utf-8")))) for path in sources}
    assert len(found) > 50 and not any(found.values()), found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from six.moves import cPickle",
        "import joblib",
        "x = torch.load(path)",
        "from torch import load",
        "torch.jit.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "eval(text)",
        "f = exec",
        "from builtins import eval",
        "builtins.exec(text)",
        "__import__(name)",
    ],
)
def test_the_search_for_such_code_finds_it(code):
    assert list(unsafe(ast.parse(code)))
    assert not list(
        unsafe(ast.parse("module.eval(); np.load(p, allow_pickle=False); json.load(f)"))
    )
