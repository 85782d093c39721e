"""The site: every page builds without a warning, and what is generated or recorded is current."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import nufed
from nufed.algorithms import ALGORITHMS
from nufed.data import PARTITIONS, Federation, Samples, make_split
from nufed.lab.analysis.recommend import board_check
from nufed.lab.config import load_config
from nufed.objective import Objective
from nufed.simulation import DirectEngine, train

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?")


def test_every_page_builds_without_a_warning(tmp_path):
    """As `make docs`, but nothing is written: links, headings, tables, formulas, docstrings."""
    build = [sys.executable, "-m", "sphinx", "--quiet", "-W", "--keep-going", "-b", "dummy"]
    done = subprocess.run([*build, DOCS, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_pages_load_nothing_from_elsewhere():
    conf = runpy.run_path(str(DOCS / "conf.py"))
    assert conf["mathjax_path"] == "tex-svg.js"
    assert any(
        path.endswith("/tex-svg.js") and Path(path).exists() for path in conf["html_static_path"]
    )
    for file in (DOCS / "static").iterdir():
        assert "://" not in file.read_text("utf-8")


def test_the_reference_is_made_from_schema_commands_and_extras():
    script = runpy.run_path(str(DOCS / "describe_reference.py"))
    written = {page.stem: page.read_text("utf-8") for page in script["PAGES"].glob("*.md")}
    assert written == script["pages"](), "run docs/describe_reference.py"


def scripts():
    return sorted(path.stem for path in (ROOT / "examples/tutorials").glob("*.py"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "advise" else n for n in scripts()],
)
def test_a_tutorial_prints_what_its_page_says(name, tmp_path, monkeypatch):
    """Up to rounding: other processors give other last digits."""
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(DOCS / "render_tutorials.py"))
    page = (DOCS / f"tutorials/{name}.md").read_text("utf-8")
    now = script["rendered"](script["scripts"]()[name])
    assert NUMBER.sub("#", now) == NUMBER.sub("#", page), "run docs/render_tutorials.py"
    numbers = [[float(n.replace("−", "-")) for n in NUMBER.findall(text)] for text in (now, page)]
    np.testing.assert_allclose(*numbers, rtol=0.02, atol=0.3)


def test_the_page_on_advice_has_the_figure_that_nufed_ships_with():
    page = (DOCS / "tutorials/advise.md").read_text("utf-8")
    assert board_check().sentence in page, "run docs/render_tutorials.py advise"


def test_a_page_that_says_something_else_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(DOCS / "render_tutorials.py"))
    file = tmp_path / "two.py"
    file.write_text('"""Two\n\nOnes.\n"""\n\n# %%\n# Text.\nx = 1\nprint(x + x)\n')
    page = script["rendered"](file)
    assert page.endswith("Text.\n\n```python\nx = 1\nprint(x + x)\n```\n\n```text\n2\n```\n")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_configuration_on_a_methods_page_is_accepted(name):
    page = (DOCS / f"algorithms/{name}.md").read_text("utf-8")
    (snippet,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = load_config(tomllib.loads(snippet.replace("package.module:function", "fcnn")))
    assert list(config.algorithms()) == [name]
    assert isinstance(config.algorithms()[name], ALGORITHMS[name])


SYMBOLS = {  # of the costs on pages: settings, and what is 1 here
    "ν": "adapt_steps",
    "K": "inner_steps",
    "τ_v": "personal_steps",
    "τ_h": "head_steps",
    "k": "models",
    "τ": "local_steps",
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_cost_on_a_methods_page_is_what_a_round_counts(name):
    page = (DOCS / f"algorithms/{name}.md").read_text("utf-8")
    stated = re.search(r"^\| a round costs an agent \| (.*) \|$", page, re.MULTILINE)[1]
    stated = re.sub(r" in the first phase.*|, and those of W.*", "", stated)
    algorithm = replace(ALGORITHMS[name](), local_steps=3, batch_size=4)
    if hasattr(algorithm, "personal_steps"):
        algorithm = replace(algorithm, personal_steps=2)
    wanted = [0, 0]
    for term in stated.split(", "):
        formula, what = re.fullmatch(r"(.*) (gradients|Hessian-vector products)", term).groups()
        for symbol, setting in SYMBOLS.items():
            value = getattr(algorithm, setting, None)
            formula = re.sub(rf"(?<!\w){symbol}(?!\w)", str(value), formula)
        product = formula.replace("·", "*")
        assert re.fullmatch(r"[\d+*() ]+", product), product
        wanted[what != "gradients"] = eval(product)
    cost = cost_of(algorithm)
    assert [cost.gradients, cost.hvps] == wanted


def cost_of(algorithm):
    """The cost of one agent's first round on a tiny problem."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    objective = Objective(module, nn.functional.cross_entropy)
    if type(algorithm).__name__ == "ScaleFL":
        pytest.skip("needs a model with exits; its steps are those of the loop that all share")
    samples = Samples(torch.randn(20, 4), torch.arange(20) % 2, classes=("a", "b"))
    federation = Federation(samples, make_split([np.arange(20)], seed=0, validation=0.0, test=0.2))
    engine = DirectEngine(objective, federation, seed=0)
    *_, last = train(algorithm, engine, objective.initial(), rounds=1, participation=1.0)
    return last.cost


def test_every_partition_has_a_picture_that_shows_it():
    page = (DOCS / "partitions.md").read_text("utf-8")
    for name in PARTITIONS:
        assert f"## `{name}`" in page
        assert list((DOCS / "pictures").glob(f"partition-{name}*.svg"))
    counts = runpy.run_path(str(DOCS / "draw_partitions.py"))["counts"]
    shards = counts("shards", ["data.classes_per_agent=2", "data.samples_per_agent=100"])
    by_agent = [{row["class"] for row in shards if row["agent"] == a} for a in range(16)]
    assert all(len(classes) <= 2 for classes in by_agent)


def test_every_method_belongs_to_a_family_with_its_paper():
    script = runpy.run_path(str(DOCS / "describe_algorithms.py"))
    listed = [name for papers in script["FAMILIES"].values() for name in papers]
    assert sorted(listed) == sorted(ALGORITHMS)
    text = (DOCS / "algorithms/fedavg.md").read_text("utf-8")
    assert "mean" in text.split("## Definition")[1] and "Beyond the paper" not in text


def test_public_names_and_the_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", nufed.__version__)
    heading = rf"^## {re.escape(nufed.__version__)}( \(unreleased\))?$"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    cited = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {nufed.__version__}\n" in cited


def test_readme_shows_the_numbers_of_the_recorded_first_run():
    script = runpy.run_path(str(DOCS / "record_first_run.py"))
    recorded = json.loads(script["RECORD"].read_text("utf-8"))
    assert recorded["preset"] == script["digest_of_preset"](), "run docs/record_first_run.py"
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    gain, half = recorded["per_round"]
    assert f"ν = 3 (gMeta) gains {gain:.1f} ± {half:.1f} points over ν = 1" in text
    gain, half = recorded["per_gradient"]
    cost = f"It costs {recorded['work']:.3g} times the gradients: at equal gradients the difference"
    assert f"{cost} is {gain:.1f} ± {half:.1f} points." in text
    names = "gmeta", "per-fedavg", "centroid"
    meta, one, centroid = (f"{recorded['personal'][name]:.0f} %" for name in names)
    assert f"gMeta reaches {meta}, Per-FedAvg {one}, and the nearest class mean" in text
    assert f"which needs no training, {centroid}: whether meta-learning pays" in text


def test_numbers_that_stand_on_several_pages_agree_with_their_source():
    """Each pattern finds a number on a page; all numbers of one fact are that of its source."""
    facts = {
        # exact meta-gradients, ν = 3, against the PyTorch loop: the tables' own ratios
        "two workers": [
            ("docs/performance.md", r"^\| exact, ν = 3 \|.*\*\*([\d.]+) ×\*\* .*goal 8\)"),
            ("docs/performance.md", r"^\| above \|.*\| ([\d.]+) × \|$"),
        ],
        "one core": [
            ("docs/performance.md", r"^\| exact, ν = 3 \| 430 .*\*\*([\d.]+) ×\*\*"),
            ("docs/performance.md", r"^\| \[on one core\].*\| ([\d.]+) × \|$"),
        ],
        "distance of δ = 10⁻³ from exact": [
            ("docs/results.md", r"^\| δ = 1e-3 \| ([\d.]+) \|"),
            ("docs/paper.md", r"the model ends ([\d.]+) of the way"),
        ],
        "Per-FedAvg (HF) in the paper's protocol": [
            ("docs/results.md", r"^\| Per-FedAvg \(HF\), D = 40 \| 3 \| [\d.]+ % \| ([\d.]+)"),
            ("docs/results.md", r"per-fedavg-hf: D = 40, 3 steps against D = 120.*? \| ([\d.]+) %"),
        ],
        "CPU-seconds of a short run": [
            ("docs/performance.md", r"^\| `nufed run quickstart rounds=3`, five.*\| ([\d.]+) \|"),
            (
                "docs/performance.md",
                r"^\| `nufed run quickstart rounds=3` \|.*\| ([\d.]+) \| [\d.]+ \| ",
            ),
        ],
        "kills": [
            ("docs/reliability.md", r"with 2 \| (\d+) of 200 end with equal hashes"),
            ("README.md", r"`--resume`: (\d+) of 200 killed runs"),
        ],
        "FedAvg on CIFAR-10 in NIID-Bench's setting": [
            ("docs/external.md", r"nufed's FedAvg has ([\d.]+) % after 36 rounds"),
            ("docs/external.md", r"which does not augment, has ([\d.]+) %"),
        ],
        "ε of 50 sites, noise 2": [
            ("docs/privacy.md", r"^\| 50, 10, 100: released \| [\d.]+ \| ([\d.]+) \|"),
            ("docs/accounting.md", r"^\| stated, rounded up \| [\d.]+ \| ([\d.]+) \|"),
        ],
    }
    for fact, places in facts.items():
        found = []
        for page, pattern in places:
            (number,) = re.findall(pattern, (ROOT / page).read_text("utf-8"), re.MULTILINE)
            found.append(float(number))
        assert found == pytest.approx([found[0]] * len(found), rel=0.02), fact
    minutes = re.search(r"(\d+) minutes on two", (DOCS / "results.md").read_text("utf-8"))[1]
    assert round(int(minutes) / 60) == 9
    assert "about nine hours" in (ROOT / "Makefile").read_text("utf-8")
