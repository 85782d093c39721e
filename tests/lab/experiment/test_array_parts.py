"""Processes of a job array train parts of one run, which has the bytes of an ordinary run."""

import shutil

import pytest

import nufed
from nufed import InputError
from nufed.errors import RunError
from nufed.lab.config import load_config
from nufed.lab.config.problem import Problem
from nufed.lab.experiment.array import LOCKS, check_share, parse_share, shared_run, slurm_share
from nufed.lab.experiment.jobs import BASELINE_PART
from nufed.lab.experiment.setup import Setup
from nufed.lab.experiment.training import parts_of
from nufed.lab.files import read_sealed, write_sealed
from processes import Child
from support import Killed, file_hashes, without_report

CONFIG = {
    "rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 1,
    "participation": 0.5,
    "seeds": [0, 1],
    "workers": 1,
    "baselines": ["majority", "untrained"],
    "data": {"agents": 4, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
        "ditto": {"algorithm": "ditto"},
    },
}
pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    with without_report():
        nufed.run(CONFIG, out=path)
    return path


def done_parts(path):
    return {str(file.parent.relative_to(path)) for file in path.rglob("done.json")}


@pytest.mark.parametrize("total", [4, 9])  # there are six parts
def test_processes_that_start_together_leave_the_bytes_of_an_ordinary_run(total, whole, tmp_path):
    path = tmp_path / "run"
    processes = [
        Child(lambda k=k: nufed.run(CONFIG, out=path, part=(k, total)), tmp_path)
        for k in range(1, total + 1)
    ]
    assert [(p.wait(), p.error) for p in processes] == [(0, "")] * total
    assert done_parts(path) == done_parts(whole)
    assert not (path / "results.json").exists()
    seen = []
    nufed.resume(path, on_progress=seen.append)
    assert all(event.starts for event in seen)  # nothing was left to train
    assert file_hashes(path) == file_hashes(whole)


def test_a_part_trains_every_nth_method_and_seed_and_resume_trains_the_rest(whole, tmp_path):
    path, trained = tmp_path / "run", []
    for k in (1, 3):
        seen = []
        run = nufed.run(CONFIG, out=path, part=(k, 3), on_progress=seen.append)
        trained += [(event.method, event.seed) for event in seen if event.starts]
    assert len(trained) == len(set(trained)) == 4
    assert {(m, s) for m, seeds in run.methods.items() for s in seeds} == {
        part for part in trained if part[0] != BASELINE_PART
    }
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(whole)


def test_a_killed_part_is_continued_by_the_same_command(whole, tmp_path):
    path, seen = tmp_path / "run", []

    def kill(event):
        if event.method == "fo" and event.round == 3:
            raise Killed

    with pytest.raises(Killed):
        nufed.run(CONFIG, out=path, part=(1, 2), on_progress=kill)
    nufed.run(CONFIG, out=path, part=(1, 2), on_progress=seen.append)
    resumed = next(event for event in seen if event.method == "fo")
    assert resumed.starts and resumed.round == 3
    nufed.resume(path)
    assert file_hashes(path) == file_hashes(whole)


def test_a_kill_while_the_run_is_created_leaves_what_others_can_start_from(whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole / "splits", path / "splits")
    (path / "splits" / "seed-1.json").unlink()
    (path / ".config.toml.tmp").write_text("rounds = ")
    nufed.run(CONFIG, out=path, part=(1, 1))
    nufed.resume(path)
    hashes = file_hashes(path)
    assert hashes.pop(".config.toml.tmp", None) is None
    assert hashes == file_hashes(whole)


def test_another_configuration_or_other_data_are_refused_in_one_sentence(tmp_path):
    path, small = tmp_path / "run", {**CONFIG, "rounds": 1, "baselines": []}
    nufed.run(small, out=path, part=(1, 4))
    message = "holds another run (rounds was 1 and is 2): give the same settings and data"
    with pytest.raises(RunError, match=message.replace("(", r"\(").replace(")", r"\)")):
        nufed.run({**small, "rounds": 2}, out=path, part=(2, 4))
    split = path / "splits" / "seed-0.json"
    write_sealed(split, {**read_sealed(split).about, "sha256": "0" * 64})
    with pytest.raises(RunError, match="the SHA-256 of the split of seed 0"):
        nufed.run(small, out=path, part=(2, 4))


def test_a_part_in_use_is_refused_and_so_is_collecting(tmp_path):
    path, small = tmp_path / "run", {**CONFIG, "rounds": 1, "baselines": []}
    setup = Setup.make(Problem.make(load_config(small)))
    with shared_run(setup, path, (1, 2)) as own:
        name = f"{own.parts[0].method}-seed-{own.parts[0].seed}"
        with pytest.raises(RunError, match=f"{LOCKS}/{name} is in use by another run"):
            nufed.run(small, out=path, part=(1, 2))
        with pytest.raises(RunError, match="is in use by another run"):
            nufed.resume(path)
        nufed.run(small, out=path, part=(2, 2))  # the others are free
    nufed.resume(path)
    assert not (path / LOCKS).exists()


def test_the_estimated_work_of_a_tuned_baseline_counts_its_trainings():
    def work(**changes):
        data = {**CONFIG["data"], "validation": 0.25}
        config = load_config({**CONFIG, "baselines": ["local"], "data": data, **changes})
        parts = parts_of(Setup.make(Problem.make(config)))
        return {part.method: part.work for part in parts}

    once, tuned = work(), work(tune_local=True)
    # five coarse step sizes, and the chosen one again
    assert tuned.pop(BASELINE_PART) == 6 * once.pop(BASELINE_PART) and tuned == once


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        nufed.run(CONFIG, out=tmp_path, part=(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("part", ["3", "0/4", "5/4", "a/b", "3/", "-1/4", "1/4/2", "", "1.0/2"])
def test_a_wrong_part_is_one_sentence(part):
    with pytest.raises(InputError, match=r"--part .*: must be the part, from 1, and the number"):
        parse_share(part)


@pytest.mark.parametrize("part", [(0, 4), (5, 4), (1.0, 2), (True, 2), (1, 2, 3)])
def test_so_it_is_in_python(part):
    with pytest.raises(InputError, match=r"part = .*: must be two whole numbers"):
        check_share(part)


def test_a_part_needs_a_directory():
    with pytest.raises(InputError, match="give --out DIR"):
        nufed.run(CONFIG, part=(1, 2))


def array(task, first, last, count, step=None):
    values = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{k}": str(v) for k, v in values.items() if v is not None}


def test_the_part_of_a_slurm_task():
    assert slurm_share({"SLURM_JOB_ID": "7"}) is None
    assert slurm_share(array(0, 0, 15, 16)) == (1, 16)  # --array=0-15
    assert slurm_share(array(16, 1, 16, 16, 1)) == (16, 16)  # --array=1-16
    assert slurm_share(array(9, 1, 13, 4, 4)) == (3, 4)  # --array=1-15:4
    assert slurm_share(array(5, 5, 5, 1, 1)) == (1, 1)  # --array=5
    for irregular in (array(5, 1, 9, 3, 1), array(3, 1, 13, 4, 4), {"SLURM_ARRAY_TASK_ID": "3"}):
        with pytest.raises(InputError, match="give the part, for example --part"):
            slurm_share(irregular)


def test_on_the_command_line(nufed, tmp_path, monkeypatch):
    small = ["quickstart", "rounds=1", "seeds=[0]", "baselines=[]", "workers=1"]
    small += ["data.agents=4", "data.unseen_agents=0", "methods={gmeta={}}"]
    out = ("--out", "run")
    for key, value in array(2, 0, 2, 3).items():
        monkeypatch.setenv(key, value)
    done = nufed("run", *small, *out, cwd=tmp_path)  # there is one part for three tasks
    assert done.returncode == 0, done.stderr
    assert "part 3/3 of the run, from SLURM_ARRAY_TASK_ID" in done.stderr
    assert "0 of 1 methods and seeds of run are done" in done.stdout
    assert "nufed run --resume run" in done.stdout
    done = nufed("run", *small, *out, "--part", "1/3", cwd=tmp_path)
    assert "1 of 1 methods and seeds of run are done" in done.stdout
    done = nufed("run", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "run/results.json").exists(), done.stderr
    done = nufed("run", *small, "--out", "other", "--part", "all", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "other/results.json").exists(), done.stderr
    for wrong, sentence in (
        (("quickstart", "--part", "4/3", *out), "error: --part 4/3: must be the part"),
        (("--resume", "run", "--part", "1/3"), "error: --part and --resume"),
        (("quickstart", "--tuned", "--part", "1/3", *out), "error: --part and --tuned"),
        (("quickstart", "--part", "1/3"), "error: a part of a run needs the directory"),
    ):
        done = nufed("run", *wrong, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(f"nufed: {sentence}"), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
