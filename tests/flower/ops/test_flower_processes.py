"""All started processes are always terminated; tested with Python in place of Flower."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

import nufed.flower.ops.flower_processes as processes
from nufed.flower.ops.flower_processes import flower
from processes import Child, alive, children, wait_for

PYTHON = Path(sys.executable).name

# starts a process in a new session, as a SuperLink does; both write their PIDs
PARENT = """
import subprocess, sys
stay = "import os, sys, time; open(sys.argv[1] + f'/{os.getpid()}', 'w'); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", stay, sys.argv[1]], start_new_session=True)
exec(stay)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@contextmanager
def disposition(number, handler):
    """What this process does on a signal, however the tests were started: nohup and & ignore it."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def start(commands, folder, before=""):
    """A running process and a detached child of it; returns their PIDs."""
    folder.mkdir()
    process = commands.start(PYTHON, "-c", before + PARENT, str(folder))
    wait_for(lambda: len(list(folder.iterdir())) == 2)
    pids = {int(path.name) for path in folder.iterdir()}
    assert process.pid in pids and set(commands.alive()) == pids == alive(pids)
    return pids


def test_nothing_is_left_after_a_normal_end(tmp_path):
    with flower() as commands:
        pids = start(commands, tmp_path / "ids")
        home = commands.home
    assert not alive(pids) and not home.exists()


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), flower() as commands:
        pids = start(commands, tmp_path / "ids")
        raise ZeroDivisionError
    assert not alive(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal_which_acts_as_ctrl_c(tmp_path, number):
    with disposition(number, signal.SIG_DFL):
        with pytest.raises(KeyboardInterrupt), flower() as commands:
            pids = start(commands, tmp_path / "ids")
            os.kill(os.getpid(), number)
        assert not alive(pids)
        assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_under_nohup_stays_ignored(tmp_path, number):
    with disposition(number, signal.SIG_IGN):
        with flower() as commands:
            pids = start(commands, tmp_path / "ids")
            os.kill(os.getpid(), number)
            assert alive(pids) == pids
        assert not alive(pids)
        assert signal.getsignal(number) is signal.SIG_IGN


def test_a_process_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.3)
    with flower() as commands:
        pids = start(commands, tmp_path / "ids", STUBBORN)
    assert not alive(pids)


def test_a_second_signal_does_not_prevent_termination(tmp_path, monkeypatch):
    end = processes.Flower.end

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        end(self)

    monkeypatch.setattr(processes.Flower, "end", interrupted)
    with disposition(signal.SIGINT, signal.default_int_handler), flower() as commands:
        pids = start(commands, tmp_path / "ids")
    assert not alive(pids)


def test_started_processes_are_terminated_when_this_one_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its home is not removed

    def work():
        with flower() as commands:
            commands.start(PYTHON, "-c", "import time; time.sleep(600)")
            signal.pause()

    child = Child(work, tmp_path)
    wait_for(lambda: children(child.pid))
    (started,) = children(child.pid)
    wait_for(lambda: b"time.sleep" in cmdline(started) and b"prctl" not in cmdline(started))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    wait_for(lambda: not alive({started}))


@pytest.mark.parametrize("killed", [False, True])
def test_no_process_is_started_by_one_that_has_been_killed(tmp_path, killed):
    """It may die before the kernel is told to end the process with it."""
    command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", tmp_path / "started"]
    parent = str(os.getppid() if killed else os.getpid())
    subprocess.run([sys.executable, "-c", processes.LAUNCH, parent, *command], check=True)
    assert (tmp_path / "started").exists() is not killed


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_other_processes_with_a_similar_home_are_left_alone(tmp_path):
    with flower() as others:
        pids = start(others, tmp_path / "ids")
        with flower() as commands:
            commands.home = Path(f"{others.home}-not")
            assert commands.alive() == []
        assert alive(pids) == pids


def test_a_command_gives_its_exit_code_and_what_it_printed():
    with flower() as commands:
        assert commands.call(PYTHON, "-c", "print('so'); raise SystemExit(3)") == (3, "so\n")
        code, _ = commands.call(PYTHON, "-c", "import time; time.sleep(600)", seconds=0.2)
        assert code == -signal.SIGKILL
