"""`nufed submit`: what Slurm is given, and a run through submitit's local executor."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

import nufed as library
from lab.experiment.test_array_parts import CONFIG
from nufed.errors import InputError, RunError
from nufed.lab.config import load_config
from nufed.lab.experiment.array import Command, Resources, submit
from processes import Child, state_and_parent, wait_for
from support import file_hashes

pytest.importorskip("submitit", reason='no submitit: pip install "nufed[slurm]"')

SBATCH = """#!/bin/sh
cp "$1" "$SUBMITTED/$(ls "$SUBMITTED" | wc -l)"
echo "Submitted batch job $((100 + $(ls "$SUBMITTED" | wc -l)))"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands with Slurm's names; the files given to sbatch are kept."""
    commands, submitted = tmp_path / "bin", tmp_path / "submitted"
    commands.mkdir()
    submitted.mkdir()
    for name in ("sbatch", "srun"):
        (commands / name).write_text(SBATCH)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SUBMITTED", str(submitted))
    return submitted


def directives(path):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", path.read_text(), re.MULTILINE))


def test_slurm_is_given_an_array_and_a_job_that_collects_it(slurm, tmp_path):
    out = tmp_path / "runs" / "mine"
    asked = Resources("cpu", minutes=90, memory_gb=4, cpus=2)
    found = submit("quickstart", ["rounds=3"], out, 16, asked)
    array, last = (directives(slurm / name) for name in "01")
    assert array["array"] == "0-15%16"
    for job in (array, last):
        assert job["partition"] == "cpu" and job["time"] == "90" and job["mem"] == "4GB"
        assert job["cpus-per-task"] == "2" and job["job-name"] == "nufed-quickstart"
    assert "dependency" not in array
    assert last["dependency"] == "afterany:101" and found.collects == "102"
    assert found.command == ["nufed", "run", "--resume", str(out)]
    words = [job.submission().function.words for job in found.jobs]
    nufed = [sys.executable, "-m", "nufed", "run"]
    settings = ["quickstart", "rounds=3", "workers=2", "--out", str(out)]
    assert words == [[*nufed, *settings, "--part", f"{k}/16"] for k in range(1, 17)]
    assert not out.exists() and Path(array["output"]).parent == found.logs


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_user_can_write_what_jobs_will_run(slurm, tmp_path, exists):
    before = os.umask(0o002)
    try:
        if exists:
            (tmp_path / "run-jobs").mkdir(0o775)
        found = submit("quickstart", [], tmp_path / "run", 2, Resources())
    finally:
        os.umask(before)
    assert found.logs.stat().st_mode & 0o777 == 0o700
    assert list(found.logs.rglob("*.pkl"))


def test_what_cannot_be_submitted_is_one_sentence(slurm, tmp_path, monkeypatch):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    with pytest.raises(RunError, match=r"the jobs could not be submitted: .*no such partition"):
        submit("quickstart", [], tmp_path / "run", 4, Resources())
    with pytest.raises(InputError, match="rounds = -1"):
        submit("quickstart", ["rounds=-1"], tmp_path / "run", 4, Resources())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"sbatch is not on this machine's PATH.*--local"):
        submit("quickstart", [], tmp_path / "run", 4, Resources())


def test_a_job_is_its_command_and_fails_with_it(tmp_path):
    Command([sys.executable, "-c", f"open({str(tmp_path / 'made')!r}, 'w')"])()
    assert (tmp_path / "made").exists()
    with pytest.raises(RunError, match="exit code 3"):
        Command([sys.executable, "-c", "raise SystemExit(3)"])()


WAITS = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path("waiting").touch()
time.sleep(60)
"""


def test_before_the_time_limit_a_job_saves_and_is_submitted_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Command([sys.executable, "-c", WAITS])

    def at_the_limit(*_):
        again = job.checkpoint()
        assert again.function == Command(job.words)
        os._exit(7)

    def work():
        signal.signal(signal.SIGUSR2, at_the_limit)
        job()

    process = Child(work, tmp_path)
    wait_for((tmp_path / "waiting").exists)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: state_and_parent(stat)[0] == "S")  # it waits for the command
    os.killpg(process.pid, signal.SIGUSR2)  # as Slurm does, to all processes of the job
    assert process.wait() == 7
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_run_submitted_to_processes_here_has_the_bytes_of_an_ordinary_one(nufed, tmp_path):
    (tmp_path / "mine.toml").write_text(load_config(CONFIG).to_toml())
    library.run(tmp_path / "mine.toml", out=tmp_path / "whole")
    done = nufed(*("submit", "mine.toml", "--out", "run", "--parts", "3", "--local"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 parts of run submitted; their output is in run-jobs" in done.stdout
    assert "report: run/report.html" in done.stdout and "warning" not in done.stderr
    assert file_hashes(tmp_path / "run") == file_hashes(tmp_path / "whole")
