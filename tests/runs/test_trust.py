"""Code that a run directory names is imported by no command and function without --trust."""

import ast
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nufed as library
from nufed import InputError, load_run, make_bundle
from nufed.advise import advise
from nufed.bounds import bounds_of_run
from nufed.runs import load_config
from nufed.runs.trust import named_code, require_trust

CODE = """
from pathlib import Path
import torch
from torch import nn
Path("was-imported").touch()

def data():
    x = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()

def model():
    return nn.Linear(4, 2)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def metric(outputs, targets):
    return (outputs.argmax(dim=1) == targets).double().mean()
"""
NAMED = {
    "data.source": "their_code:data",
    "model.name": "their_code:model",
    "loss": "their_code:loss",
    "metric": "their_code:metric",
}
CONFIG = {
    "rounds": 1,
    "workers": 1,
    "baselines": [],
    "data": {"source": NAMED["data.source"], "agents": 4, "samples_per_agent": 40, "dirichlet": 10},
    "model": {"name": NAMED["model.name"]},
    "loss": NAMED["loss"],
    "metric": NAMED["metric"],
    "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
}
COMMANDS = {
    "report": ["report", "run"],
    "bounds": ["bounds", "run"],
    "advise": ["advise", "run", "--max-steps", "1"],
    "bundle": ["bundle", "run", "--method", "gmeta"],
    "resume": ["run", "--resume", "run"],
}
FUNCTIONS = {
    "resume": lambda path, **how: library.resume(path, **how),
    "bounds_of_run": lambda path, **how: bounds_of_run(load_run(path), **how),
    "advise": lambda path, **how: advise(load_run(path), 1, **how),
    "make_bundle": lambda path, **how: make_bundle(load_run(path), "gmeta", **how),
}


def forget():
    """What importing the code left in this process."""
    sys.modules.pop("their_code", None)
    Path("was-imported").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with their code, and a run that names it."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "their_code.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        library.run(CONFIG, out="run")
        forget()
    return folder


@pytest.fixture
def theirs(tmp_path, made, monkeypatch):
    shutil.copytree(made, tmp_path / "theirs")
    monkeypatch.chdir(tmp_path / "theirs")
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget()
    yield tmp_path / "theirs"
    forget()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_names_the_code_and_asks_for_trust(theirs, nufed, command):
    done = nufed(*COMMANDS[command], cwd=theirs)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "--trust" in line and all(f"{key} = {name!r}" in line for key, name in NAMED.items())
    assert not Path("was-imported").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_with_trust_every_command_works(theirs, nufed, command):
    done = nufed(*COMMANDS[command], "--trust", cwd=theirs)
    assert done.returncode == 0, done.stderr
    assert Path("was-imported").exists() == (command != "report")  # it reads, and needs no code


@pytest.mark.parametrize("function", FUNCTIONS)
def test_so_do_functions(theirs, function):
    with pytest.raises(InputError, match=r"names code to import .*trust=True"):
        FUNCTIONS[function](Path("run"))
    assert not Path("was-imported").exists()
    FUNCTIONS[function](Path("run"), trust=True)
    assert Path("was-imported").exists()


def test_objects_that_the_user_passes_are_not_code_of_the_directory(tmp_path, theirs):
    x = torch.randn(160, 4)
    own = {
        "data": (x, (x[:, 0] > 0).long()),
        "model": lambda: nn.Linear(4, 2),
        "loss": nn.functional.cross_entropy,
        "metric": lambda outputs, targets: 0.5,
    }
    library.run(CONFIG, out=tmp_path / "mine", **own)
    library.resume(tmp_path / "mine", **own)
    # of a directory that names code, only what is not passed is asked about
    with pytest.raises(InputError, match=r"\(metric = 'their_code:metric'\)"):
        library.resume("run", **{key: own[key] for key in ("data", "model", "loss")})
    with pytest.raises(library.NufedError, match="metric was 'their_code:metric'"):
        library.resume("run", **own)
    assert not Path("was-imported").exists()


def test_all_keys_whose_functions_are_imported_are_asked_about():
    """Every key that the source passes to what imports; bundles ask for themselves."""
    keys = {
        node.args[0].value
        for path in Path(library.__file__).parent.rglob("*.py")
        if path.name != "building.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("call_named", "find_named")
        and isinstance(node.args[0], ast.Constant)
    }
    assert keys == NAMED.keys() == named_code(load_config(CONFIG)).keys()


def test_a_run_without_code_needs_no_trust(tmp_path):
    require_trust(tmp_path, load_config({}), trust=False)
