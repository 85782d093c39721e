"""Algorithms from outside the package: the example of docs/algorithms.md, and objects."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context as FlowerContext, RecordDict
from safetensors.torch import load_file

import nufed as library
from flower.app.in_memory import MemoryGrid, agents_data
from flower.ops.small_app import files_of
from lab.experiment.test_resume import Killed, killed_after
from nufed import GMeta, InputError, load_run
from nufed.algorithms import AgentResult, Algorithm, Cost, Ditto, FedAvg, FedAvgM
from nufed.algorithms.aggregation import Mean, TrimmedMean
from nufed.errors import RunError
from nufed.flower import App
from nufed.lab.config import load_config
from nufed.lab.config.problem import Given
from support import file_hashes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/algorithms.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE = BLOCKS[0]
CONFIG = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]
FEDERATION = """
[federation]
input_shape = [5]
classes = ["a", "b", "c"]
wait = 0.01
deadline = 0.01
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the example and its configuration, as the working directory."""
    (tmp_path / "mine.py").write_text(EXAMPLE)
    (tmp_path / "both.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_is_short():
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 25


def test_the_example_runs_beside_gmeta_on_two_workers_and_is_resumed(folder, nufed):
    library.run("both.toml", ["workers=1"], out="whole")
    with pytest.raises(Killed):
        library.run("both.toml", ["workers=2"], out="run", on_progress=killed_after(9))
    sys.modules.pop("mine")
    for command in (["run", "--resume", "run"], ["report", "whole"]):
        refused = nufed(*command, cwd=folder)
        assert refused.returncode == 2 and "methods.mine.algorithm = 'mine:Mine'" in refused.stderr
    assert "mine" not in sys.modules
    done = nufed("run", "--resume", "run", "--trust", cwd=folder)
    assert done.returncode == 0, done.stderr
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace("workers = 2", "workers = 1"))
    assert file_hashes(Path("run")) == file_hashes(Path("whole"))
    run = load_run(Path("run"))
    assert run.config.algorithms()["mine"].aggregation == TrimmedMean(0.1)
    assert run.config.steps_of("mine") == [0] and run.config.steps_of("gmeta") == [2]
    rows = {row.name for row in run.rows()}
    assert any(name.startswith("mine") for name in rows) and "gmeta" in rows
    page = (run.path / "report.html").read_text("utf-8")
    assert "mine" in page[page.rindex("<body>") :]


def test_the_example_on_flower_killed_and_resumed_leaves_the_files_of_the_simulation(folder):
    agents = 6
    data = [(x.astype("float32"), y) for x, y in agents_data(agents)]
    alone = re.sub(r"\[methods\.gmeta\][^\[]*", "", CONFIG)  # a federation trains one method
    alone = re.sub(r"(samples_per_agent|dirichlet) = .*\n", "", alone)
    (folder / "simulated.toml").write_text(alone.replace("agents = 6\n", "", 1))
    (folder / "federation.toml").write_text(alone + FEDERATION)
    app = App("federation.toml", lambda site: data[site["partition-id"]])

    def start(out, answers=10**6):
        left = iter(range(answers))

        def kill(agent, message, reply):
            if next(left, None) is None:
                raise Killed
            return reply

        grid = MemoryGrid(app.site, range(agents), folder / "sites", kill)
        app.server(grid, FlowerContext(1, 0, {}, RecordDict(), {"out": str(out)}))
        return grid.requested

    with pytest.raises(Killed):
        start("run", answers=22)
    trained = [kind for kind, _ in start("run")].count("train")
    assert 0 < trained < 6 * 5  # some rounds of the 6, of 5 agents each
    inputs, targets = (np.concatenate(part) for part in zip(*data, strict=True))
    owners = np.repeat([f"{i}" for i in range(agents)], [len(y) for _, y in data])
    given = ["engine=direct", "data.partition=given", 'baselines=["majority"]', "workers=1"]
    library.run("simulated.toml", given, data=(inputs, targets, owners), out="simulated")
    assert files_of(Path("run")) == files_of(Path("simulated"))
    run = load_run(Path("run"))
    assert isinstance(run.config.algorithms()["mine"], sys.modules["mine"].Mine)
    page = Path("run/report.html").read_text("utf-8")
    assert "mine" in page[page.rindex("<body>") :]


def test_the_example_of_the_server_is_fedavg_with_momentum(tmp_path):
    source = next(text for text in BLOCKS if "def server_update" in text)
    functions = {"torch": torch}
    exec(source, functions)
    own = {name: functions[name] for name in ("server_init", "server_update")}
    settings = {"meta_lr": 0.1, "batch_size": 6}
    methods = {"mine": type("Mine", (FedAvg,), own)(**settings), "fedavgm": FedAvgM(**settings)}
    run = library.run(SMALL | {"methods": {}}, methods=methods, out=tmp_path / "run")
    models = [
        load_file(run.path / "methods" / name / "seed-0" / "model.safetensors")["model"]
        for name in methods
    ]
    torch.testing.assert_close(*models)


def test_nufed_list_shows_its_settings(folder, nufed):
    said = nufed("list", "mine:Mine", cwd=folder)
    assert said.returncode == 0 and "μ, weight of the proximal term" in said.stdout
    assert "uses the global model" in said.stdout and "personal" in said.stdout


def test_the_pages_of_algorithms_are_made_from_them():
    script = runpy.run_path(str(ROOT / "docs/describe_algorithms.py"))
    run_it = "run docs/describe_algorithms.py"
    assert PAGE.endswith(script["HEADING"] + script["tables"]()), run_it
    written = {page.stem: page.read_text("utf-8") for page in script["PAGES"].glob("*.md")}
    assert written == script["pages"](), run_it
    assert (ROOT / "README.md").read_text("utf-8") == script["readme"](), run_it


SMALL = {
    "rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 2,
    "workers": 1,
    "data": {"agents": 4, "samples_per_agent": 24, "test": 0.25},
    "model": {"args": {"hidden": [4]}},
    "methods": {"gmeta": {"batch_size": 6}, "mine": {"eval_steps": [1]}},
}


class Plain(Algorithm):
    """An algorithm without a setting."""

    batch_size = 6
    adapt_lr = 0.1

    def agent_update(self, context, received, state):
        (batch,) = context.batches.draw("outer", 6)
        w = received["model"] - 0.1 * context.objective.grad(received["model"], batch)
        return AgentResult({"model": w}, {}, Cost(1))

    def server_update(self, context, server, updates):
        return dict(updates[0].vectors)


def test_objects_get_placeholders_and_must_be_passed_again(tmp_path):
    own = {"mine": Ditto(weight=0.5, batch_size=6), "plain": Plain()}
    library.run(SMALL, methods=own, out=tmp_path / "whole")
    path = tmp_path / "run"
    with pytest.raises(Killed):
        library.run(SMALL, methods=own, out=path, on_progress=killed_after(7))
    with pytest.raises(InputError, match=r"methods.mine.algorithm was given in Python"):
        library.resume(path)
    other = {**own, "mine": Ditto(weight=0.7, batch_size=6)}
    with pytest.raises(RunError, match=r"methods.mine.weight was 0.5 and is 0.7"):
        library.resume(path, methods=other)
    run = library.resume(path, methods=own)
    assert file_hashes(path) == file_hashes(tmp_path / "whole")
    assert list(run.methods) == ["gmeta", "mine", "plain"]
    assert run.config.steps_of("mine") == [1]
    assert run.config.algorithms()["mine"].weight == 0.5
    assert {row.name for row in run.rows()} >= {"gmeta", "plain"}


SHARED = {"adapt_lr": 0.3, "aggregation": "trimmed", "trim": 0.25, "weight": 0.5}


def test_shared_settings_reach_objects_that_were_not_made_with_them(tmp_path):
    config = SMALL | {"method": SHARED}
    own = {"mine": Ditto(batch_size=6, weight=1.0), "rule": Ditto(0.7, aggregation=Mean())}
    checked = load_config(config | {"method": {**SHARED, "batch_size": 8}}, methods=own)
    mine, rule = (checked.algorithms(own)[name] for name in own)
    assert (mine.weight, mine.batch_size) == (1.0, 6)  # its own, also where that is the default
    assert (mine.adapt_lr, mine.aggregation) == (0.3, TrimmedMean(0.25))
    assert (rule.weight, rule.batch_size, rule.aggregation) == (0.7, 8, Mean())
    assert checked.algorithms()["mine"].adapt_lr == 0.3  # recorded
    own = {"mine": Ditto(batch_size=6)}
    path = tmp_path / "run"
    with pytest.raises(Killed):
        library.run(config, methods=own, out=path, on_progress=killed_after(5))
    run = library.resume(path, methods=own)
    assert run.config.algorithms()["mine"].weight == 0.5
    with pytest.raises(InputError, match=r"unknown key 'method.adpt_lr'.*did you mean"):
        load_config({"method": {"adpt_lr": 1}}, methods=own)


def test_what_is_recorded_of_an_object_is_kept_where_defaults_are_shared():
    """A run from before shared settings reached objects resumes as it was."""
    own = {"mine": Ditto(batch_size=6)}
    recorded = load_config(SMALL, methods=own)
    method = recorded.method.model_copy(update={"adapt_lr": 0.9})
    old = recorded.model_copy(update={"method": method})
    assert Given(methods=own).with_placeholders(old) == old
    assert old.algorithms(own)["mine"].adapt_lr == Ditto().adapt_lr != 0.9
    # [method] then held the defaults of gmeta, where objects were the only methods
    alone = {"method": load_config({}).method, "methods": {"mine": recorded.methods["mine"]}}
    old = recorded.model_copy(update=alone)
    assert old.algorithms(own) == {"mine": own["mine"]}


def test_objects_alone_leave_no_other_method(tmp_path):
    config = {key: SMALL[key] for key in SMALL if key != "methods"}
    run = library.run(config, methods={"mine": GMeta(batch_size=6)}, out=tmp_path / "run")
    assert list(run.methods) == ["mine"] and load_run(tmp_path / "run").rows()


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ({"mine": GMeta}, "it must be an object of a subclass of nufed.algorithms.Algorithm"),
        ({"../up": GMeta()}, "a name must be made of letters"),
        ({"local": GMeta()}, "local is the name of a null baseline"),
    ],
)
def test_other_objects_and_names_are_refused(tmp_path, methods, sentence):
    with pytest.raises(InputError, match=sentence):
        library.run(SMALL, methods=methods, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_placeholder_is_not_an_algorithm(tmp_path):
    config = load_config(SMALL | {"methods": {"mine": {"algorithm": "given in Python"}}})
    with pytest.raises(InputError, match="was given in Python"):
        library.run(config.model_dump(exclude_none=True), out=tmp_path / "run")
