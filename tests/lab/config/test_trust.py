"""Without --trust no command or function imports code that a run directory names."""

import ast
import importlib
import inspect
import pkgutil
import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import nufed as library
from nufed import GMeta, InputError, load_run, make_bundle
from nufed.lab import runs
from nufed.lab.analysis.advise import advise, write_advice
from nufed.lab.analysis.bounds import bounds_of_run, write_bounds
from nufed.lab.bundle.from_run import make_personal
from nufed.lab.cli.commands import app
from nufed.lab.config import load_config
from nufed.lab.config.load import read_config
from nufed.lab.config.trust import named_code, require_trust
from nufed.lab.report.watch import WatchServer
from nufed.lab.runs.read_run import load_finished, training_state

CODE = """
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from nufed import GMeta
from nufed.algorithms.aggregation import Mean
Path("was-imported").touch()

@dataclass(frozen=True)
class Theirs(GMeta):
    pass

@dataclass(frozen=True)
class Rule(Mean):
    pass

def deal(samples, agents, samples_per_agent, rng, start):
    return [range(start + 40 * i, start + 40 * i + samples_per_agent) for i in range(agents)]

def changed(inputs, rng):
    return inputs

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
    "data.partition": "their_code:deal",
    "data.augment": "their_code:changed",
    "model.name": "their_code:model",
    "loss": "their_code:loss",
    "metric": "their_code:metric",
    "methods.gmeta.algorithm": "their_code:Theirs",
    "methods.gmeta.aggregation": "their_code:Rule",
}
CONFIG = {
    "rounds": 1,
    "workers": 1,
    "baselines": [],
    "data": {
        "source": NAMED["data.source"],
        "partition": NAMED["data.partition"],
        "augment": NAMED["data.augment"],
        "partition_args": {"start": 0},
        "agents": 4,
        "samples_per_agent": 40,
    },
    "model": {"name": NAMED["model.name"]},
    "loss": NAMED["loss"],
    "metric": NAMED["metric"],
    "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {
        "gmeta": {
            "algorithm": NAMED["methods.gmeta.algorithm"],
            "aggregation": NAMED["methods.gmeta.aggregation"],
        }
    },
}
COMMANDS = {
    "report": ["report", "run"],
    "bounds": ["bounds", "run"],
    "advise": ["advise", "run", "--max-steps", "1"],
    "bundle": ["bundle", "run", "--method", "gmeta"],
    "bundle of an agent": ["bundle", "run", "--method", "gmeta", "--agent", "1"],
    "resume": ["run", "--resume", "run"],
    "sweep": ["sweep", "--resume", "sweep"],
    "tune": ["tune", "--resume", "tune"],
    "export": ["export", "run", "--to", "csv"],
    "watch": ["watch", "run"],
}
REBUILDING = {
    "bounds_of_run": lambda run, **how: bounds_of_run(run, **how),
    "write_bounds": lambda run, **how: write_bounds(run, **how),
    "advise": lambda run, **how: advise(run, 1, **how),
    "write_advice": lambda run, **how: write_advice(run, 1, **how),
    "make_bundle": lambda run, **how: make_bundle(run, "gmeta", **how),
    "make_personal": lambda run, **how: make_personal(run, "gmeta", 1, **how),
}
READING = {
    "load_run": runs.load_run,
    "load": load_run,
    "load_finished": load_finished,
    "training_state": training_state,
}
FUNCTIONS = {
    "resume": library.resume,
    **READING,
    "resume_sweep": lambda path, **how: library.resume_sweep("sweep", **how),
    "tune": lambda path, **how: library.tune(resume="tune", **how),
    "load_sweep": lambda path, **how: library.load_sweep("sweep", **how),
} | {
    name: lambda path, rebuild=rebuild, **how: rebuild(load_run(path, **how), **how)
    for name, rebuild in REBUILDING.items()
}
# they read a file of a model, not a run directory: tests/lab/bundle and tests/cli
COMMANDS_OF_FILES = {"inspect", "adapt", "predict"}
FUNCTIONS_OF_FILES = {"load_bundle", "load_adapted", "build_model", "build_loss", "build_personal"}
FUNCTIONS_OF_FILES |= {"load_model", "export_model"}


def forget():
    """Traces of importing the code in this process."""
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
        library.sweep(CONFIG, {"rounds": [1, 2]}, out="sweep", figures=False)
        validated = {**CONFIG, "data": {**CONFIG["data"], "validation": 0.2}}
        library.tune(validated, ["tune.repeats=0"], budget=1, out="tune", figures=False)
        forget()
    return folder


@pytest.fixture
def theirs(tmp_path, made, monkeypatch):
    shutil.copytree(made, tmp_path / "theirs")
    monkeypatch.chdir(tmp_path / "theirs")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(WatchServer, "serve_forever", lambda server: None)
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
    assert Path("was-imported").exists()


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
        "methods": {"gmeta": GMeta(adapt_steps=1, adapt_lr=0.1, meta_lr=0.1, batch_size=6)},
    }
    config = CONFIG | {"data": {"agents": 4, "samples_per_agent": 40, "dirichlet": 10}}
    library.run(config | {"methods": {}}, out=tmp_path / "mine", **own)
    library.resume(tmp_path / "mine", **own)
    # trust is required only for code that is not replaced by passed objects
    named = (
        r"\(data.partition = 'their_code:deal', data.augment = 'their_code:changed', "
        r"metric = 'their_code:metric'\)"
    )
    with pytest.raises(InputError, match=named):
        library.resume("run", **{key: own[key] for key in own if key != "metric"})
    assert not Path("was-imported").exists()


def test_a_run_is_not_resumed_with_objects_in_place_of_its_code(theirs):
    theirs_too = {
        "methods": {"gmeta": GMeta(adapt_steps=1, adapt_lr=0.1, meta_lr=0.1, batch_size=6)},
        "trust": True,
    }
    with pytest.raises(
        library.NufedError, match=r"methods.gmeta.algorithm was 'their_code:Theirs'"
    ):
        library.resume("run", **theirs_too)


def test_commands_and_functions_that_take_trust_are_all_tested():
    commands = typer.main.get_command(app).commands
    asking = {name for name, it in commands.items() if "trust" in {p.name for p in it.params}}
    assert {first for first, *_ in COMMANDS.values()} == asking - COMMANDS_OF_FILES
    modules = [m.name for m in pkgutil.walk_packages(library.__path__, "nufed.")]
    found = {
        name
        for module in modules
        if not module.startswith("nufed.lab.cli") and not module.endswith("__main__")
        for name, it in vars(importlib.import_module(module)).items()
        if inspect.isfunction(it) and "trust" in inspect.signature(it).parameters
    }
    public = {name for name in found if not name.startswith("_")}
    shared = {"require_trust", "rebuild_objective", "reopen_run", "prepare_again"}  # what they call
    assert public - shared - FUNCTIONS_OF_FILES == FUNCTIONS.keys()


@pytest.mark.parametrize("function", REBUILDING)
def test_trust_in_reading_a_run_is_not_trust_in_what_is_done_with_it(theirs, function):
    """A run that was read with trust is rebuilt with trust only."""
    run = load_run(Path("run"), trust=True)
    with pytest.raises(InputError, match=r"names code to import .*trust=True"):
        REBUILDING[function](run)


def test_all_keys_whose_functions_are_imported_need_trust():
    """Every key that the source passes to importing functions; bundles check trust themselves."""
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
    methods = {
        key for key in NAMED if key.startswith("methods.")
    }  # of them lab/config/trust.py knows
    assert keys | methods == NAMED.keys() == named_code(read_config(CONFIG)).keys()


def test_a_run_without_code_needs_no_trust(tmp_path):
    require_trust(tmp_path, load_config({}), trust=False)
