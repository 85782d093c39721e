"""Shell completion, as the shells call it, and the examples of help texts."""

import pytest
import typer
from typer.testing import CliRunner

from nufed.lab.cli import app
from nufed.lab.cli.commands import EXAMPLES
from nufed.lab.config.load import read_config


@pytest.fixture
def completed(tmp_path, monkeypatch):
    """The completions of the last of some words; bash splits them at ``=``."""
    for run in ("runs/a", "runs/b", "other"):
        (tmp_path / run / "methods" / "ditto").mkdir(parents=True)
        (tmp_path / run / "bundles").mkdir()
        (tmp_path / run / "run.json").touch()
        (tmp_path / run / "bundles" / "ditto.nufed").touch()
    for name in ("mine.toml", "here.nufed"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def complete(words, shell="bash"):
        if shell == "bash":
            parts = words.replace("=", " = ").split(" ")
            parts = [part for place, part in enumerate(parts) if part or place == len(parts) - 1]
            given = {"COMP_WORDS": " ".join(parts), "COMP_CWORD": str(len(parts) - 1)}
            if words.endswith("="):  # the current word is "=" itself
                given["COMP_CWORD"] = str(len(parts) - 2)
        else:
            given = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        environment = {"_NUFED_COMPLETE": f"complete_{shell}", **given}
        result = CliRunner().invoke(app, [], prog_name="nufed", env=environment)
        return result.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("nufed run quick", ["quickstart"]),
        ("nufed run m", ["mine.toml"]),
        ("nufed run quickstart data.dirich", ["data.dirichlet=", "data.dirichlet=0.01"]),
        ("nufed run quickstart method.adapt_", ["method.adapt_lr=", "method.adapt_steps="]),
        (
            "nufed run quickstart engine=",
            ["direct", "direct_onednn", "closed_form", "batched", "gram", "gram_onednn", "auto"],
        ),
        ("nufed run quickstart engine=di", ["direct", "direct_onednn"]),
        ("nufed run quickstart rounds=5 tune_local=", ["true", "false"]),
        ("nufed run quickstart method.curvature=f", ["first_order"]),
        ("nufed run quickstart methods.x.algorithm=dit", ["ditto"]),
        ("nufed run quickstart data.partition=sh", ["shards"]),
        ("nufed run --resume o", ["other"]),
        ("nufed data show quickstart dtyp", ["dtype=", "dtype=float32", "dtype=float64"]),
        ("nufed data get cif", ["cifar10", "cifar100"]),
        ("nufed list scaf", ["scaffold"]),
        ("nufed list pre", ["presets"]),
        ("nufed report ", ["other", "runs/a", "runs/b"]),
        ("nufed report runs/", ["runs/a", "runs/b"]),
        ("nufed advise runs/b", ["runs/b"]),
        ("nufed bounds ", ["other", "runs/a", "runs/b", "mine.toml"]),
        ("nufed bundle other --method d", ["ditto"]),
        ("nufed inspect h", ["here.nufed"]),
        ("nufed adapt runs/", ["runs/a/bundles/ditto.nufed", "runs/b/bundles/ditto.nufed"]),
    ],
)
def test_bash(completed, words, found):
    assert completed(words) == found


def test_shells_that_do_not_split_words(completed):
    assert completed("nufed run quickstart engine=b", "fish") == ["engine=batched"]


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_examples_of_help_texts_are_commands_that_exist():
    top = typer.main.get_command(app)
    found = {path: command for path, command in commands(top) if command.epilog}
    assert {" ".join(path) for path in found} == set(EXAMPLES)
    for path, command in found.items():
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "160"}).stdout
        for example in EXAMPLES[" ".join(path)]:
            words = example.partition("  (")[0].split()
            assert example in shown and words[1 : 1 + len(path)] == list(path)
            with command.make_context(path[-1], words[1 + len(path) :]) as context:
                if overrides := context.params.get("overrides"):
                    read_config("quickstart", overrides)
