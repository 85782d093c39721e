"""Help texts, ``nufed list``, completion and ``import nufed`` do not import torch or numpy."""

import subprocess
import sys
from inspect import signature

import pytest

import nufed
from nufed.lab.cli import bundle_commands, result_commands, training_commands
from nufed.lab.config.sweep_grid import MAX_RUNS
from nufed.lab.export import TARGETS
from nufed.lab.readers.files import LABEL

HEAVY = (
    "torch",
    "numpy",
    "pydantic",
    "altair",
    "pandas",
    "flwr",
    "cryptography",
    "prometheus_client",
)
START = f"""
import os, sys
import nufed
assert {{*nufed.__all__, "__version__"}} <= {{*dir(nufed)}}

from typer.testing import CliRunner
import typer.main
from nufed.lab.cli import app

def run(*words, **environment):
    result = CliRunner().invoke(app, words, prog_name="nufed", env=environment)
    assert result.exit_code == 0, (words, result.output)
    return result.output

def helped(command, *words):
    run(*words, "--help")
    for name, below in getattr(command, "commands", {{}}).items():
        helped(below, *words, name)

def complete(*words):
    given = dict(COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
    return run(_NUFED_COMPLETE="complete_bash", **given).split()

helped(typer.main.get_command(app))
run("--version")
assert "report" in complete("nufed", "rep")
assert complete("nufed", "run", "quick") == ["quickstart"]
assert "--resume" in complete("nufed", "run", "--r")
assert "method.adapt_steps=" in complete("nufed", "run", "quickstart", "method.")
assert complete("nufed", "run", "quickstart", "methods.x.curvature", "=", "f") == ["first_order"]
assert complete("nufed", "list", "dit") == ["ditto"]
assert complete("nufed", "data", "get", "cifar10") == ["cifar10", "cifar100"]
assert "handwritten digits" in run("list") and "proximal" in run("list", "ditto", "--json")
complete("nufed", "report", "r"), complete("nufed", "adapt", "r")
print([name for name in {HEAVY!r} if name in sys.modules])
"""


def test_help_list_and_completion_import_nothing_heavy(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[]\n"


def test_modules_are_attributes_without_an_import_of_their_own():
    use = "import nufed; print(nufed.data.Samples is nufed.Samples, nufed.config.load_config)"
    found = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True)
    assert found.stdout.startswith("True <function load_config"), found.stderr


def test_every_public_name_is_found_when_it_is_used():
    for name in nufed.__all__:
        assert callable(getattr(nufed, name))
        assert name in vars(nufed), "looked up only once"
    assert nufed.Run.__name__ == "ShownRun" and nufed.meta_gradient.__name__ == "meta_gradient"
    with pytest.raises(AttributeError, match="module 'nufed' has no attribute 'nonsense'"):
        _ = nufed.nonsense


def test_defaults_of_options_are_those_of_the_functions_behind_them():
    assert list(result_commands.TARGETS) == list(TARGETS)
    assert signature(training_commands.sweep).parameters["max_runs"].default == MAX_RUNS
    for command in (bundle_commands.adapt, bundle_commands.predict):
        assert signature(command).parameters["label"].default == LABEL
