"""The pilot of ``nufed advise CONFIG``: what it reads, when it stops, what it writes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from nufed import InputError
from nufed.data import digits
from nufed.errors import RunError
from nufed.lab import pilot as module
from nufed.lab.analysis.recommend import KINDS, PilotAdvice, recommend
from nufed.lab.cli.commands import app
from nufed.lab.config import load_config
from nufed.lab.config.problem import build_split
from nufed.lab.pilot import pilot

CONFIG = {
    "name": "tiny",
    "rounds": 2,
    "participation": 0.3,
    "eval_steps": 2,
    "data": {
        "source": "digits", "partition": "iid", "agents": 18, "samples_per_agent": 24,
        "validation": 0.25, "test": 0.25, "unseen_agents": 4,
    },
    "model": {"args": {"hidden": [4], "activation": "tanh"}},
    "method": {"adapt_lr": 0.1, "meta_lr": 0.2, "batch_size": 6},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small():
    """Fewer methods, and less of everything."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gmeta-5", "fedrep", "ditto", "ifca"):
            patch.delitem(KINDS, name)
        patch.setattr(module, "FACTORS", (1.0, 3.0))
        patch.setattr(module, "LOCAL_STEPS", 3)
        patch.setattr(module, "MEASURED", 2)
        yield


def steady():
    """A clock that stands still."""
    return 0.0


@pytest.fixture(scope="module")
def record():
    return pilot(CONFIG, now=steady)


def test_everything_is_measured(record):
    assert set(record.ran) == set(KINDS) and record.rounds == 2 and not record.left_out
    # of 14 agents in training a third stand for newcomers
    assert (record.agents, record.trained, record.scored) == (14, 10, 4) and record.newcomers
    assert record.samples == (12, 12.0, 12) and record.classes == 10
    assert [each.model for each in record.heterogeneity] == ["initial", "fedavg"]
    assert all(each.gamma_h > 0 and len(each.curvatures) == 2 for each in record.heterogeneity)
    for name, each in record.ran.items():
        assert len(each.scores) == 4 and np.mean(each.scores) == pytest.approx(each.score)
        assert each.factor in (1.0, 3.0)
        if name != "local":
            assert each.settings["meta_lr"] == pytest.approx(0.2 * each.factor)


def test_no_test_sample_and_none_of_the_newcomers_is_read(record, monkeypatch):
    samples, data = digits(), load_config(CONFIG).data
    split = build_split(data, samples, 0)
    left = [*split.test, *(split.train[a] for a in split.unseen)]
    left += [split.validation[a] for a in split.unseen]
    rows = np.concatenate(left)
    inputs, targets = samples.inputs.clone(), samples.targets.clone()
    inputs[rows] = 255
    targets[rows] = 0
    monkeypatch.setattr(
        module, "build_samples", lambda data: replace(samples, inputs=inputs, targets=targets)
    )
    assert pilot(CONFIG, now=steady) == record


def test_with_few_agents_all_are_scored_and_the_recommendation_is_halved():
    few = {**CONFIG, "data": {**CONFIG["data"], "agents": 6, "unseen_agents": 0}}
    record = pilot(few, now=steady, standing={"a": {"fedavg-5": 1.0}})
    assert not record.newcomers and record.scored == record.trained == 6
    assert all(len(each.resampled) == 6 for each in record.ran.values())
    method = recommend(record, {"a": {"fedavg-5": 1.0}}).method
    assert [half.what for half in record.halved] == ["agents", "samples"] * (method != "local")


def test_methods_are_compared_after_the_last_stage_that_all_completed(monkeypatch):
    monkeypatch.setattr(module, "SHARES", (8, 2, 1))
    longer = {**CONFIG, "rounds": 8}
    short = pilot(longer, now=steady, on_progress=_interrupt_at("8 rounds"))
    assert short.rounds == 4 and set(short.ran) == set(KINDS)
    assert short.left_out == ["the rest: it was interrupted"]
    early = pilot(longer, now=steady, on_progress=_interrupt_at("per-fedavg, 1 rounds"))
    assert set(early.ran) == {"local", "fedavg-5"} and "some step sizes" in early.left_out[0]


def _interrupt_at(words):
    def show(what, share):
        if words in what:
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": {**CONFIG["data"], "validation": 0.0}}, r"data\.validation = 0: a pilot scores"),
        ({"rouns": 3}, r"rouns"),
        ({"federation": {"sites": {}}}, r"federation"),
    ],
)
def test_what_can_have_no_pilot(change, sentence):
    with pytest.raises(InputError, match=sentence):
        pilot({**CONFIG, **change}, now=steady)


def test_too_little_time():
    with pytest.raises(InputError, match=r"--minutes 0\.001: not one method was trained"):
        calls = iter(range(10**6))
        pilot(CONFIG, minutes=0.001, now=lambda: float(next(calls)))


def test_the_command_prints_and_writes_the_advice(tmp_path, monkeypatch, capsys):
    import tomli_w

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(CONFIG))
    app(["advise", "mine.toml", "rounds=1"], standalone_mode=False)
    printed = capsys.readouterr().out
    path = tmp_path / "runs/tiny-advice-001.json"
    advice = PilotAdvice.model_validate_json(path.read_text("utf-8"))
    assert advice.pilot.rounds_configured == 1
    assert f"Start with {advice.method}" in printed and all(t in printed for t in advice.text)
    assert advice.board.sentence in printed
    app(["advise", "mine.toml", "rounds=1", "--json", "--out", "a/b.json"], standalone_mode=False)
    again = json.loads(capsys.readouterr().out)
    assert again["pilot"]["tried"] == json.loads(path.read_text("utf-8"))["pilot"]["tried"]
    with pytest.raises(RunError, match="exists, and nothing is overwritten"):
        app(["advise", "mine.toml", "--out", "a/b.json"], standalone_mode=False)
    with pytest.raises(InputError, match="--minutes and --out are for"):
        app(["advise", "nowhere", "--minutes", "1"], standalone_mode=False)
    with pytest.raises(InputError, match="--max-steps is for"):
        app(["advise", "mine.toml", "--max-steps", "1"], standalone_mode=False)
