"""``nufed tune`` on a tiny problem: equal budgets, bits, resumption, and no test data read."""

import json
import os
import signal
import tomllib
from dataclasses import replace

import numpy as np
import pytest

import nufed
from nufed import InputError
from nufed.errors import RunError
from nufed.lab.config import load_config, problem as build
from nufed.lab.files import read_sealed, write_sealed
from nufed.lab.runs.directory import BOUNDS
from nufed.lab.runs.json_files import read_record
from nufed.lab.runs.records import BoundsRecord, ConstantRecord
from nufed.lab.runs.tuning_record import SearchRecord
from nufed.lab.tuning.search import rungs_of
from nufed.simulation import Training, start_method
from processes import Child, wait_for
from support import Killed

CONFIG = {
    "name": "tiny",
    "rounds": 10,
    "participation": 0.5,
    "checkpoint_every": 1,
    "workers": 1,
    "data": {
        "source": "sinusoid",
        "args": {"agents": 6, "samples": 20},
        "validation": 0.25,
        "test": 0.25,
        "unseen_agents": 2,
    },
    "model": {"args": {"hidden": [6], "activation": "tanh"}},
    "method": {"local_steps": 2, "batch_size": 5, "adapt_steps": 2, "meta_lr": 0.01},
    "methods": {
        "fedavg": {},
        "per-fedavg": {"curvature": "exact"},
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
    },
    "tune": {"budget": 8, "halvings": 1, "finalists": 1, "repeats": 1},
}


@pytest.fixture(autouse=True)
def _no_page(request, monkeypatch):
    if "page" not in request.fixturenames:
        monkeypatch.setattr(
            "nufed.lab.report.tune_page.build_tune_page", lambda record, out, **_: out
        )


@pytest.fixture(scope="module")
def work():
    """The work of every round that is really trained, in gradients."""
    return []


@pytest.fixture(scope="module")
def found(tmp_path_factory, work):
    """A whole search, with one worker."""

    def counted(*arguments, **more):
        progress = one_round(*arguments, **more)
        work.append(progress.cost.gradients + 2 * progress.cost.hvps)
        return progress

    one_round = Training.round
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nufed.lab.report.tune_page.build_tune_page", lambda record, out, **_: out)
        patch.setattr(Training, "round", counted)
        return nufed.tune(CONFIG, out=tmp_path_factory.mktemp("tune") / "search")


def started(config, path, **how):
    """The plan of a search that is killed when it starts."""

    def kill(path):
        raise Killed

    with pytest.raises(Killed):
        nufed.tune(config, out=path, on_start=kill, **how)
    return read_record(path / "search.json", SearchRecord)


def result(path):
    return (path / "tune.json").read_bytes()


def test_every_method_spends_the_same_budget_but_for_less_than_a_training(found):
    search = found.record.search
    assert search.unit == 10 * 2 * 2 and search.allowed == 8 * 40  # rounds, cohort, local steps
    for name, per_update in {"fedavg": 1, "per-fedavg": 4, "fo": 3}.items():
        full = search.methods[name].work
        assert full == 40 * per_update
        assert search.allowed - full < found.record.spent(name) <= search.allowed


def test_a_promoted_trial_resumes_and_is_not_trained_again(found, work):
    trials = [*found.trials, *found.record.repeats]
    assert any(len(trial.rungs) == 2 for trial in trials)
    assert sum(work) == sum(trial.last.work for trial in trials)


def test_the_best_third_is_promoted_by_score(found):
    for method in CONFIG["methods"]:
        for batch in {trial.batch for trial in found.record.of(method)}:
            trials = [t for t in found.record.of(method) if t.batch == batch]
            ranked = sorted(trials, key=lambda t: t.rungs[0].rank(False), reverse=True)
            further = {t.number for t in trials if len(t.rungs) == 2}
            assert further == {t.number for t in ranked[: max(1, len(trials) // 3)]}


def test_the_step_size_of_fine_tuning_is_that_of_training_before_the_last_rung(found):
    first = [trial.rungs[0] for trial in found.trials]
    last = [rung for trial in found.trials if (rung := trial.after(10))]
    assert {rung.scale for rung in first} == {1.0} != {rung.scale for rung in last}
    cheaper = min(rung.evaluation_gradients for rung in last)
    assert all(rung.evaluation_gradients < cheaper for rung in first)


def test_a_budget_of_trials_is_the_same_number_for_every_method(tmp_path, page):
    tune = CONFIG["tune"] | {"repeats": 0}
    other = nufed.tune(CONFIG | {"tune": tune}, budget=7, per="trial", out=tmp_path / "search")
    assert all(len(other.record.of(name)) == 7 for name in CONFIG["methods"])
    assert other.config.tuned.per == "trial" and other.config.tuned.budget_text == "7 trials"
    text = (tmp_path / "search" / "tuned.toml").read_text()
    assert "tune.per=trial" in text and "# Budget of each method: 7 trials;" in text
    shown = (tmp_path / "search" / "tune.html").read_text("utf-8")
    assert "every method had the same budget, 7 trials." in shown
    assert "fo: 7 trials, 2 of them trained to the end, are too few for a conclusion" in shown
    assert "No choice lies at the edge" not in shown
    again = nufed.tune(resume=tmp_path / "search")
    assert again.record == other.record
    with pytest.raises(InputError, match=r"tune.budget = 7.5: trials are counted, give a whole"):
        nufed.tune(CONFIG, budget=7.5, per="trial", out=tmp_path / "no")


def test_the_choice_is_the_best_fully_trained_trial_and_the_configured_one_is_tried(found):
    for method in CONFIG["methods"]:
        full = [t for t in found.record.of(method) if t.after(10)]
        best = min(full, key=lambda t: t.after(10).score)
        assert found.choices[method] == best.settings
        assert found.record.of(method)[0].settings["meta_lr"] == 0.01


def test_alpha_is_searched_only_where_training_depends_on_it(found):
    searched = {n: {r.setting for r in m.ranges} for n, m in found.record.search.methods.items()}
    assert searched["fedavg"] == {"meta_lr"}
    assert searched["per-fedavg"] == searched["fo"] == {"meta_lr", "adapt_lr"}
    (note,) = found.record.search.methods["fedavg"].notes
    assert "adapt_lr is not searched: the training of fedavg does not depend on it" in note


def test_no_checkpoint_is_left(found):
    names = {path.name for path in found.path.rglob("*") if path.is_file()}
    assert names == {
        "config.toml", "lock", "search.json", "tune.json", "tuned.toml", "trial.json",
        "rung-000005.json", "rung-000010.json",
    }  # fmt: skip


@pytest.mark.skipif(start_method() != "fork", reason="needs processes")
def test_two_workers_choose_the_same_bits(found, tmp_path):
    other = nufed.tune(CONFIG | {"workers": 2}, out=tmp_path / "search")
    assert result(other.path) == result(found.path)


def test_a_killed_search_resumes_to_the_same_bits(found, tmp_path):
    events = 200

    def kill(event):
        nonlocal events
        events -= 1
        if events < 0:
            raise Killed

    with pytest.raises(Killed):
        nufed.tune(CONFIG, out=tmp_path / "search", on_progress=kill)
    assert not (tmp_path / "search" / "tune.json").exists()
    nufed.tune(resume=tmp_path / "search")
    assert result(tmp_path / "search") == result(found.path)


@pytest.mark.skipif(start_method() != "fork", reason="needs processes")
def test_processes_that_are_killed_lose_nothing_that_was_finished(found, tmp_path):
    path, config = tmp_path / "search", CONFIG | {"workers": 2}
    child = Child(lambda: nufed.tune(config, out=path), tmp_path)
    wait_for(lambda: len(list(path.glob("trials/*/rung-*.json"))) > 5)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    before = {p: p.read_bytes() for p in path.glob("trials/*/rung-*.json")}
    nufed.tune(config, resume=path)
    assert all(p.read_bytes() == content for p, content in before.items())
    assert result(path) == result(found.path)


def test_ctrl_c_saves_a_checkpoint_and_the_search_resumes(found, tmp_path):
    def interrupt(event):
        if (event.trial.number, event.round) == (4, 1):
            os.kill(os.getpid(), signal.SIGINT)

    said = []
    with pytest.raises(KeyboardInterrupt):
        nufed.tune(
            CONFIG, out=tmp_path / "s", on_progress=interrupt, on_stop=lambda: said.append(1)
        )
    assert said and list(tmp_path.glob("s/trials/fedavg-0004/checkpoint-*"))
    nufed.tune(resume=tmp_path / "s")
    assert result(tmp_path / "s") == result(found.path)


def test_spoiling_every_test_sample_changes_no_choice(found, tmp_path):
    config = load_config(CONFIG)
    samples = build.build_samples(config.data)
    # the split of seed 1 has test samples of its own: without repeats, only those of seed 0 matter
    one = CONFIG | {"tune": CONFIG["tune"] | {"repeats": 0}}
    rows = np.concatenate(build.build_federation(config, samples, 0).split.test)
    inputs, targets = samples.inputs.clone(), samples.targets.clone()
    inputs[rows], targets[rows] = 1e4, -1e4
    spoiled = replace(samples, inputs=inputs, targets=targets)
    other = nufed.tune(one, data=spoiled, out=tmp_path / "search")
    assert other.record.trials == found.record.trials and other.choices == found.choices
    assert other.record.search.data_sha256 != found.record.search.data_sha256


def test_the_tuned_configuration_gives_the_score_of_the_search(found, tmp_path, no_report):
    overrides = ["eval_on=validation", "baselines=[]"]
    run = nufed.run(found.path / "tuned.toml", overrides, out=tmp_path / "run")
    for row in run.rows():
        if row.group == "seen":
            choice = found.record.choice(row.name)
            assert row.personal.mean == pytest.approx(choice.after(10).score, rel=1e-12)
            assert row.lr_scale == (choice.last.scale,)
    tuned = json.loads((run.path / "results.json").read_text())["tuned"]
    assert tuned["budget"] == 8 and tuned["choices"] == found.choices
    assert run.config.tuned.trials == {m: len(found.record.of(m)) for m in CONFIG["methods"]}


def test_the_report_says_what_was_tuned_and_what_was_changed_since(found, tmp_path, no_report):
    from nufed.lab.report.tables import settings_table

    run = nufed.run(
        found.path / "tuned.toml", ["rounds=1", "methods.fo.meta_lr=0.5"], out=tmp_path / "run"
    )
    rows = dict(settings_table(run).rows)
    assert "same budget, 8 × 40 gradients" in rows["tuned"]
    assert f"fedavg meta_lr = {found.choices['fedavg']['meta_lr']:g}" in rows["tuned"]
    assert rows["changed after tuning"] == "fo.meta_lr"
    text = (found.path / "tuned.toml").read_text()
    assert text.startswith(
        "# Tuned by: nufed tune CONFIG\n# Budget of each method: 320 gradients (8 × 40);"
    )
    assert "tune" not in tomllib.loads(text)


def test_newcomers_may_be_what_counts(tmp_path, no_report):
    config = CONFIG | {"methods": {"fo": CONFIG["methods"]["fo"]}}
    config["tune"] = {"agents": "unseen", "budget": 1, "repeats": 0}
    other = nufed.tune(config, out=tmp_path / "search")
    trial = other.record.choice("fo")
    overrides = ["eval_on=validation", "baselines=[]"]
    run = nufed.run(other.path / "tuned.toml", overrides, out=tmp_path / "run")
    (row,) = (r for r in run.rows() if r.group == "unseen")
    assert row.personal.mean == pytest.approx(trial.after(10).score, rel=1e-12)


def test_a_trial_that_diverges_is_a_bad_score_with_its_cause(tmp_path):
    methods = {"fo": {"meta_lr": [1e20, 1e30]}, "fedavg": {"meta_lr": [0.01, 1e25]}}
    tune = CONFIG["tune"] | {"budget": 4, "methods": methods, "repeats": 0}
    other = nufed.tune(CONFIG | {"tune": tune}, out=tmp_path / "search")
    assert set(other.choices) == {"fedavg", "per-fedavg"}
    failed = [trial for trial in other.trials if trial.failure]
    assert {trial.method for trial in failed} == {"fedavg", "fo"}
    causes = ("not finite", "diverges", "step")
    assert all(any(cause in trial.failure for cause in causes) for trial in failed)
    assert all(trial.number != other.record.chosen[m] for m in other.choices for trial in failed)
    text = (other.path / "tuned.toml").read_text()
    assert "# Every trial of fo failed: settings as configured." in text
    assert load_config(other.path / "tuned.toml").method.meta_lr == 0.01


def test_methods_given_in_python_are_tuned_too(tmp_path):
    own = {"mine": nufed.GMeta(adapt_steps=1, batch_size=5, local_steps=2, meta_lr=0.01)}
    base = {k: v for k, v in CONFIG.items() if k not in ("method", "methods")}
    tune = CONFIG["tune"] | {"budget": 2}
    other = nufed.tune(base | {"tune": tune}, methods=own, out=tmp_path / "search")
    assert set(other.choices) == {"mine"} and set(other.choices["mine"]) == {"meta_lr", "adapt_lr"}
    assert len(other.trials) > 1


def test_ranges_may_start_from_the_estimated_smoothness(tmp_path, no_report):
    base = {k: v for k, v in CONFIG.items() if k != "tune"}
    run = nufed.run(base | {"rounds": 1}, out=tmp_path / "run")
    tune = CONFIG["tune"] | {"budget": 4, "repeats": 0}
    with pytest.raises(InputError, match=r"run has no estimate of the smoothness L: run `nufed bo"):
        nufed.tune(CONFIG | {"tune": tune}, bounds=run.path, out=tmp_path / "search")
    constants = {"smoothness": ConstantRecord(value=8.0)}
    record = BoundsRecord(
        constants=constants, smooth=True, uniform=True, by_steps_of="fo", by_steps=[], methods=[]
    )
    write_sealed(run.path / BOUNDS, record.record())
    plan = started(CONFIG | {"tune": tune}, tmp_path / "search", bounds=run.path)
    for own in plan.methods.values():
        for each in own.ranges:
            assert (each.low, each.high) == (0.00025, 0.25) and "upper end 2/L" in each.origin
    data = CONFIG["data"] | {"test": 0.3}
    with pytest.raises(InputError, match="about another problem, its data differs"):
        nufed.tune(CONFIG | {"data": data}, bounds=run.path, out=tmp_path / "other")


def test_the_page_shows_everything_in_words(found, page):
    text = page.read_text("utf-8")
    for words in (
        "every method had the same budget, 320 gradients (8 × 40)",
        "How certain is the ranking?",
        "÷ 3 loses",
        "tune-best",
        "tune-meta_lr",
        "the training of fedavg does not depend on it",
    ):
        assert words in text


@pytest.fixture(scope="module")
def page(found):
    from nufed.lab.report.tune_page import build_tune_page

    return build_tune_page(found.record, found.path.parent, figures=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 3}, r"budget = 3: must be 4 or more, one full training of every method: per-"),
        ({"sampler": "bayes"}, r"tune.sampler = 'bayes': must be 'tpe', 'random' or 'grid' or"),
        ({"ranges": {"meta_lr": []}}, r"tune.ranges.meta_lr = \[\]: is empty"),
        ({"ranges": {"meta_lr": [0.1, 0.1]}}, r"meta_lr = \[0.1, 0.1\]: the range is empty"),
        ({"ranges": {"meta_lr": [1, 0.1]}}, r"meta_lr = \[1, 0.1\]: the range is reversed"),
        ({"ranges": {"meta_lr": [-1, 1]}}, r"-1 is outside the setting's bounds, which are: a fin"),
        ({"ranges": {"meta_lr": "wide"}}, r"must be \[low, high\] or a list of choices"),
        ({"ranges": {"batch_size": [2, 4.5]}}, r"4.5 is outside .*: a whole number, 1 or more"),
        ({"ranges": {"meta_lr": [0.1]}}, r"at least two different values"),
        (
            {"ranges": {"metalr": [0.1, 1]}},
            r"tune.ranges.metalr: not a setting of fedavg, .*'meta_",
        ),
        ({"ranges": {"local_steps": "auto"}}, r"tune.ranges.local_steps = 'auto': must be \[low"),
        ({"methods": {"fedavg": {"curvature": ["exact"]}}}, r"curvature: not a setting of fedavg"),
        ({"methods": {"fo": {"curvature": ["exact", "x"]}}}, r"'x' must be one of exact, first_o"),
        ({"methods": {"f": {"meta_lr": "auto"}}}, r"tune.methods.f: must be one of fedavg, per-f"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        nufed.tune(CONFIG | {"tune": CONFIG["tune"] | changes}, out=tmp_path / "search")
    assert "\n" not in str(caught.value) and not (tmp_path / "search").exists()


def test_without_a_validation_part_it_says_how_to_get_one(tmp_path):
    data = CONFIG["data"] | {"validation": 0.0}
    with pytest.raises(InputError, match=r"data.validation = 0: .* for example to 0.2"):
        nufed.tune(CONFIG | {"data": data}, out=tmp_path / "search")
    config = CONFIG | {"data": CONFIG["data"] | {"unseen_agents": 0}}
    config["tune"] = {"agents": "unseen"}
    with pytest.raises(InputError, match=r"no agents are held out .* data.unseen_agents"):
        nufed.tune(config, out=tmp_path / "search")


def test_without_optuna_the_search_is_random_and_tpe_is_refused(tmp_path, monkeypatch, found):
    monkeypatch.setattr("nufed.lab.tuning.search.find_spec", lambda name: None)
    wanted = CONFIG | {"tune": CONFIG["tune"] | {"sampler": "tpe"}}
    with pytest.raises(InputError, match=r'needs Optuna; `pip install "nufed\[tune\]"`'):
        nufed.tune(wanted, out=tmp_path / "search")
    assert started(CONFIG, tmp_path / "search").sampler == "random"
    assert found.record.search.sampler == "tpe"


def test_a_search_resumes_with_its_own_configuration_and_data_only(found, tmp_path):
    with pytest.raises(InputError, match=r"another configuration \(rounds was 10 and is 5\)"):
        nufed.tune(CONFIG | {"rounds": 5}, resume=found.path)
    with pytest.raises(InputError, match=r"tune.budget was 8.0 and is 9.0"):
        nufed.tune(CONFIG, budget=9, resume=found.path)
    with pytest.raises(RunError, match=r"is not the directory of a search"):
        nufed.tune(resume=tmp_path)
    samples = build.build_samples(load_config(CONFIG).data)
    other = replace(samples, targets=samples.targets + 1)
    with pytest.raises(RunError, match=r"the data is not that of .* \(its SHA-256 differs\)"):
        nufed.tune(CONFIG, data=other, resume=found.path)


def test_a_changed_record_is_refused(found, tmp_path):
    import shutil

    path = shutil.copytree(found.path, tmp_path / "copy")
    trial = path / "trials" / "fedavg-0000" / "trial.json"
    write_sealed(trial, read_sealed(trial).about | {"settings": {"meta_lr": 0.5}})
    with pytest.raises(RunError, match=r"this search asks for .*: it was started with other soft"):
        nufed.tune(resume=path)
    rung = path / "trials" / "fedavg-0001" / "rung-000005.json"
    rung.write_bytes(rung.read_bytes().replace(b"rounds", b"wounds"))
    shutil.copy(found.path / "trials/fedavg-0000/trial.json", trial)
    with pytest.raises(RunError, match="does not match its SHA-256"):
        nufed.tune(resume=path)


def test_the_command_line_tunes_and_runs_in_one_go(nufed, tmp_path, page, no_report):
    import tomli_w

    methods = {name: CONFIG["methods"][name] for name in ("fedavg", "fo")}
    config = CONFIG | {"methods": methods, "tune": {"budget": 3, "halvings": 1, "repeats": 1}}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(config))
    searched = nufed("tune", "mine.toml", "--no-figures", "--out", "s", cwd=tmp_path)
    assert searched.returncode == 0, searched.stderr
    assert "is best after tuning" in searched.stdout and "score lost by a factor of 3" in (
        searched.stdout
    )
    assert searched.stdout.splitlines()[-2:] == ["configuration: s/tuned.toml", "page: s/tune.html"]
    assert "trials done" in searched.stderr
    ran = nufed("run", "mine.toml", "--tuned", "--no-figures", "--out", "r", cwd=tmp_path)
    assert ran.returncode == 0 and "runs/tiny-tune-001/tuned.toml" in ran.stderr
    first, second = (tmp_path / p / "tune.json" for p in ("s", "runs/tiny-tune-001"))
    assert read_sealed(first).about["trials"] == read_sealed(second).about["trials"]
    tuned = json.loads((tmp_path / "r" / "results.json").read_text())["tuned"]
    assert tuned["choices"].keys() == methods.keys()
    again = nufed("tune", "--resume", "s", "rounds=9", cwd=tmp_path)
    assert again.returncode == 2 and "rounds was 10 and is 9" in again.stderr


def test_rungs_are_halves_of_the_rounds_and_not_too_short():
    assert rungs_of(100, 2) == [25, 50, 100] and rungs_of(20, 2) == [5, 10, 20]
    assert rungs_of(9, 2) == [5, 9] and rungs_of(8, 2) == [8]
    assert rungs_of(1, 2) == [1] and rungs_of(9, 0) == [9]
