"""Untrusted input (names, splits, run directories) can't escape its directory or run code."""

import ast
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

import nufed
from lab.experiment.test_resume import CONFIG, begun
from nufed import InputError, Split
from nufed.errors import RunError
from nufed.lab.config import load_config
from nufed.lab.config.split_file import split_bytes
from nufed.lab.files import read_sealed, write_sealed
from nufed.lab.runs import RunDirectory, load_run
from nufed.lab.runs.part_files import check_done, load_checkpoint
from support import federation

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
    """The contents of a directory, and the targets of its links."""
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
        "methods/hf/seed-0/.checkpoint-000008.safetensors.tmp",
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


@pytest.mark.timeout(60)  # opening a FIFO without a writer would block
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
    about = read_sealed(part / "done.json").about
    about["files"] |= {name: "0" * 64}
    write_sealed(part / "done.json", about)
    with pytest.raises(RunError, match="which is not a file of a part"):
        check_done(part)


@pytest.mark.parametrize("rounds", ["../../x", "9", None, [9]])
def test_an_end_whose_rounds_are_no_number_is_refused(tmp_path, stopped, rounds):
    part = shutil.copytree(stopped / PART, tmp_path / "part")
    about = read_sealed(part / "done.json").about
    write_sealed(part / "done.json", about | {"rounds": rounds})
    with pytest.raises(RunError, match=r"done.json is invalid: rounds: .*integer"):
        check_done(part)


@pytest.mark.parametrize("content", [None, [], "../x", {"rounds": 9, "files": "../x"}])
def test_an_end_of_another_form_is_refused(tmp_path, content):
    write_sealed(tmp_path / "done.json", content)
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
        ("states", ["../x", 1]),
        ("belongs_to", "../x"),
    ],
)
def test_a_crafted_manifest_is_not_used(tmp_path, stopped, key, value):
    part = shutil.copytree(stopped / PART, tmp_path / "part")
    for path in part.glob("checkpoint-*"):
        sealed = read_sealed(path)
        belongs = sealed.about["belongs_to"]
        write_sealed(path, sealed.about | {key: value}, sealed.tensors)
    found, problems = load_checkpoint(part, belongs)
    assert found is None and len(problems) == 2
    assert all("can't be used" in problem for problem in problems)


def test_names_of_agents_do_not_become_paths(tmp_path):
    split = federation(agents=6).split
    names = ("../up", "/etc/passwd", "..", "a/b", "</script><script>alert(1)</script>", "5")
    hostile = Split(split.train, split.validation, split.test, names)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "split.safetensors").write_bytes(split_bytes(hostile))
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


# modules and functions that can run code from a file or by name
UNSAFE = re.compile(
    r"\b(_?c?pickle|cloudpickle|dill|joblib|marshal|shelve|allow_pickle|runpy)\b"
    r"|^torch\b.*\bload\b|\bload_module\b|\bexec_module\b|\bimport_module\b|^importlib$|^imp$"
    r"|^((__)?builtins(__)?\.)?(eval|exec|compile|__import__)$|\bentry_points\b",
    re.IGNORECASE,
)
IMPORTS = re.compile(r"^importlib$|\bimport_module\b|\bentry_points\b")
# the only files that may import code by name, as docs/reliability.md states with their reasons
DOCUMENTED = re.search(
    r"^Three files of nufed import code by name: (.*?) A test searches",
    (Path(__file__).parents[1] / "docs" / "reliability.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)
MAY_IMPORT = set(re.findall(r"`([\w/]+\.py)` \(", DOCUMENTED[1]))


def unsafe(tree):
    """Names in a syntax tree that could run code from a file or by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                used = [alias.name for alias in names]
            case ast.ImportFrom(str(module), names):
                used = [f"{module}.{alias.name}" for alias in names]
            case ast.Name(str(name)) | ast.keyword(str(name)):
                used = [name]
            case ast.Attribute():
                used = [ast.unparse(node)]
            case ast.Call(ast.Name("getattr"), [module, ast.Constant(str(name)), *_]):
                used = [f"{ast.unparse(module)}.{name}"]
            case _:
                continue
        refused = isinstance(node, ast.keyword) and ast.unparse(node.value) == "False"
        yield from (name for name in used if UNSAFE.search(name) and not refused)


def test_no_module_can_run_code_from_a_file():
    root = Path(nufed.__file__).parent
    found = {
        str(path.relative_to(root)): set(unsafe(ast.parse(path.read_text("utf-8"))))
        for path in root.rglob("*.py")
    }
    assert len(found) > 50
    assert {path for path, names in found.items() if names} == MAY_IMPORT and len(MAY_IMPORT) == 3
    assert all(IMPORTS.search(name) for names in found.values() for name in names)


def test_the_package_imports_only_its_own_modules_by_name(monkeypatch):
    imported = []

    def record(name):
        imported.append(name)
        raise ImportError

    monkeypatch.setattr(nufed, "import_module", record)
    for name in [*nufed.__all__, "analysis", "theory"]:
        monkeypatch.delitem(vars(nufed), name, raising=False)  # it may have been used before
        with pytest.raises(ImportError):
            getattr(nufed, name)
    for name in ("os", "pickle", "no_such_name"):
        with pytest.raises(AttributeError):
            getattr(nufed, name)
    assert len(imported) == len(nufed.__all__) + 2
    assert all(name.startswith("nufed.") for name in imported)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from six.moves import cPickle",
        "import joblib",
        "import marshal",
        "import shelve",
        "x = torch.load(path)",
        "from torch import load",
        "torch.jit.load(path)",
        "getattr(torch, 'load')(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "eval(text)",
        "f = exec",
        "compile(text, '', 'exec')",
        "from builtins import eval",
        "builtins.exec(text)",
        "__import__(name)",
        "import importlib",
        "from importlib import import_module",
        "importlib.import_module(name)",
        "spec.loader.exec_module(module)",
        "entry_points(group='nufed.algorithms')",
        "import runpy",
    ],
)
def test_the_search_for_such_code_finds_it(code):
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "module.eval()",
        "np.load(p, allow_pickle=False)",
        "json.load(f)",
        "torch.compile(f)",
        "re.compile(text)",
        "from importlib.resources import files",
        "from importlib.metadata import version",
    ],
)
def test_the_search_for_such_code_lets_the_rest_pass(code):
    assert not list(unsafe(ast.parse(code)))
