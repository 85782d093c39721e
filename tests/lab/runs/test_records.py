"""Files of a run that violate their schema are named, or skipped if nothing depends on them.

tests/campaigns/test_mutated_runs.py changes every file in many ways.
"""

import json
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

import nufed
from campaigns.test_damage import damaged
from lab.experiment.test_resume import Killed
from lab.runs.test_provenance import CONFIG
from nufed.errors import RunError
from nufed.lab.files import read_sealed, sha256, write_sealed
from nufed.lab.report.charts import rounds_chart
from nufed.lab.runs import load_run
from nufed.lab.runs.federation_records import FederationRecord
from nufed.lab.runs.json_files import checked
from support import without_report

BOUNDS = {
    "constants": {"gradient": {"value": 1.5, "samples": 4, "spread": None}, "smoothness": None},
    "smooth": False,
    "seed": 0,
    "uniform": True,
    "by_steps_of": "fo",
    "by_steps": [],
    "methods": [
        {
            "method": "fo",
            "steps": 1,
            "measured": {"bias": 0.1, "error": 0.1, "dissimilarity": 0.1},
        }
    ],
    "stationarity": [],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with without_report():
        return nufed.run(CONFIG, out=tmp_path_factory.mktemp("finished") / "run").path


@pytest.fixture
def run(tmp_path, finished):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.usefixtures("no_report")
def test_a_sample_of_seen_and_unseen_agents_is_read(tmp_path):
    """Their lines are sorted within each group, not over both."""
    data = CONFIG["data"] | {"unseen_agents": 3}
    run = nufed.run(CONFIG | {"rounds": 1, "eval_agents": 2, "data": data}, out=tmp_path / "run")
    agents = [scores.agent for scores in run.methods["fo"][0].scores]
    assert len(agents) == 4 and agents != sorted(agents)


def test_damaged_lines_of_timing_are_skipped(run):
    path, rng = run / "timing.jsonl", random.Random(0)
    good = path.read_bytes()
    whole = load_run(run).timing
    for _ in range(100):
        path.write_bytes(damaged(good, rng))
        found = load_run(run)
        assert len(found.timing) <= len(whole) and found.costs("fo")["seconds"] >= 0
    for line in (b"[" * 100_000, b"\xff", b"null", b'{"method": "fo"}', b'{"seconds": "x"}'):
        path.write_bytes(line + b"\n" + good)
        assert load_run(run).timing == whole


def test_damaged_bounds_are_named(run):
    path, rng = run / "bounds.json", random.Random(0)
    write_sealed(path, BOUNDS)
    good, loaded = path.read_bytes(), load_run(run)
    assert loaded.bounds().constants["smoothness"] is None
    for content in [b"[" * 100_000, *(damaged(good, rng) for _ in range(200))]:
        path.write_bytes(content)
        with pytest.raises(RunError, match=r"bounds\.json is damaged.*run `nufed bounds` again"):
            loaded.bounds()


@pytest.mark.parametrize(
    "content",
    [
        b"not safetensors",
        save({"other": torch.zeros(3)}),
        save({"model": torch.zeros(3)}),
        save({"model": torch.zeros(2, 2)}),
        save({"model": torch.zeros(3, dtype=torch.int64)}),
    ],
)
def test_a_model_of_another_form_makes_no_bundle(run, content):
    folder = run / "methods" / "fo" / "seed-0"
    (folder / "model.safetensors").write_bytes(content)
    done = read_sealed(folder / "done.json").about
    done["files"]["model.safetensors"] = sha256(content)
    write_sealed(folder / "done.json", done)
    with pytest.raises(RunError, match=rf"{folder / 'model.safetensors'} (is invalid|can't be)"):
        nufed.make_bundle(load_run(run), "fo")


@pytest.mark.parametrize("change", ["renamed", "longer", "nothing that can be read"])
def test_a_checkpoint_with_other_vectors_is_named(run, change):
    folder = run / "methods" / "fo" / "seed-0"
    (folder / "done.json").unlink()
    for path in folder.glob("checkpoint-*.safetensors"):
        found = read_sealed(path)
        model = found.tensors["model"]
        if change == "renamed":
            write_sealed(path, found.about, {"mode": model})
        elif change == "longer":
            write_sealed(path, found.about, {"model": torch.cat([model, model])})
        else:
            path.write_bytes(b"not safetensors")
    if change == "nothing that can be read":  # training starts again
        with pytest.warns(match="can't be used"), pytest.raises(Killed):
            nufed.resume(run, on_progress=killed)
    else:
        with pytest.raises(RunError, match=r"checkpoint-000003.safetensors is invalid"):
            nufed.resume(run)


def test_a_group_that_no_round_has_scores_of_has_an_empty_chart(run):
    """As in a federation whose held-out sites never replied."""
    loaded = load_run(run)
    splits = {s: split.model_copy(update={"unseen": [1]}) for s, split in loaded.splits.items()}
    other = replace(loaded, splits=splits)
    for group, empty in (("seen", False), ("unseen", True)):
        points = re.findall(r'"low": [\d.]', rounds_chart(other, group).to_json())
        assert (not points) == empty


@pytest.mark.parametrize(("key", "value"), [("name", "\ud800"), ("train", 10**400)])
def test_text_that_no_page_can_encode_is_refused(run, key, value):
    path = run / "splits" / "seed-0.json"
    split = read_sealed(path).about
    split["agents"][0][key] = value
    write_sealed(path, split)
    with pytest.raises(RunError, match=r"seed-0\.json is invalid"):
        load_run(run)


def killed(event):
    if event.round:
        raise Killed


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"run": 3},
        {"run": "x" * 32},
        {"run": "0" * 32, "cohort_seed": -1},
        {"run": "0" * 32, "cohort_seed": "1"},
        {"run": "0" * 32, "extra": 1},
    ],
)
def test_a_federation_of_another_form_is_refused(tmp_path, content):
    path = tmp_path / "federation.json"
    with pytest.raises(RunError, match=r"federation\.json is invalid"):
        checked(FederationRecord, json.loads(json.dumps(content)), path)
    checked(FederationRecord, {"run": "0" * 32, "cohort_seed": 2**127}, path)
