"""docs/architecture.md agrees with the code, and violations of import contracts are detected."""

import ast
import copy
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from pydoc import locate

import grimp
import pytest
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.contracts.protected import ProtectedContract

import nufed
from flower.app.test_apps import app_of, start
from nufed import GMeta, Objective
from nufed.algorithms import ALGORITHMS
from nufed.lab.cli import main
from nufed.settings import setting, settings_of

ROOT = Path(__file__).parent.parent
SOURCE = Path(nufed.__file__).parent
PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
PACKAGES = {
    path.stem
    for folder in (SOURCE, SOURCE / "lab")
    for path in folder.iterdir()
    if path.suffix == ".py" or path.is_dir()
} - {"__init__", "__main__", "__pycache__", "lab"}


class Reached(BaseException):
    """Stops a run at the traced call."""


def stack_at(monkeypatch, target, name, through, work):
    """The call stack of nufed when ``target.name`` is first reached through these files."""

    def stop(*_, **__):
        calls, frame = [], sys._getframe(1)
        while frame is not None:
            path, call = Path(frame.f_code.co_filename), frame.f_code.co_qualname
            if path.is_relative_to(SOURCE) and not call.endswith(">"):  # no <lambda>, no <listcomp>
                calls.append((call.rpartition("<locals>.")[2], str(path.relative_to(SOURCE))))
            frame = frame.f_back
        if through <= {file for _, file in calls}:
            raise Reached(calls[::-1])
        return original(*_, **__)

    original = getattr(target, name)
    with monkeypatch.context() as patch, pytest.raises(Reached) as reached:
        patch.setattr(target, name, stop)
        work()
    place = Path(sys.modules[target.__module__].__file__).relative_to(SOURCE)
    return [*reached.value.args[0], (f"{target.__name__}.{name}", str(place))]


def check_walk(heading, calls):
    """The table under a heading of the page lists these calls."""
    rows = [f"| {n} | `{call}` | `{file}` |" for n, (call, file) in enumerate(calls, 1)]
    table = "\n".join(["| | call | file |", "|---|---|---|", *rows])
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n#")[0]
    assert f"{table}\n\n" in section, (
        f"docs/architecture.md, {heading}: put this table there\n{table}"
    )


@pytest.fixture
def down_and_back(monkeypatch, tmp_path):
    """The call stacks of a site's local training and of the server's aggregation."""

    def federate():
        start(app_of(tmp_path), tmp_path, tmp_path / "run")

    through = {"flower/app/server_app.py"}
    # the trial before a round calls server_update, too
    monkeypatch.setattr("nufed.server.rounds.sums_suffice", lambda *given: True)
    return [
        stack_at(monkeypatch, GMeta, name, through, federate)
        for name in ("agent_update", "server_update")
    ]


def test_nufed_run_to_a_gradient(monkeypatch, tmp_path):
    small = ["rounds=1", "seeds=[0]", "data.agents=4", "data.unseen_agents=0", "workers=1"]
    method = ["methods={gmeta={}}", "engine=direct", "baselines=[]"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nufed", "run", "quickstart", *small, *method])
    through = {"simulation/loop.py", "simulation/engine.py"}
    calls = stack_at(monkeypatch, Objective, "grad", through, main)
    check_walk("From `nufed run` to a gradient", calls)


def test_a_flower_round_down_and_back(down_and_back):
    down, back = down_and_back
    parts_at = next(i for i, call in enumerate(back) if call not in down)
    check_walk("A Flower round: down to a site", down)
    check_walk("A Flower round: back at the server", back[parts_at - 1 :])


def test_the_random_streams_are_those_of_the_code():
    section = PAGE.split("\n## Random streams\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {purpose for cell in cells for purpose in re.findall(r"`(.*?)`", cell)}
    assert listed == set(purposes())


def purposes():
    """The literal purposes of streams; for batches the part before the slash."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(ast.Name("stream"), [_, ast.Constant(str(purpose)), *_]):
                    yield purpose
                case ast.Call(ast.Attribute(attr="batches"), [_, _, ast.Constant(str(use)), *_]):
                    yield f"{use}/…"


def asks_for_settings(tree, settings):
    """Lookups of an algorithm's setting by name, and comparisons with the protocol's functions."""
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call) and getattr(node.func, "id", "")
        if call in ("getattr", "hasattr") and getattr(node.args[1], "value", None) in settings:
            yield node.lineno
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Algorithm":
            yield node.lineno


def test_only_algorithms_know_their_settings():
    classes = ALGORITHMS.working().values()
    settings = {field.name for cls in classes for field in settings_of(cls)}
    seen = ast.parse("getattr(a, 'adapt_lr')\nown.predict is Algorithm.predict\nhasattr(a, 'x')")
    assert list(asks_for_settings(seen, settings)) == [1, 2]
    found = [
        (str(path.relative_to(SOURCE)), line)
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "algorithms"
        for line in asks_for_settings(ast.parse(path.read_text("utf-8")), settings)
    ]
    assert found == []


def test_every_package_has_one_sentence():
    listed = re.findall(r"^\| `(?:lab/)?(\w+)(?:/|\.py)` \| .+\. \|$", PAGE, re.MULTILINE)
    assert set(listed) == PACKAGES


def test_ten_files_explain_the_core():
    section = PAGE.split("\n## Ten files that explain the core\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| \d+ \| `(\w+/\w+\.py)` \| .+ \|$", section, re.MULTILINE)
    assert len(listed) == len(set(listed)) == 10
    assert all((SOURCE / name).is_file() for name in listed)


def test_the_picture_is_drawn_from_the_code():
    script = runpy.run_path(str(ROOT / "docs/draw_packages.py"))
    drawn = script["draw"](script["imports"]())
    same = script["PICTURE"].read_text("utf-8") == drawn
    assert same, (
        "imports have changed: run `python docs/draw_packages.py` and look at docs/packages.svg"
    )
    assert all(f">{package}</text>" in drawn for package in PACKAGES)


@pytest.fixture(scope="module")
def house():
    return runpy.run_path(str(ROOT / "tools/house.py"))


def test_the_house_does_not_grow_unnoticed(house, capsys, monkeypatch):
    """Upper bounds near today's figures: whoever raises one says what it bought."""
    found = house["modules"]()
    core = [module for module in found if module.floor == "core"]
    assert len(found) <= 254 and len(core) <= 108
    assert sum(module.lines for module in core) <= 12_550
    assert sum(module.lines for module in found) <= 39_200  # `nufed advise` before training: 900
    assert house["members"](found, "Objective") <= 24
    assert house["members"](found, "Algorithm") <= 24
    assert not [place for module in found for place in house["parsed_messages"](module)]
    assert max(calls for _, calls in house["walks"]()) <= 12
    monkeypatch.setattr(sys, "argv", ["house.py", "--list"])
    house["main"]()
    assert f"all         {len(found)} files" in capsys.readouterr().out


def test_functions_are_short_and_names_say_what_things_are(house):
    files = house["modules"]()
    assert not [name for module in files for name in house["vague_names"](module)]
    every = [pair for module in files for pair in house["functions"](module)]
    assert not [name for name, node in every if house["body_lines"](node) > 60]
    called = house["public"](files)
    others = [
        (n, node) for n, node in every if node not in called and not house["is_command"](node)
    ]
    assert not [name for name, node in others if house["parameters"](node) > 8]


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(house):
    text = '"""A.\n\nB."""\n\n# c\ndef f(a, b=1):\n    """D."""\n    return a  # e\n'
    assert house["code_lines"](text, ast.parse(text)) == 2
    assert house["parameters"](ast.parse("def f(self, a, *, b): ...").body[0]) == 2


@pytest.fixture(scope="module")
def imports():
    return grimp.build_graph("nufed", include_external_packages=True, cache_dir=None)


def broken(graph):
    """The types of the contracts in pyproject.toml that a graph of imports breaks."""
    configure()
    options = read_user_options(str(ROOT / "pyproject.toml"))
    types = {
        each.type_name: each for each in (LayersContract, ForbiddenContract, ProtectedContract)
    }
    for contract in options.contracts_options:
        made = types[contract["type"]](contract["name"], options.session_options, contract)
        if not made.check(copy.deepcopy(graph), verbose=False).kept:
            yield contract["type"]


def test_the_contracts_hold(imports):
    assert not list(broken(imports))


@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("nufed.simulation.loop", "nufed.flower.app.plan", "layers"),
        ("nufed.flower.app.plan", "nufed.simulation.loop", "forbidden"),
        ("nufed.lab.config.load", "nufed.flower.app.plan", "layers"),
        ("nufed.algorithms.gmeta", "nufed.lab.config.load", "layers"),
        ("nufed.meta.curvature", "nufed.algorithms.gmeta", "layers"),
        ("nufed.lab.runs.results", "nufed.lab.report.tables", "layers"),
        ("nufed.data.split", "nufed.models", "layers"),
        ("nufed.errors", "nufed.lab.files", "layers"),
        ("nufed.theory.lemmas", "torch", "forbidden"),
        ("nufed.theory.lemmas", "numpy", "forbidden"),
        ("nufed.theory.lemmas", "nufed.errors", "forbidden"),
        ("nufed.lab.cli.commands", "altair", "protected"),
        ("nufed.lab.analysis.advise", "vl_convert", "protected"),
        ("nufed.lab.experiment.runner", "flwr", "protected"),
        ("nufed.lab.downloads", "httpx", "protected"),
    ],
)
def test_a_wrong_import_breaks_a_contract(imports, importer, imported, contract):
    assert {importer, imported} <= imports.modules
    graph = copy.deepcopy(imports)
    graph.add_import(importer=importer, imported=imported, line_number=1, line_contents="")
    assert set(broken(graph)) == {contract}


def test_a_package_without_a_place_breaks_the_layers(imports):
    graph = copy.deepcopy(imports)
    graph.add_module("nufed.attic")
    assert list(broken(graph)) == ["layers"]


def test_what_ruff_is_told_is_immutable_is_frozen_and_needed():
    """Ruff can't see across files that a call in a default gives a frozen object."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    listed = settings["flake8-bugbear"]["extend-immutable-calls"]
    found = {name: locate(name) for name in listed}
    assert all(it is setting or it.__dataclass_params__.frozen for it in found.values())
    for name in listed:  # without it, ruff would complain
        others = json.dumps([other for other in listed if other != name])
        less = f"lint.flake8-bugbear.extend-immutable-calls = {others}"
        options = ["--select", "B008,RUF009", "--config", less, "--no-cache", "--quiet"]
        command = [sys.executable, "-m", "ruff", "check", *options, "."]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 1, name
