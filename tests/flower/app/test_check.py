"""`nufed federate check`: what would fail in a run fails here, without a server."""

import re
import sys

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flower.app.in_memory import MemoryGrid
from flower.ops.small_app import write_app
from nufed.flower.app.check import check_site, load_app
from nufed.flower.app.payload import size_of
from nufed.flower.app.privacy import Privacy, planned
from nufed.flower.app.registry import SIGNATURE
from nufed.flower.ops.keys import make_site_key

LOAD = """
import numpy as np


def load(site):
    with np.load(site["data"]) as table:
        return table["inputs"].astype("float32"), table["targets"]
"""


@pytest.fixture
def app(tmp_path, monkeypatch):
    """An app, and a function that writes the data of a site."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("app", "my_data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield write_app(tmp_path / "app", 2, rounds=2, data=LOAD)
    for name in ("app", "my_data"):
        sys.modules.pop(name, None)


def save(folder, inputs=5, samples=40, names=("inputs", "targets")):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(samples, inputs)), rng.integers(0, 2, samples)
    np.savez(folder / "site0.npz", **dict(zip(names, arrays, strict=True)))


def test_it_shows_samples_classes_a_step_messages_and_memory(nufed, tmp_path, app):
    save(tmp_path)
    shown = nufed("federate", "check", "app", "--data", "site0.npz", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "small: gmeta, 2 rounds, 2 sites, 2 per round; model of 57 parameters" in shown.stdout
    assert "input: 40 samples of shape [5]" in shown.stdout
    assert "parts: 30 training, 0 validation, 10 test" in shown.stdout
    counts = re.search(r"classes: training samples: a (\d+), b (\d+), c 0\n", shown.stdout)
    assert sum(map(int, counts.groups())) == 30
    assert "note: classes: no training sample of c" in shown.stdout
    before, after = re.search(
        r"training loss ([\d.]+) before, ([\d.]+) after", shown.stdout
    ).groups()
    assert 0 < float(after) < float(before)
    assert re.search(r"memory: peak of this check \d+ MiB", shown.stdout)
    assert shown.stdout.endswith("ok: this site could take part\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "site0.npz"]
    # the sizes are those of a run's messages
    sizes = {}

    def weigh(agent, message, reply):
        if message.metadata.message_type == "train":
            sizes[agent] = size_of(message.content), size_of(reply.content)
        return reply

    federation = load_app(app)
    grid = MemoryGrid(federation.site, (), tmp_path / "sites", weigh)
    for number in range(2):
        grid.add(number, data=str(tmp_path / "site0.npz"))
    federation.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))
    down, up = re.search(r"messages: (\d+) bytes to the site and (\d+) back", shown.stdout).groups()
    assert sizes[0] == (int(down), int(up))


def test_every_method_is_tried(tmp_path, app):
    save(tmp_path)
    text = (app / "federation.toml").read_text().replace('curvature = "first_order"\n', "")
    (app / "federation.toml").write_text(text + "[methods.gmeta]\n[methods.scaffold]\n")
    found = {each.name: each.text for each in check_site(app, tmp_path / "site0.npz")}
    assert "small: gmeta, scaffold, 2 rounds each, 2 sites" in found["configuration"]
    assert {"gmeta, one step", "scaffold, one step"} <= found.keys()
    one, other = (
        int(re.search("and ([0-9,]+) back", found[f"{method}, messages"])[1].replace(",", ""))
        for method in ("gmeta", "scaffold")
    )
    assert one < other  # which sends two vectors


@pytest.mark.usefixtures("no_report")
def test_with_secure_aggregation_it_shows_the_size_of_a_masked_update(tmp_path, app):
    save(tmp_path)
    lines = [make_site_key(tmp_path / f"{n}").read_text().strip() for n in range(3)]
    text = (app / "federation.toml").read_text().replace("agents = 2", "agents = 3")
    secure = f"secure_aggregation = true\nsite_keys = {lines}\n"
    (app / "federation.toml").write_text(text + secure)
    sizes = {}

    def weigh(agent, message, reply):
        unsigned = {name: each for name, each in reply.content.items() if name != SIGNATURE}
        sizes[message.metadata.message_type] = size_of(RecordDict(unsigned))
        return reply

    federation, data = load_app(app), tmp_path / "site0.npz"
    grid = MemoryGrid(federation.site, (), tmp_path / "sites", weigh)
    for number in range(3):
        grid.add(number, data=str(data), key=str(tmp_path / f"{number}"))
    federation.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))
    (shown,) = [found.text for found in check_site(app, data) if found.name == "messages"]
    assert shown.endswith("training, beside the keys and shares of secure aggregation")
    assert f"and {sizes['train.masked']:,} back" in shown


@pytest.mark.parametrize("command", ["check", "run"])
def test_epsilon_is_predicted_with_a_sentence_that_says_what_it_means(
    command, nufed, tmp_path, app
):
    save(tmp_path)
    text = (app / "federation.toml").read_text() + "[privacy]\nclip = 0.5\nnoise = 2.0\n"
    (app / "federation.toml").write_text(text)
    options = ("--data", "site0.npz") if command == "check" else ("--dry",)
    shown = nufed("federate", command, "app", *options, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    spent = planned(Privacy(0.5, 2.0), agents=2, cohort=2, rounds=2)
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("privacy: ")]
    assert f"epsilon will be {spent.released:.3g} for whoever sees the released models" in line
    assert f"{spent.server:.3g} against the server, if all sites reply: with any one" in line
    assert "more than e^epsilon times as likely, except with probability 1e-05" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "site0.npz"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": 6}, "this site's inputs have shape (6,): federation.input_shape is [5]"),
        ({"samples": 1}, "1 samples, too few for a training part"),
        ({"samples": 7}, "training samples and batch_size is 6"),
        ({"names": ("x", "targets")}, "the data of site 0 can't be loaded (KeyError: 'inputs"),
    ],
)
def test_data_that_does_not_match_is_refused(nufed, tmp_path, app, change, words):
    save(tmp_path, **change)
    shown = nufed("federate", "check", "app", "--data", "site0.npz", cwd=tmp_path)
    assert shown.returncode == 2 and words in shown.stderr
    assert shown.stderr.startswith("nufed: error: ") and shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "options", "words"),
    [
        ("meta_lr = 0.3", "meta_lr = -1", (), "meta_lr"),
        ("meta_lr = 0.3", "meta_lr = 1e30", (), "it diverges: lower meta_lr"),
        ("input_shape = [5]", "", (), "federation.input_shape"),
        ("", "", ("--number", 2), "must be the site's own number, 0 … 1"),
        ("", "", ("--data", "none"), "there is no such file or folder"),
    ],
)
def test_a_wrong_configuration_is_refused(nufed, tmp_path, app, old, new, options, words):
    save(tmp_path)
    text = (app / "federation.toml").read_text()
    (app / "federation.toml").write_text(text.replace(old, new) if old else text)
    shown = nufed("federate", "check", "app", "--data", "site0.npz", *options, cwd=tmp_path)
    assert shown.returncode == 2 and words in shown.stderr
    assert "ok:" not in shown.stdout
