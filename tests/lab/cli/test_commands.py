"""The command line as a user sees it."""

import json
import os
import re
import shlex
import signal
import subprocess

import pytest

from lab.analysis.test_bounds import NUMBERS
from nufed.algorithms import ALGORITHMS
from nufed.algorithms.aggregation import AGGREGATIONS
from nufed.data import PARTITIONS, SHIFTS
from nufed.lab.config import presets
from nufed.lab.config.load import known_fields
from nufed.lab.files import read_sealed
from nufed.lab.readers.sources import SOURCES
from nufed.lab.report.charts import counts_chart
from nufed.lab.report.figures import save_chart
from nufed.meta.curvature import CURVATURES
from nufed.models import MODELS
from nufed.simulation import ENGINES
from nufed.simulation.faults import ATTACKS
from processes import NUFED, wait_for

QUICK = ["rounds=2", "eval_every=1", "seeds=[0]", "data.agents=6", "data.unseen_agents=1"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A quick run in its own process, and its working directory."""
    cwd = tmp_path_factory.mktemp("work")
    command = [*NUFED, "run", "quickstart", *QUICK]
    return cwd, subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_run_prints_a_table_and_ends_with_the_path_of_its_report(done):
    cwd, result = done
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in (
        "fedavg",
        "per-fedavg",
        "gmeta-fo",
        "gmeta-hf",
        "gmeta-exact",
        "majority",
        "local",
    ):
        assert any(line.startswith(name + " ") for line in lines), name
    assert lines[-1] == "report: runs/quickstart-001/report.html"
    assert (cwd / "runs/quickstart-001/report.html").exists()
    # progress goes to stderr, as plain lines since it is not a terminal
    assert "seed 0  gmeta-hf  round 2/2" in result.stderr and "left" in result.stderr


def test_a_second_run_gets_a_directory_of_its_own_and_json_is_json(done, nufed):
    cwd, _ = done
    result = nufed("run", "quickstart", *QUICK, "--json", cwd=cwd)
    printed = json.loads(result.stdout)
    assert printed["directory"] == "runs/quickstart-002"
    assert {row["name"] for row in printed["rows"]} >= {"gmeta-exact", "majority"}
    first = json.loads((cwd / "runs/quickstart-001/results.json").read_text())
    assert printed["rows"] == first["rows"]


@pytest.mark.usefixtures("figures")
def test_report_rebuilds_and_compares(done, nufed):
    cwd, _ = done
    page = cwd / "runs/quickstart-001/report.html"
    before = page.read_text()
    page.unlink()
    assert nufed("report", "runs/quickstart-001", cwd=cwd).returncode == 0
    assert page.read_text() == before
    other = ["data.unseen_agents=0", "method.adapt_steps=2", "seeds=[0,1]"]
    other += ["--no-figures", "--out", "other/quickstart-001"]
    nufed("run", "quickstart", *QUICK, *other, cwd=cwd)
    runs = ["runs/quickstart-001", "other/quickstart-001"]
    for order in (runs, runs[::-1]):  # other steps, seeds and agents, and the same name
        result = nufed("report", *order, "--out", "both", "--no-figures", cwd=cwd)
        assert result.returncode == 0, result.stderr
        text = (cwd / "both/report.html").read_text()
        assert "1 quickstart-001: gmeta-hf" in text and "2 quickstart-001: gmeta-hf" in text
        assert "Agents unseen in training" in text
    assert nufed("report", *runs, cwd=cwd).returncode == 2


def test_the_report_is_self_contained(done):
    cwd, _ = done
    text = (cwd / "runs/quickstart-001/report.html").read_text()
    body = text[text.rindex("<body>") :]
    assert "http" not in body.replace(
        "https://vega.github.io/schema", ""
    )  # an identifier, not fetched
    assert "<link" not in text and 'src="' not in body
    for word in ("adapt_steps (ν)", "meta_lr (β)", "majority", "gradients", "MB up", "seconds"):
        assert word in body


def test_list_names_everything_that_a_configuration_may_name(tmp_path, nufed):
    listed = json.loads(nufed("list", "--json", cwd=tmp_path).stdout)
    sections = {
        "presets": presets(),
        "datasets": SOURCES,
        "partitions": PARTITIONS,
        "shifts": SHIFTS,
        "models": MODELS,
        "algorithms": ALGORITHMS,
        "attacks": ATTACKS,
        "engines": ENGINES,
    }
    for section, known in sections.items():
        assert list(listed[section]) == list(known)
        assert all(len(line) > 5 for line in listed[section].values()), section
    keys = listed["configuration keys"]
    fields = [key for key, _ in known_fields()]
    tables = {key for key in fields for other in fields if other.startswith(f"{key}.")}
    assert set(fields) - tables - {"methods"} <= set(keys)
    choices = {"aggregation": AGGREGATIONS, "curvature": CURVATURES, "attack": ATTACKS}
    for name, known in {**choices, "engine": ENGINES, "partition": PARTITIONS}.items():
        (line,) = [line for key, line in keys.items() if key.rpartition(".")[2] == name]
        assert set(known) <= set(re.findall(r"[\w-]+", line)), line


def test_list_prints_every_name_under_its_title(tmp_path, nufed):
    listed = json.loads(nufed("list", "--json", cwd=tmp_path).stdout)
    lines = nufed("list", cwd=tmp_path).stdout.splitlines()
    printed, title = {}, None
    for line in lines:
        if not line.startswith(" "):
            title = line.strip()
            printed[title] = []
        elif name := re.match(r"  (\S+)", line):  # deeper indentation continues a line
            printed[title].append(name[1])
    assert printed == {title: list(entries) for title, entries in listed.items()}


def test_data_show_draws_the_split(done, nufed):
    cwd, _ = done
    result = nufed("data", "show", "quickstart", "--out", "split.svg", cwd=cwd)
    assert result.returncode == 0 and "30 agents, 1500 samples" in result.stdout
    assert "█" in result.stdout and (cwd / "split.svg").read_text().startswith("<svg")
    shown = json.loads(nufed("data", "show", "--json", cwd=cwd).stdout)
    split = read_sealed(cwd / "runs/quickstart-001/splits/seed-0.json").about
    assert shown["classes"] == split["classes"] and len(shown["agents"]) == 30


def test_a_directory_may_be_called_like_markup(tmp_path, nufed):
    quick = ["rounds=1", "seeds=[0]", "data.unseen_agents=0", "workers=1"]
    quick += ["data.agents=4", "methods={constructor={algorithm='gmeta'}}"]
    for call in (("run", "quickstart", *quick, "--out", "r-[/x]"), ("run", "--resume", "r-[/x]")):
        said = nufed(*call, cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        assert "run directory: r-[/x]\n" in said.stderr
        assert said.stdout.splitlines()[-1] == "report: r-[/x]/report.html"


@pytest.mark.parametrize("name", ["constructor", "toString", "a\u2028b", "a\x00b"])
def test_classes_and_agents_of_any_name_are_drawn(tmp_path, name):
    """Some names used to crash the drawing process."""
    save_chart(counts_chart([name, "b"], [name, "b"], [[1, 2], [3, 4]]), tmp_path / "c.svg")
    svg = (tmp_path / "c.svg").read_text("utf-8")
    assert svg.count('aria-roledescription="rect mark"') == 4


def test_data_list_says_what_is_here_and_how_to_get_the_rest(tmp_path, nufed, monkeypatch):
    monkeypatch.setenv("NUFED_DATA", str(tmp_path / "mine"))
    (tmp_path / "mine/cifar-100-binary").mkdir(parents=True)
    (tmp_path / "mine/cifar-100-binary/train.bin").write_bytes(b"")
    text = nufed("data", "list", cwd=tmp_path).stdout
    assert f"{tmp_path / 'mine'} (from NUFED_DATA)" in text
    assert "get it with: nufed data get cifar10\n" in text
    assert "Lake, Salakhutdinov and Tenenbaum 2015; licence: MIT\n" in text
    assert "nufed data get mnist-writers --from mnist_by_writer.npz (docs/data.md" in text
    listed = json.loads(nufed("data", "list", "--json", cwd=tmp_path).stdout)
    assert listed["directory"] == str(tmp_path / "mine") and listed["from"] == "NUFED_DATA"
    states = {name: entry["state"] for name, entry in listed["data"].items()}
    cited = {
        name for name, entry in listed["data"].items() if entry["citation"] and entry["licence"]
    }
    assert cited == states.keys() - {"sinusoid", "sensors"}  # which are generated
    assert states == {
        "digits": "present",
        "cifar10": "missing",
        "cifar100": "present",
        "fashion-mnist": "missing",
        "mnist-writers": "missing",
        "digit-tasks": "missing",
        "omniglot14": "present",
        "omniglot": "missing",
        "sinusoid": "present",
        "sensors": "present",
        "heart": "present",
        "shakespeare": "missing",
        "intents": "missing",
    }
    assert listed["data"]["cifar100"]["where"] == str(tmp_path / "mine/cifar-100-binary")
    (tmp_path / "mine/cifar-10-batches-bin").mkdir()
    (tmp_path / "mine/cifar-10-batches-bin/data_batch_1.bin").write_bytes(b"")
    assert re.search(r"cifar10 +incomplete", nufed("data", "list", cwd=tmp_path).stdout)
    monkeypatch.delenv("NUFED_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "set NUFED_DATA to use another" in nufed("data", "list", cwd=tmp_path).stdout


def test_a_shipped_data_set_needs_no_download(tmp_path, nufed):
    result = nufed("data", "get", "digits", cwd=tmp_path)
    assert result.returncode == 0 and "shipped with nufed" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nosuch"], "'nosuch' is neither a preset"),
        (["run", "quickstart", "method.adapt_stepz=3"], "did you mean 'method.adapt_steps'?"),
        (["run", "quickstart", "method.adapt_steps=-1"], "adapt_steps = -1: must be a whole"),
        (["run", "quickstart", "adapt_steps=-1"], "did you mean 'method.adapt_steps'?"),
        (["run", "quickstart", "participation=0"], "participation = 0: must be a number above 0"),
        (["run", "quickstart", "--out", "/proc/nufed"], "/proc/nufed can't be created"),
        (["run", "quickstart", "data.agents=1000"], "need 50000 samples and the data has 1797"),
        (["report", "nowhere"], "nowhere can't be read as a run directory"),
        (["data", "show", "quickstart", "--out", "split.txt"], "must end in .svg, .png or .html"),
        (["data", "get", "cifar"], "unknown data set 'cifar'; did you mean 'cifar10'?"),
        (
            ["data", "get", "zzz"],
            "there are digits, cifar10, cifar100, fashion-mnist, mnist-writers",
        ),
        (["data", "get", "mnist-writers"], "docs/data.md says how to make mnist_by_writer.npz"),
        (["data", "get", "cifar10", "--url", "file:///x"], "give a file to --from"),
        (["data", "get", "cifar10", "--from", "nowhere"], "nowhere can't be read"),
    ],
)
def test_bad_input_is_one_sentence_and_a_non_zero_exit(
    arguments, sentence, tmp_path, nufed, monkeypatch, tmp_path_factory
):
    monkeypatch.setenv("NUFED_DATA", str(tmp_path_factory.mktemp("data")))
    result = nufed(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.startswith("nufed: error: ") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir()) and not result.stdout


def test_a_method_that_fails_is_named_and_the_exit_is_non_zero(tmp_path, nufed):
    diverging = ["model.args={hidden=[8]}", "methods.gmeta-fo.meta_lr=1e30"]  # ReLU, no saturation
    result = nufed("run", "quickstart", *QUICK, *diverging, cwd=tmp_path)
    assert result.returncode == 1
    assert "could not be trained" in result.stdout and "gmeta-fo, seed 0" in result.stdout
    assert "gmeta-exact" in result.stdout and "report: " in result.stdout


def test_bounds_of_a_file_of_numbers(tmp_path, nufed):
    (tmp_path / "n.toml").write_text(NUMBERS.format(meta_lr=0.001))
    result = nufed("bounds", "n.toml", cwd=tmp_path)
    assert result.returncode == 0 and "largest admissible β" in result.stdout
    printed = json.loads(nufed("bounds", "n.toml", "--json", cwd=tmp_path).stdout)
    assert printed["methods"][0]["promised"]["admissible"] is True
    bad = nufed("bounds", "nowhere.toml", cwd=tmp_path)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1


def test_interrupting_says_where_and_how_to_resume(tmp_path, nufed):
    small = ["seeds=[0]", "rounds=100", "eval_every=100", "data.agents=6", "data.unseen_agents=0"]
    small += ["methods={gmeta={}}", "baselines=[]", "workers=1", "--out", "my runs/first"]
    command = [*NUFED, "run", "quickstart", *small]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "my runs/first/methods").exists())
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130 and "Traceback" not in stderr
    (said,) = [line for line in stderr.splitlines() if line.startswith("nufed: stopped; ")]
    resume = shlex.split("nufed run " + said.partition("nufed run ")[2])
    assert resume == ["nufed", "run", "--resume", "my runs/first"]
    done = nufed(*resume[1:], "--no-figures", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "report: my runs/first/report.html"


def test_version(tmp_path, nufed):
    assert nufed("--version", cwd=tmp_path).stdout.startswith("nufed 0.")
