"""Several processes that train the parts of one run, as a job array of Slurm or on this machine.

Process k of n trains every n-th part, longest first, in a directory on a shared file system. The
directory's lock is held only while a process starts; each part has its lock while it is trained.
`nufed run --resume` collects: it refuses while a part is locked, trains what is missing and writes
the report.

:func:`submit` starts the processes through submitit. A job runs one command, `nufed run CONFIG
--out DIR --part K/N`, so that what submitit stores and reads back is a list of words. Before its
time limit, or when it is preempted, Slurm sends it a signal: the command then saves a checkpoint,
and the job is queued again and resumes.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from nufed.errors import InputError, RunError, in_short, shown
from nufed.lab.config.trust import named_code
from nufed.lab.experiment.jobs import RunPart
from nufed.lab.experiment.setup import Setup, begin_run, load_one_run
from nufed.lab.experiment.training import parts_of
from nufed.lab.files import locked, make_private
from nufed.lab.runs import RunDirectory
from nufed.lab.runs.provenance import Provenance

Share: TypeAlias = tuple[int, int]
"""The number of a process, from 1, and how many there are."""

LOCKS = "locks"
START_SECONDS = 300  # to wait while other processes start
SLURM = "SLURM_ARRAY_TASK_"


@dataclass(frozen=True)
class SharedRun:
    """A run that this process trains some parts of."""

    setup: Setup
    directory: RunDirectory
    parts: list[RunPart]


@contextmanager
def shared_run(setup: Setup, out: Path, share: Share) -> Iterator[SharedRun]:
    """Create the run, or join it if another process has; hold the locks of this process's parts."""
    parts = chosen_parts(parts_of(setup), share)
    directory = RunDirectory.shared(out)
    with ExitStack() as held:
        with locked(directory.path, wait=START_SECONDS):
            setup = _started(setup, directory)
            make_private(directory.path / LOCKS)
            for part in parts:
                held.enter_context(
                    locked(directory.path / LOCKS, f"{part.method}-seed-{part.seed}")
                )
        yield SharedRun(setup, directory, parts)


def _started(setup: Setup, directory: RunDirectory) -> Setup:
    """Write the start of the run; if it was written before, check that it is the same run."""
    if not (directory.path / "run.json").exists():
        begin_run(setup, directory)
        return setup
    provenance = Provenance(directory)
    splits = {seed: f.split.fingerprint for seed, f in setup.problem.federations.items()}
    provenance.check_same(setup.config, setup.samples.fingerprint, splits)
    provenance.write_resumed(setup.config)
    return replace(setup, engine_names=provenance.engines())


def end_sharing(directory: RunDirectory) -> None:
    """Refuse if a process still trains a part, else remove the locks of parts.

    The directory's lock must be held, without which no process locks a part.
    """
    folder = directory.path / LOCKS
    for path in sorted(folder.glob("*")):
        with locked(folder, path.name):
            pass
    shutil.rmtree(folder, ignore_errors=True)


def chosen_parts(parts: Sequence[RunPart], share: Share) -> list[RunPart]:
    """Every n-th part, longest first, so that processes get about the same work.

    >>> parts = [RunPart(0, name, work) for name, work in (("a", 1), ("b", 4), ("c", 2))]
    >>> [part.method for part in chosen_parts(parts, (1, 2))]
    ['b', 'a']
    """
    number, total = share
    return sorted(parts, key=lambda part: -part.work)[number - 1 :: total]


def check_share(share: Share) -> Share:
    """The share itself, if it is valid; else an InputError."""
    whole = len(share) == 2 and all(type(value) is int for value in share)
    if not whole or not 1 <= share[0] <= share[1]:
        raise InputError(
            f"part = {shown(share)}: must be two whole numbers, the part from 1 and the number of "
            "parts, for example (3, 16)"
        )
    return share


def parse_share(text: str) -> Share:
    """A part as on the command line.

    >>> parse_share("3/16")
    (3, 16)
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(
            f"--part {text}: must be the part, from 1, and the number of parts, for example 3/16, "
            "or `all`"
        )
    return int(match[1]), int(match[2])


def slurm_share(environ: Mapping[str, str]) -> Share | None:
    """The part of a task of a Slurm job array; None outside of one.

    >>> sized = {"MIN": "0", "MAX": "30", "STEP": "2", "COUNT": "16"}
    >>> array = {f"SLURM_ARRAY_TASK_{key}": value for key, value in sized.items()}
    >>> slurm_share({**array, "SLURM_ARRAY_TASK_ID": "4"})
    (3, 16)
    """
    if f"{SLURM}ID" not in environ:
        return None
    try:
        task, first, last, count = (int(environ[SLURM + n]) for n in ("ID", "MIN", "MAX", "COUNT"))
        step = int(environ.get(f"{SLURM}STEP") or 1)
        number, rest = divmod(task - first, step)
        if rest or last != first + (count - 1) * step or not 0 <= number < count:
            raise ValueError
    except (KeyError, ValueError, ZeroDivisionError):
        task_id = environ[f"{SLURM}ID"]
        raise InputError(
            f"{SLURM}ID = {shown(task_id)} is not one of a range of tasks with a fixed step, whose "
            f"parts could be numbered: give the part, for example --part {task_id}/16"
        ) from None
    return number + 1, count


SAVE_SECONDS = 60  # to finish a round and save it; Slurm signals 90 seconds before the limit


@dataclass(frozen=True)
class Resources:
    """The resources of a job; None: the cluster's default."""

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
        command: the command that collects them.
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
        # all processes of a job get the signal: only submitit handles it, and calls checkpoint
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
    checked = load_one_run(config, overrides)
    logs = out.with_name(f"{out.name}-jobs")
    executor = _executor(logs, "local" if local else "slurm")
    nufed = [sys.executable, "-m", "nufed", "run"]
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
