"""Submits the parts of a run as a job array of Slurm, or as processes here, through submitit.

A job runs one command, `nufed run CONFIG --out DIR --part K/N`, so that what submitit stores and
reads back is a list of words. Before its time limit, or when it is preempted, Slurm sends it a
signal: the command then saves a checkpoint, and the job is queued again and resumes.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nufed.config import load_config
from nufed.config.trust import named_code
from nufed.errors import InputError, RunError, in_short
from nufed.experiment.run_directories import check_simulated
from nufed.files import make_private

SAVE_SECONDS = 60  # to finish a round and save it; Slurm signals 90 seconds before the limit


@dataclass(frozen=True)
class Resources:
    """What a job asks for; None: the cluster's default."""

    partition: str | None = None
    minutes: int = 60
    memory_gb: float | None = None
    cpus: int = 1


@dataclass(frozen=True)
class Submission:
    """Jobs that were submitted.

    Args:
        jobs: submitit's, one for each part.
        collects: the identifier of the job that collects; None for processes on this machine.
        command: collects by hand.
        logs: the directory of their output.
    """

    jobs: Sequence[Any]
    collects: str | None
    command: list[str]
    logs: Path

    def wait(self) -> list[str]:
        """Wait for all jobs of this machine; why some of them failed."""
        failed = []
        for number, job in enumerate(self.jobs, 1):
            job.wait()
            error = job.exception()
            if error is not None:
                said = (job.stderr() or "").strip().splitlines() or [in_short(error)]
                failed.append(f"part {number}/{len(self.jobs)}: {said[-1]}")
        return failed


@dataclass
class Command:
    """A command as a job that is queued again if it is interrupted."""

    words: list[str]
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __call__(self) -> None:
        # the signal goes to all processes of a job: only submitit handles it, and calls checkpoint
        ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._process = subprocess.Popen(self.words)
        signal.signal(signal.SIGUSR2, ignored)
        while self._process.poll() is None:  # no blocking wait, which checkpoint could not follow
            time.sleep(0.2)
        if self._process.returncode:
            raise RunError(f"it ended with exit code {self._process.returncode}")

    def checkpoint(self) -> Any:
        """Called by submitit: save, and run the same command again."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(SAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return DelayedSubmission(Command(self.words))


def submit(
    config: str,
    overrides: Sequence[str],
    out: Path,
    parts: int,
    resources: Resources,
    *,
    local: bool = False,
) -> Submission:
    """Submit a run in ``parts`` parts, and on Slurm a job that collects them.

    Args:
        config: a preset's name or a TOML file.
        overrides: ``key=value`` strings.
        out: the run directory, on a file system that all nodes share.
        parts: the number of jobs that train.
        resources: those of each job.
        local: processes on this machine, all at the same time, instead of Slurm.
    """
    checked = load_config(config, overrides)
    check_simulated(checked)
    if checked.sweep:
        raise InputError("[sweep] is for several runs: submit each of them, or remove the table")
    logs = out.with_name(f"{out.name}-jobs")
    executor = _executor(logs, "local" if local else "slurm")
    nufed = [sys.executable, "-m", "nufed.cli", "run"]
    settings = [*overrides, f"workers={resources.cpus}"]
    collect = ["nufed", "run", "--resume", str(out)] + ["--trust"] * bool(named_code(checked))
    commands = [
        Command([*nufed, config, *settings, "--out", str(out), "--part", f"{number}/{parts}"])
        for number in range(1, parts + 1)
    ]
    asked = {
        "name": f"nufed-{checked.name}",
        "timeout_min": resources.minutes,
        "mem_gb": resources.memory_gb,
        "cpus_per_task": resources.cpus,
        "slurm_partition": resources.partition,
        "slurm_array_parallelism": parts,
    }
    executor.update_parameters(**asked)
    with _submitting():
        jobs = executor.submit_array(commands)
        if local:
            return Submission(jobs, None, collect, logs)
        array = jobs[0].job_id.partition("_")[0]
        executor.update_parameters(slurm_dependency=f"afterany:{array}")
        last = executor.submit(Command([*nufed, *collect[2:]]))
    return Submission(jobs, last.job_id, collect, logs)


def _executor(logs: Path, cluster: str) -> Any:
    """Submitit's executor; an InputError if submitit or Slurm is missing."""
    try:
        import submitit
    except ImportError:
        raise InputError(
            'submitting jobs needs submitit: install it with pip install "nufed[slurm]"'
        ) from None
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise InputError(
            "sbatch is not on this machine's PATH: submit on a login node of a Slurm cluster, or "
            "give --local to start the parts as processes here"
        )
    try:
        make_private(logs)
        logs.chmod(0o700)  # also one that was there: jobs run what submitit stores in it
        return submitit.AutoExecutor(logs, cluster)
    except (RuntimeError, OSError) as error:
        raise RunError(f"jobs can't be submitted from {logs}: {in_short(error)}") from error


@contextmanager
def _submitting() -> Iterator[None]:
    """An error of sbatch as one sentence."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(f"the jobs could not be submitted: {lines[-1]}") from error
