"""A save that is killed or finds a full disk at any point leaves the old or the new checkpoint."""

import ctypes
import errno
import io
import os
import shutil
import signal
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import nufed
from campaigns.test_kills import CONFIG
from nufed.errors import NumericalWarning, RunError
from nufed.lab.runs.agent_states import StoredStates
from nufed.lab.runs.part_files import PartFiles, load_checkpoint
from nufed.simulation import start_method
from processes import Child, fork
from support import FSYNC, file_hashes

linux = pytest.mark.skipif(start_method() != "fork", reason="needs Linux")
BELONGS = {"configuration": "a", "data": "b", "split": "c"}
FULL_DISK = "the disk is full: free some space there and continue with `nufed run --resume`"
PAGE = 4096


def state(round):
    return {"model": torch.full((5000,), float(round))}  # five pages


def begun(folder):
    """A part resumed from its files, with one more line of metrics."""
    files = PartFiles(folder, BELONGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # of a truncated checkpoint
        saved = files.begin(rounds=99, eval_every=1)
    files.add({"round": saved.round + 10 if saved else 10})
    return files


def save(files, round):
    files.states.put(round, {3: state(round + 1), round: state(round + 2)})
    files.checkpoint(round, state(round))


@pytest.fixture
def two(tmp_path):
    """Checkpoints of rounds 10 and 20."""
    folder = tmp_path / "two"
    folder.mkdir()
    for round in (10, 20):
        files = begun(folder)
        save(files, round)
        files.close()
    return folder


def check(folder):
    """The newest checkpoint is valid, of round 20 or 30; then the next can be saved."""
    found, _ = load_checkpoint(folder, BELONGS)
    assert torch.equal(found.server["model"], state(found.round)["model"])
    states = StoredStates(folder, BELONGS, [found.round])
    for agent, value in {3: found.round + 1, 10: 12, 20: 22}.items():
        assert torch.equal(states.get(agent)["model"], state(value)["model"])
    assert found.round in (20, 30)
    files = begun(folder)
    save(files, found.round + 10)
    files.close()
    assert load_checkpoint(folder, BELONGS)[0].round == found.round + 10
    rounds = (found.round, found.round + 10)
    kept = [f"checkpoint-0000{r}.safetensors" for r in rounds]
    assert sorted(p.name for p in folder.iterdir()) == [*kept, "metrics.jsonl", "states"]
    three = {int(path.parent.name) for path in folder.glob("states/*/3.safetensors")}
    assert three <= {found.round - 10, *rounds} and three >= set(rounds)
    return found.round


libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
TRACE_ME, TO_NEXT_CALL = 0, 24


def stopped_at(work, call):
    """Kill a process at the ``call``-th entry or exit of a system call; whether it got so far."""
    pid = fork()
    if pid == 0:
        libc.ptrace(TRACE_ME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.fsync = FSYNC
        work()
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(call):
        if libc.ptrace(TO_NEXT_CALL, pid, 0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.skip(f"this system does not let a process be traced: {ctypes.get_errno()}")
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert status == 0
            return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


@linux
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_system_call_leaves_a_valid_checkpoint(two, tmp_path, tell, step):
    loaded = {20: 0, 30: 0}
    for call in range(1, 10_000, step):
        folder = shutil.copytree(two, tmp_path / "run")
        files = begun(folder)
        killed = stopped_at(lambda files=files: save(files, 30), call)
        files.close()
        loaded[check(folder)] += 1
        shutil.rmtree(folder)
        if not killed:
            break
    assert min(loaded.values()) > 10 / step  # it was killed before and after
    tell(
        f"save: killed at {sum(loaded.values()) - 1} entries and exits of system calls, in steps "
        f"of {step}: the old checkpoint loads after {loaded[20]}, the new after {loaded[30] - 1}"
    )


class Failing:
    """Counts the system calls of a save, and lets one of them fail."""

    def __init__(self, patch, at, number=errno.ENOSPC):
        self.at, self.number, self.calls = at, number, 0
        for name in ("open", "fsync", "replace", "unlink"):
            patch.setattr(os, name, self.wrap(getattr(os, name)))
        opened = self.wrap(io.open)
        patch.setattr(io, "open", lambda *args, **kwargs: File(opened(*args, **kwargs), self.wrap))

    def wrap(self, function):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at:
                raise OSError(self.number, os.strerror(self.number))
            return function(*args, **kwargs)

        return call


class File:
    """A file whose writing may fail."""

    def __init__(self, file, wrap):
        self._file, self.fileno = file, file.fileno
        self.write, self.flush, self.close = (
            wrap(getattr(file, name)) for name in ("write", "flush", "close")
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()
        self.close()


def test_a_save_in_which_any_call_finds_the_disk_full_keeps_the_last_checkpoint(
    two, tmp_path, tell
):
    failed, at = 0, 0
    while failed == at:
        at += 1
        folder = shutil.copytree(two, tmp_path / "run")
        with pytest.MonkeyPatch.context() as patch:
            files = begun(folder)
            failing = Failing(patch, at)
            files._metrics = File(files._metrics, failing.wrap)
            try:
                save(files, 30)
            except RunError as error:
                assert FULL_DISK in str(error) and str(folder) in str(error)
                failed += 1
        files._metrics._file.close()
        check(folder)
        shutil.rmtree(folder)
    assert failing.calls == failed > 10
    tell(f"full disk: simulated at {failed} calls of a save: {failed} clear errors, 0 losses")


def on_small_disk(work, tmp_path, pages):
    """Call ``work(folder)`` in a process that has a disk of so many pages mounted there."""
    disk, refused = tmp_path / "disk", 77
    disk.mkdir()

    def alone():
        new_user, new_mounts = 0x10000000, 0x20000
        owner = os.getuid(), os.getgid()
        if libc.unshare(new_user | new_mounts):
            os._exit(refused)
        Path("/proc/self/setgroups").write_text("deny")
        for kind, number in zip(("uid", "gid"), owner, strict=True):
            Path(f"/proc/self/{kind}_map").write_text(f"0 {number} 1")
        options = f"size={pages * PAGE}".encode()
        if libc.mount(b"none", str(disk).encode(), b"tmpfs", 0, options):
            os._exit(refused)
        work(disk)

    child = Child(alone, tmp_path)
    code = child.wait()
    if code == refused:
        pytest.skip("this system does not let users mount a small disk of their own")
    assert code == 0, child.error


def filled(folder, pages):
    """Fill the disk up to so many pages; return the file that fills it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        os.truncate(filler, filler.stat().st_size - pages * PAGE)
    return filler


@linux
def test_a_save_on_a_disk_with_any_space_left_keeps_the_last_checkpoint(two, tmp_path, tell):
    def every_space(disk):
        failed, space = 0, 0
        while failed == space:
            folder = shutil.copytree(two, disk / "run")
            files, filler = begun(folder), filled(disk, space)
            try:
                save(files, 30)
            except RunError as error:
                assert FULL_DISK in str(error) and str(folder) in str(error)
                failed += 1
            files.close()
            filler.unlink()
            check(folder)
            shutil.rmtree(folder)
            space += 1
        assert failed > 5
        tell(
            f"full disk: a save with 0 … {failed - 1} pages left on a real one: "
            f"{failed} clear errors, 0 losses; {failed} pages suffice"
        )

    on_small_disk(every_space, tmp_path, pages=100)


@pytest.mark.usefixtures("no_report")
@linux
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_on_a_disk_with_any_space_left_resumes_when_there_is_more(tmp_path, tell, step):

    def every_space(disk):
        nufed.run(CONFIG, ["workers=1"], out=tmp_path / "whole")
        right, path, failed, begun = file_hashes(tmp_path / "whole"), disk / "run", 0, 0
        for space in range(0, 1000, step):
            filler = filled(disk, space)
            try:
                nufed.run(CONFIG, ["workers=1"], out=path)
                break
            except RunError as error:
                assert FULL_DISK in str(error) and str(disk) in str(error)
            failed += 1
            filler.unlink()
            if (path / "run.json").exists():
                begun += 1
                nufed.resume(path)
            else:
                shutil.rmtree(path)
                nufed.run(CONFIG, ["workers=1"], out=path)
            assert file_hashes(path) == right
            shutil.rmtree(path)
        assert file_hashes(path) == right and begun
        tell(
            f"full disk: runs with 0 … {step * (failed - 1)} pages left, in steps of {step}: "
            f"{failed} clear errors, {begun} after run.json; with space all resumed to equal "
            "hashes"
        )

    on_small_disk(every_space, tmp_path, pages=4000)
