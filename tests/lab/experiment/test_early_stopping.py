"""Early stopping and the best model: decided on validation samples, resumable to the same bits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nufed
from nufed import InputError
from nufed.lab.bundle.from_run import final_state
from nufed.lab.config import load_config
from nufed.lab.config.split_file import load_split
from nufed.lab.report.headline import headline
from nufed.lab.runs.part_files import ValidationScores
from support import Killed, file_hashes, same, without_report

pytestmark = pytest.mark.usefixtures("no_report")
METHODS = {"fedavg": {}, "ditto": {}}
CONFIG = {
    "rounds": 16,
    "participation": 0.5,
    "eval_every": 2,
    "checkpoint_every": 3,
    "save_every": 1,
    "baselines": [],
    "workers": 1,
    "stop_when": 2,
    "keep": "best",
    "data": {"agents": 6, "partition": "iid", "samples_per_agent": 20, "validation": 0.3},
    "method": {"adapt_lr": 0.3, "meta_lr": 0.5, "batch_size": 5},
    "methods": METHODS,
}


def noise(seed=4):
    """Labels that can't be learned, so that the validation score soon stops rising."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(120, 5)).astype("float32"), rng.integers(0, 3, 120)


def linear():
    return torch.nn.Linear(5, 3)


def train(path, config=CONFIG, data=None, **arguments):
    data = noise() if data is None else data
    return nufed.run(config, data=data, model=linear, out=path, figures=False, **arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with without_report():
        return train(tmp_path_factory.mktemp("whole") / "run")


def scores_of(run, method):
    metrics = run.methods[method][0].metrics
    return {m.round: m.validation_score for m in metrics if m.validation_score is not None}


def test_it_stops_after_k_evaluations_without_a_better_score(whole):
    for method in METHODS:
        scores = scores_of(whole, method)
        best = max(scores, key=scores.get)  # the first of equal ones
        last = max(scores)
        assert last == best + 4 < 16 and len(whole.methods[method][0].metrics) == last + 1
        assert whole.methods[method][0].round == best > 0
        done = json.loads((whole.path / f"methods/{method}/seed-0/done.json").read_text())
        assert (done["about"]["trained"], done["about"]["shown"]) == (last, best)


def test_results_bundles_and_personal_models_are_of_the_best_round(whole):
    for method in METHODS:
        folder, trained = whole.path / "methods" / method / "seed-0", whole.methods[method][0]
        best, last = trained.round, trained.metrics[-1].round
        steps = whole.config.steps_of(method)[0]
        saved = [load_file(folder / f"model-round-{k:06d}.safetensors") for k in (best, last)]
        assert same(load_file(folder / "model.safetensors"), saved[0])
        assert same(load_file(folder / "model-last.safetensors"), saved[1])
        shown = np.mean([s.score[steps] for s in trained.scores])
        assert shown == pytest.approx(trained.metrics[best].evaluation["seen"].score[steps])
        assert f"trained for {last} of 16 rounds; results show the model of round {best}" in str(
            whole.to_json()["notes"]
        )
    assert "best round on validation samples" in headline(whole)
    assert "training stopped early" in headline(whole)
    trained = whole.methods["ditto"][0]
    (own,) = [s for s in trained.final if s.agent == 2]
    made = nufed.make_personal(whole, "ditto", 2, model=linear, data=noise())
    steps = whole.config.steps_of("ditto")[0]
    assert made.about.measured["groups"]["seen"]["personal"] == own.score[steps]
    written = load_file(whole.path / "methods/ditto/seed-0/personal/2.safetensors")
    flat = torch.cat([p.detach().flatten() for p in made.module.parameters()])
    assert torch.equal(flat, written["model"])
    assert nufed.load_run(whole.path).methods["ditto"][0].round == trained.round


def killed_after(events):
    def listener(event):
        nonlocal events
        events -= 1
        if events < 0:
            raise Killed

    return listener


@pytest.mark.parametrize("events", [3, 6, 12, 14])
def test_a_killed_run_stops_in_the_same_round_with_the_same_bits(tmp_path, whole, events):
    with pytest.raises(Killed):
        train(tmp_path / "run", on_progress=killed_after(events))
    given = {"data": noise(), "model": linear, "figures": False}
    nufed.resume(tmp_path / "run", **given)
    assert file_hashes(tmp_path / "run") == file_hashes(whole.path)


def test_neither_workers_nor_more_rounds_change_it(tmp_path, whole):
    parts = [f"methods/{method}/seed-0/{name}" for method in METHODS
             for name in ("model.safetensors", "metrics.jsonl", "agents.jsonl")]  # fmt: skip
    right = [(whole.path / name).read_bytes() for name in parts]
    two = train(tmp_path / "two", CONFIG | {"workers": 2})
    assert [(two.path / name).read_bytes() for name in parts] == right
    given = {"data": noise(), "model": linear, "figures": False}
    longer = nufed.resume(two.path, ["rounds=30"], **given)
    assert [(two.path / name).read_bytes() for name in parts] == right
    assert longer.methods["ditto"][0].round == whole.methods["ditto"][0].round


def test_test_samples_decide_nothing(tmp_path, whole):
    inputs, labels = noise()
    split = load_split(whole.path / "splits" / "seed-0.safetensors")
    tested = np.concatenate([split.test[agent] for agent in split.agents])
    inputs[tested], labels[tested] = -inputs[tested][::-1], (labels[tested] + 1) % 3
    data = CONFIG["data"] | {"split_file": str(whole.path / "splits/seed-{seed}.safetensors")}
    spoilt = train(tmp_path / "run", CONFIG | {"data": data}, (inputs, labels))
    for method in METHODS:
        assert scores_of(spoilt, method) == scores_of(whole, method)
        models = [r.path / f"methods/{method}/seed-0/model.safetensors" for r in (spoilt, whole)]
        assert same(*map(load_file, models))
        assert spoilt.methods[method][0].scores != whole.methods[method][0].scores


def test_each_key_works_alone(tmp_path, whole):
    last = train(tmp_path / "last", {k: v for k, v in CONFIG.items() if k != "keep"})
    best = train(tmp_path / "best", {k: v for k, v in CONFIG.items() if k != "stop_when"})
    for method in METHODS:
        trained = last.methods[method][0]
        assert trained.round == whole.methods[method][0].metrics[-1].round
        assert len(best.methods[method][0].metrics) == 17
        scores = scores_of(best, method)
        assert best.methods[method][0].round == max(scores, key=scores.get)
    folder = tmp_path / "last/methods/ditto/seed-0"
    assert not (folder / "model-last.safetensors").exists()
    assert final_state(folder, {}, 0, 2) is None


def test_without_a_validation_part_it_is_refused(tmp_path):
    for keys, said in (({"stop_when": 2}, "stop_when = 2"), ({"keep": "best"}, 'keep = "best"')):
        config = {k: v for k, v in CONFIG.items() if k not in ("stop_when", "keep")} | keys
        config["data"] = CONFIG["data"] | {"validation": 0.0}
        with pytest.raises(InputError, match=f"{said}: agents seen in training have no validation"):
            train(tmp_path / "run", config)


def test_runs_without_the_keys_are_unchanged():
    off = load_config({})
    assert "stop_when" not in off.to_toml() and "keep" not in off.to_toml()
    on = [load_config({"stop_when": 1}), load_config({"keep": "best"})]
    assert len({config.fingerprint for config in (off, *on)}) == 3


@pytest.mark.parametrize(
    ("scores", "best", "stops"),
    [
        ([0.5, 0.5, 0.5], 0, True),  # equal is not better
        ([0.5, 0.4, 0.6], 2, False),
        ([float("nan"), 0.1, float("nan"), float("nan")], 1, True),
        ([float("nan")] * 3, 0, True),
    ],
)
def test_the_rule(scores, best, stops):
    history = ValidationScores(True, patience=2)
    for round, score in enumerate(scores):
        history.add(round, score)
        history.add(round, 1.0)  # the same round again: after a resume
    assert history.best() == best and history.stops_at(len(scores) - 1) == stops
    assert not history.stops_at(len(scores))
