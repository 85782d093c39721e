"""Sweeps: a grid of ordinary runs that share workers and data, resumed to the same bits."""

import csv
import errno
import os
import shutil
import signal
import sys

import numpy as np
import pytest

import nufed
from nufed import InputError
from nufed.errors import RunError
from nufed.lab.analysis import comparison
from nufed.lab.analysis.comparison import keyed_scores, marginal_scores
from nufed.lab.config.sweep_grid import make_grid
from nufed.lab.experiment import sweeping as sweep_runs
from nufed.lab.experiment.training import MethodJob
from nufed.lab.files import read_sealed, write_sealed
from nufed.lab.report.result_files import write_results
from nufed.lab.report.sweep_page import sweep_charts, sweep_headline, sweep_notes, sweep_table
from nufed.simulation import start_method
from support import Killed, file_hashes, without_report

CONFIG = {
    "rounds": 3,
    "eval_every": 2,
    "checkpoint_every": 1,
    "participation": 0.5,
    "seeds": [0, 1],
    "workers": 1,
    "engine": "direct",
    "baselines": ["majority"],
    "data": {"agents": 4, "samples_per_agent": 20, "test": 0.25, "unseen_agents": 1},
    "model": {"args": {"hidden": [4]}},
    "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 4, "curvature": "first_order"},
    "methods": {"gmeta": {}, "ditto": {}},
    "sweep": {"data": {"dirichlet": [0.5, 5]}},
}
STEPS = ["methods.gmeta.adapt_steps=1..2"]
POINTS = [(0.5, 1), (0.5, 2), (5, 1), (5, 2)]


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch):
    monkeypatch.setattr("nufed.lab.report.sweep_page.build_sweep_page", lambda sweep, **_: None)
    with without_report():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that was not interrupted, and how often its data was loaded."""
    loads, load = [], sweep_runs.build_samples
    with without_report(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_runs, "build_samples", lambda data: loads.append(data) or load(data))
        out = tmp_path_factory.mktemp("whole") / "sweep"
        return nufed.sweep(CONFIG, overrides=STEPS, out=out, figures=False), len(loads)


def killed_after(events):
    def listener(run, event):
        nonlocal events
        events -= 1
        if events < 0:
            raise Killed

    return listener


def begun(path, events, **how):
    with pytest.raises(Killed):
        nufed.sweep(
            CONFIG,
            overrides=STEPS,
            out=path,
            on_progress=killed_after(events),
            figures=False,
            **how,
        )
    return path


def test_every_run_is_the_run_of_its_settings(whole, tmp_path):
    sweep, loads = whole
    assert [tuple(values.values()) for values in sweep.values.values()] == POINTS
    assert list(sweep.runs) == [
        f"0{i}-dirichlet-{d}_adapt_steps-{s}" for i, (d, s) in enumerate(POINTS, 1)
    ]
    assert loads == 1  # four runs share the data
    config = {key: value for key, value in CONFIG.items() if key != "sweep"}
    overrides = ["data.dirichlet=5", "methods.gmeta.adapt_steps=1"]
    alone = nufed.run(config, overrides, out=tmp_path / "alone")
    assert file_hashes(sweep.runs["03-dirichlet-5_adapt_steps-1"].path) == file_hashes(alone.path)
    about = read_sealed(sweep.path / "sweep.json").about
    assert about["keys"] == {"data.dirichlet": [0.5, 5], "methods.gmeta.adapt_steps": [1, 2]}
    assert [run["name"] for run in about["runs"]] == list(sweep.runs)
    assert nufed.load_sweep(str(sweep.path)).to_json() == sweep.to_json()


@pytest.mark.parametrize(
    ("events", "workers"),
    [
        (25, 1),
        pytest.param(
            9, 2, marks=pytest.mark.skipif(start_method() != "fork", reason="needs Linux")
        ),
    ],
)
def test_a_killed_sweep_resumes_to_the_same_bits(whole, tmp_path, events, workers):
    path = begun(tmp_path / "sweep", events)
    done = len(list(path.glob("runs/*/methods/*/seed-*/done.json")))
    assert done == {25: 4, 9: 1}[events]
    seen = []
    nufed.resume_sweep(
        path,
        [f"workers={workers}"],
        figures=False,
        on_start=lambda start: seen.append(len(start.jobs)),
    )
    assert seen == [4 * 2 * 3 - done]  # finished parts are skipped; baselines look for themselves
    assert file_hashes(path) == file_hashes(whole[0].path)


def test_a_sweep_killed_while_it_starts_resumes(whole, tmp_path):
    path = begun(tmp_path / "sweep", 0)
    first, second, *_ = sorted((path / "runs").iterdir())
    shutil.rmtree(first)
    (second / "run.json").unlink()
    nufed.resume_sweep(path, figures=False)
    assert file_hashes(path) == file_hashes(whole[0].path)


def test_ctrl_c_saves_the_round_of_every_worker(whole, tmp_path):
    stopped = []

    def interrupt(run, event):
        if event.round == 1 and not stopped:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        nufed.sweep(
            CONFIG,
            overrides=STEPS,
            out=tmp_path / "sweep",
            on_progress=interrupt,
            on_stop=lambda: stopped.append(True),
        )
    assert stopped and list(tmp_path.glob("sweep/runs/*/methods/*/seed-*/checkpoint-*.safetensors"))
    nufed.resume_sweep(tmp_path / "sweep", figures=False)
    assert file_hashes(tmp_path / "sweep") == file_hashes(whole[0].path)


def test_a_full_disk_keeps_what_was_finished(whole, tmp_path, monkeypatch):
    path, sync, calls = tmp_path / "sweep", os.fsync, 0

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    how = f"the disk is full.*`nufed sweep --resume {path}`"
    with pytest.raises(RunError, match=how):
        nufed.sweep(CONFIG, overrides=STEPS, out=path, figures=False)
    monkeypatch.setattr(os, "fsync", sync)
    finished = list(path.glob("runs/*/methods/*/seed-*/done.json"))
    assert 1 < len(finished) < 16
    kept = {file: file.read_bytes() for file in finished}
    nufed.resume_sweep(path, figures=False)
    assert all(file.read_bytes() == content for file, content in kept.items())
    assert file_hashes(path) == file_hashes(whole[0].path)


def test_a_run_that_fails_is_named_and_the_others_continue(tmp_path, monkeypatch):
    train = MethodJob.__call__

    def broken(job, *arguments):
        if job.directory.path.name.startswith("02") and job.part.method == "ditto":
            raise ZeroDivisionError("in your metric")
        train(job, *arguments)

    monkeypatch.setattr(MethodJob, "__call__", broken)
    changed = {**CONFIG, "seeds": [0], "sweep": {"method.meta_lr": [0.1, 0.2, 1e30]}}
    sweep = nufed.sweep(changed, out=tmp_path / "sweep", figures=False)
    ditto, diverged, also = sweep.failures
    assert ditto == (
        "02-meta_lr-0.2 (method.meta_lr = 0.2): ditto, seed 0: ZeroDivisionError: in your metric"
    )
    assert diverged.startswith("03-meta_lr-1e-30 (method.meta_lr = 1e+30): gmeta, seed 0: round")
    assert "ditto, seed 0" in also
    table = sweep_table(sweep, "seen", narrow=True)
    assert table.headings == ["meta_lr", "gmeta", "ditto after 0 steps"]
    assert [row.count("–") for row in table.rows] == [0, 1, 2]
    assert list(sweep_charts(sweep))


def test_results_have_a_row_per_run_method_group_and_seed(whole):
    sweep, _ = whole
    with (sweep.path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = ("run", "method", "group", "seed")
    assert len(rows) == len({tuple(row[k] for k in keys) for row in rows}) == 4 * 3 * 2 * 2
    for row, record in zip(rows, sweep.records(), strict=True):
        run = sweep.runs[row["run"]]
        part = run.baselines if record["kind"] == "baseline" else run.methods
        scores = part[row["method"]][int(row["seed"])].final
        own = [s.score[record["steps"]] for s in scores if s.seen == (row["group"] == "seen")]
        assert float(row["personal"]) == record["personal"] == pytest.approx(np.mean(own))
        assert float(row["data.dirichlet"]) == sweep.values[row["run"]]["data.dirichlet"]


def test_results_as_parquet(whole, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    sweep, _ = whole
    table = parquet.read_table(sweep.path / "results.parquet").to_pylist()
    assert [row["personal"] for row in table] == [row["personal"] for row in sweep.records()]
    assert {row["data.dirichlet"] for row in table} == {0.5, 5.0}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    copy = nufed.load_sweep(shutil.copytree(sweep.path, tmp_path / "copy"))
    (copy.path / "results.csv").unlink()
    said = write_results(copy)
    assert said == 'results.parquet was left out, it needs pyarrow: pip install "nufed[frames]"'
    assert (copy.path / "results.csv").read_bytes() == (sweep.path / "results.csv").read_bytes()


def test_the_page_links_every_run_and_charts_every_key(whole):
    sweep, _ = whole
    page = (sweep.path / "report.html").read_text()
    assert all(f'<a href="runs/{name}/report.html">{name}</a>' in page for name in sweep.runs)
    assert "[methods.ditto]" in page  # the shared configuration
    names = [name for name, _, _ in sweep_charts(sweep)]
    for group in ("seen", "unseen"):
        assert {f"by-key-1-{group}", f"by-key-2-{group}"} <= set(names)
        assert {f"map-1-{n}-{group}" for n in (1, 2)} <= set(names)  # one per method
    assert sweep_headline(sweep).startswith("4 runs over data.dirichlet and methods.gmeta.adapt_st")
    assert any("for 1 and 2 steps" in note for note in sweep_notes(sweep))


@pytest.mark.parametrize("needed", [2, 3])
def test_scores_by_one_key_are_means_over_the_others(whole, monkeypatch, needed):
    """The interval is over the means of two seeds, or, if they are too few, of agents."""
    monkeypatch.setattr(comparison, "MIN_VALUES", needed)
    sweep, _ = whole
    for score in marginal_scores(sweep, "seen", "data.dirichlet"):
        scores = {}
        for name, run in sweep.runs.items():
            if sweep.values[name]["data.dirichlet"] == score.keys["data.dirichlet"]:
                line = next(line for line in run.lines() if line.label == score.method)
                for seed, own in zip(line.seeds, line.scores("seen"), strict=True):
                    scores |= {(name, seed, s.agent): s.score[line.steps] for s in own}
        values, place = list(scores.values()), 1 if needed == 2 else 2
        assert len(values) == 2 * 2 * 3 and score.mean == pytest.approx(np.mean(values))
        groups = {}
        for key, value in scores.items():
            groups.setdefault(key[place], []).append(value)
        means = [np.mean(own) for own in groups.values()]
        t = {2: 12.706, 3: 4.303, 4: 3.182}[len(means)]
        half = t * np.std(means, ddof=1) / np.sqrt(len(means))
        assert score.half_width == pytest.approx(half)
        assert score.baseline == (score.method == "majority")
    assert len(keyed_scores(sweep, "seen")) == 4 * 3


BAD = {
    (): "no key is swept: give at least one",
    ("data.dirchlet=0.1,1",): "unknown key 'data.dirchlet'; did you mean 'data.dirichlet'",
    ("methods.gmeta.nu=1,2",): "unknown key 'methods.gmeta.nu': gmeta takes",
    ("data.dirichlet=",): "sweep: data.dirichlet has no values",
    ("data.dirichlet=0.1,-1",): "data.dirichlet = -1: must be a number above 0",
    ("data.dirichlet=0.1,word",): "data.dirichlet = 'word': must be a valid number",
    ("data.dirichlet=0.1,,1",): "sweep: data.dirichlet = .*a value is empty",
    ("data.dirichlet=1,0.1,1.0",): "sweep: data.dirichlet has the value 1.0 twice",
    ("rounds=5..3",): r"sweep: rounds = 5..3: the range is reversed; write 3..5",
    ("rounds=1..999999999",): r"would have 999,999,999 runs .*--max-runs 999999999",
    ("method.meta_lr=0.1..0.5",): "a range of whole numbers",
    ("rounds=1..9", "data.agents=4,5", "participation=0.1,0.2,0.3,0.4,0.5,1"): "108 runs .9 of rou",
    ("name=a,b",): "name can't be swept: runs are named after the swept values",
    ("workers=1,2",): "workers can't be swept: it changes no result",
    ("seeds=0,1",): r"seeds can't be swept: every run trains all seeds; .*--seeds 3",
    ("metric=accuracy,f1",): "different scores .test accuracy and test f1.*sweep other keys",
    ("method.batch_size=4,999",): r"batch_size is 999.*in the run with method.batch_size = 999",
    ("rounds=1..2", "rounds=4"): "no key is swept",  # the later setting wins
    ("sweep.rounds=[1,2]",): r"'sweep.rounds=.*write the swept key itself",
    ("rounds.x=1,2",): "'rounds.x=1' can't be set: rounds is a value, not a table",
}


@pytest.mark.parametrize(("settings", "message"), BAD.items())
def test_bad_input_is_refused_before_anything_is_written(tmp_path, settings, message):
    config = {**CONFIG, "seeds": [0], "sweep": {}}
    with pytest.raises(InputError, match=message) as refused:
        nufed.sweep({**config, "rounds": 3}, overrides=settings, out=tmp_path / "sweep")
    assert "\n" not in str(refused.value) and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rounds": 5}, "sweep: rounds = 5: must be a list of values, or a range"),
        ({"rounds": []}, "sweep: rounds has no values"),
        ({"data": {"agents": "4..x"}}, "a range of whole numbers such as"),
    ],
)
def test_a_bad_table_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        make_grid({"sweep": values})


def test_keys_that_have_no_effect_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    config = {**CONFIG, "seeds": [0], "sweep": {"data.source": ["digits", "cifar10"]}}
    with pytest.raises(InputError, match="have the same settings: remove one"):
        nufed.sweep(config, data=(x, np.arange(120) % 3), out=tmp_path / "sweep")


def test_where_values_come_from():
    """The command line wins over the argument, which wins over [sweep]; a single value is fixed."""
    grid = make_grid(
        {"sweep": {"rounds": [1, 2], "data": {"agents": "4..6"}, "method.adapt_lr": [0.1, 0.2]}},
        {"data.agents": np.array([7, 8])},
        [
            "method.adapt_lr=0.5",
            "method.curvature=exact,first_order",
            "model.args.hidden=[4,5],[6]",
        ],
    )
    assert grid.keys == {
        "rounds": [1, 2],
        "data.agents": [7, 8],
        "method.curvature": ["exact", "first_order"],
        "model.args.hidden": [[4, 5], [6]],
    }
    assert {point.config.method.adapt_lr for point in grid.points} == {0.5}
    assert len({point.name for point in grid.points}) == len(grid.points) == 16
    assert grid.points[1].name == "02-rounds-1_agents-7_curvature-exact_hidden-6"


def test_names_are_safe_and_distinct():
    values = {"data.args": [{"root": "../../etc"}, {"root": "/etc\n"}, {"root": "ü" * 200}]}
    names = [point.name for point in make_grid({}, values).points]
    assert len(set(names)) == 3
    assert all(set(name) <= set("0123456789abcdefghijklmnopqrstuvwxyz._-") for name in names)
    assert all(len(name) <= 60 and "/" not in name for name in names)
    both = {"methods.a.adapt_lr": [0.1], "methods.b.adapt_lr": [0.2]}
    (point,) = make_grid({"method": {"algorithm": "gmeta"}, "methods": {"a": {}}}, both).points
    assert point.name == "01-methods.a.adapt_lr-0.1_methods.b.adapt_lr-0.2"


def test_an_existing_directory_is_refused(whole, tmp_path):
    sweep, _ = whole
    with pytest.raises(RunError, match=f"never overwrites.*`nufed sweep --resume {sweep.path}`"):
        nufed.sweep(CONFIG, out=sweep.path)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="never overwrites: give another --out"):
        nufed.sweep(CONFIG, out=tmp_path)
    with pytest.raises(RunError, match=r"is not the directory of a sweep, it has no sweep.json"):
        nufed.resume_sweep(tmp_path)


def test_settings_of_a_resumed_sweep_are_fixed(whole):
    with pytest.raises(InputError, match="rounds=9: a resumed sweep keeps its settings"):
        nufed.resume_sweep(whole[0].path, ["rounds=9"])


def test_a_run_that_was_changed_is_refused(whole, tmp_path):
    path = shutil.copytree(whole[0].path, tmp_path / "sweep")
    run = sorted((path / "runs").iterdir())[1]
    nufed.resume(run, ["rounds=4"])
    with pytest.raises(RunError, match=f"{run.name} has other settings than .*sweep.json records"):
        nufed.resume_sweep(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about["runs"][0].update(name="../../outside"),
        lambda about: about["runs"][0].update(name=about["runs"][1]["name"]),
        lambda about: about["runs"][0].update(values={}),
        lambda about: about["runs"][0]["config"].update(rounds="many"),
        lambda about: about.update(format=2),
        lambda about: about.pop("keys"),
    ],
)
def test_a_crafted_manifest_is_refused(whole, tmp_path, change):
    about = read_sealed(whole[0].path / "sweep.json").about
    change(about)
    (tmp_path / "sweep").mkdir()
    write_sealed(tmp_path / "sweep" / "sweep.json", about)
    with pytest.raises(RunError, match=r"sweep.json"):
        nufed.resume_sweep(tmp_path / "sweep")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_objects_given_in_python_must_be_given_again(tmp_path):
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    config = {**CONFIG, "seeds": [0], "sweep": {"rounds": [1, 2]}}
    own = {"data": (x, np.arange(120) % 3), "figures": False}
    with pytest.raises(Killed):
        nufed.sweep(config, out=tmp_path / "sweep", on_progress=killed_after(0), **own)
    shutil.rmtree(tmp_path / "sweep" / "runs" / "02-rounds-2")  # one that has not started
    with pytest.raises(InputError, match="was given its data as Python objects"):
        nufed.resume_sweep(tmp_path / "sweep")
    sweep = nufed.resume_sweep(tmp_path / "sweep", **own)
    assert len(sweep.runs) == 2 and not sweep.failures


def test_a_configuration_with_a_table_sweep_is_not_run_alone(tmp_path):
    with pytest.raises(InputError, match=r"\[sweep\] is for several runs: .*`nufed sweep`"):
        nufed.run(CONFIG, out=tmp_path / "run")
    assert not any(tmp_path.iterdir())
