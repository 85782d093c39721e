"""Methods with rounds of their own, to be compared at equal gradients."""

import json

import pytest
import torch
from safetensors.torch import load_file

import nufed
from nufed import GMeta, InputError
from nufed.lab.config import load_config
from nufed.lab.runs import load_run
from nufed.lab.runs.json_files import read_record
from nufed.lab.runs.tuning_record import SearchRecord
from support import Killed, file_hashes

CONFIG = {
    "rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 1,
    "participation": 0.5,
    "workers": 1,
    "baselines": ["untrained"],
    "data": {
        "source": "sensors",
        "args": {"agents": 6, "samples": 20, "inputs": 3},
        "validation": 0.25,
        "unseen_agents": 2,
    },
    "model": {"args": {"hidden": [4]}},
    "method": {"local_steps": 1, "batch_size": 5, "meta_lr": 0.05, "adapt_lr": 0.1},
    "methods": {
        "gmeta": {"adapt_steps": 3},
        "per-fedavg": {"rounds": 9},
        "fedl2p": {"rounds": 3},
    },
}
GRADIENTS = {"per-fedavg": 4, "gmeta": 10}  # of a local update; a product counts as two


def model(path, method):
    return load_file(path / f"methods/{method}/seed-0/model.safetensors")["model"]


def killed_after(events):
    def listener(event):
        nonlocal events
        events -= 1
        if events < 0:
            raise Killed

    return listener


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("own") / "run")


def test_each_method_is_trained_for_its_own_rounds(whole, tmp_path):
    rounds = {name: seeds[0].metrics[-1].round for name, seeds in whole.methods.items()}
    assert rounds == {"gmeta": 4, "per-fedavg": 9, "fedl2p": 3}
    evaluated = [m.round for m in whole.methods["per-fedavg"][0].metrics if m.evaluation]
    assert evaluated == [0, 2, 4, 6, 8, 9]
    work = {n: whole.costs(n)["gradients"] + 2 * whole.costs(n)["hvps"] for n in GRADIENTS}
    assert work == {"gmeta": 10 * 4 * 2, "per-fedavg": 4 * 9 * 2}  # two agents a round
    assert whole.shown_round == "last round (3 to 9)"
    assert whole.to_json()["rounds_of"] == {"per-fedavg": 9, "fedl2p": 3}
    assert set(whole.history().query("method == 'per-fedavg'")["round"]) == set(range(10))
    assert whole.config.algorithms()["fedl2p"].pretrain_rounds == 2  # two thirds of its own
    page = (whole.path / "report.html").read_text()
    assert "4 (per-fedavg 9, fedl2p 3)" in page and "by the gradients of training so far" in page
    alone = {**CONFIG, "rounds": 9, "methods": {"per-fedavg": {}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nufed.lab.report.run_page.build_report", lambda runs, out, **_: out)
        other = nufed.run(alone, out=tmp_path / "run")
    assert torch.equal(model(whole.path, "per-fedavg"), model(other.path, "per-fedavg"))


@pytest.mark.usefixtures("no_report")
def test_a_killed_run_resumes_and_is_trained_longer(whole, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Killed):
        nufed.run(CONFIG, out=path, on_progress=killed_after(11))  # in the rounds of per-fedavg
    nufed.resume(path)
    kept = {k: v for k, v in file_hashes(path).items() if "report" not in k and "figures" not in k}
    assert kept.items() <= file_hashes(whole.path).items()
    for fewer in ("rounds=3", "methods.per-fedavg.rounds=8", "methods.gmeta.adapt_steps=1"):
        with pytest.raises(InputError, match=r"only rounds may be increased, from 4, methods\.per"):
            nufed.resume(path, [fewer])
    longer = nufed.resume(path, ["methods.per-fedavg.rounds=11"])
    rounds = {name: seeds[0].metrics[-1].round for name, seeds in longer.methods.items()}
    assert rounds == {"gmeta": 4, "per-fedavg": 11, "fedl2p": 3}
    assert load_run(path).config.all_rounds["methods.per-fedavg.rounds"] == 11


def test_rounds_are_no_part_of_the_fingerprint():
    config = load_config(CONFIG)
    other = load_config(CONFIG, ["methods.per-fedavg.rounds=12", "rounds=5"])
    assert config.fingerprint == other.fingerprint and config.all_rounds != other.all_rounds
    plain = load_config({**CONFIG, "methods": {name: {} for name in ("gmeta", "per-fedavg")}})
    assert "rounds" not in plain.model_dump()["methods"]["gmeta"]  # nothing changes for others
    with pytest.raises(
        InputError, match=r"method.rounds = 3: is for all methods: write it at the top"
    ):
        load_config(CONFIG, ["method.rounds=3"])
    with pytest.raises(InputError, match=r"methods\.gmeta\.rounds = 0: must be greater than or"):
        load_config(CONFIG, ["methods.gmeta.rounds=0"])


@pytest.mark.usefixtures("no_report")
def test_an_algorithm_given_in_python_keeps_its_rounds(tmp_path):
    config = {**CONFIG, "methods": {"mine": {"rounds": 2}, "fedavg": {}}}
    run = nufed.run(config, methods={"mine": GMeta(1, batch_size=5)}, out=tmp_path / "run")
    assert {n: s[0].metrics[-1].round for n, s in run.methods.items()} == {"mine": 2, "fedavg": 4}


def test_a_search_trains_each_method_for_a_share_of_its_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("nufed.lab.report.tune_page.build_tune_page", lambda record, out, **_: out)
    methods = {"fedavg": {}, "gmeta": {"adapt_steps": 3}, "per-fedavg": {"rounds": 20}}
    tune = {"budget": 3, "per": "trial", "halvings": 1, "finalists": 1, "repeats": 1}
    found = nufed.tune(
        {**CONFIG, "rounds": 10, "methods": methods, "tune": tune}, out=tmp_path / "t"
    )
    plan = read_record(tmp_path / "t" / "search.json", SearchRecord)
    assert plan.rungs == [5, 10]
    assert plan.methods["per-fedavg"].work == 4 * 20 * 2
    assert plan.methods["gmeta"].work == 10 * 10 * 2
    for trial in found.trials:
        full = {"fedavg": 10, "gmeta": 100, "per-fedavg": 80}[trial.method] * 2
        for score in trial.rungs:
            assert score.work == full * score.rounds / 10  # rounds are those of the run
    assert found.config.rounds_of("per-fedavg") == 20
    assert json.loads(json.dumps(found.choices)).keys() == methods.keys()
