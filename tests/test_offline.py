"""No network access: unless a download is requested, only local sockets are opened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nufed
from lab.experiment.test_resume import CONFIG

# a process that logs every socket that it or its children open
WATCHED = """
import os, socket, sys
log = os.open("sockets", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def watch(event, arguments):
    local = event in ("socket.__new__", "socket.connect", "socket.bind") and socket.AF_UNIX in (
        getattr(arguments[0], "family", None), arguments[1]
    )
    if event.startswith(("socket.", "http.", "urllib.")) and not local:
        os.write(log, f"{event} {arguments}\\n".encode())

sys.addaudithook(watch)
"""

SMALL = CONFIG | {"rounds": 1, "methods": {}, "baselines": [], "workers": 2}
USUAL = f"""
import nufed
from nufed.lab import cli
nufed.run({SMALL!r}, out="run")
for command in ("report run --no-figures", "doctor", "list", "data list", "data show"):
    sys.argv = ["nufed", *command.split()]
    try:
        cli.main()
    except SystemExit as end:
        print(command, end.code)
"""


def sockets(work, cwd):
    """The sockets that a process with that work opens."""
    path = os.pathsep.join([str(Path(nufed.__file__).parents[1]), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(cwd)}
    environment.pop("NUFED_DATA", None)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + work],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, (cwd / "sockets").read_text()


def test_a_run_and_commands_open_no_sockets(tmp_path):
    said, opened = sockets(USUAL, tmp_path)
    assert opened == ""
    for command in ("report run --no-figures 0", "list 0", "data list 0", "data show 0", "doctor"):
        assert command in said
    assert json.loads((tmp_path / "run" / "results.json").read_text())["rows"]


@pytest.mark.parametrize(
    "work",
    [
        "socket.socket()",
        "socket.getaddrinfo('localhost', 80)",
        "os.fork() or socket.socket(socket.AF_INET6)",
        "import urllib.request as r\ntry: r.urlopen('http://127.0.0.1:1')\nexcept OSError: pass",
    ],
)
def test_the_watch_sees_what_is_opened(work, tmp_path):
    assert sockets(work, tmp_path)[1].startswith(("socket.", "urllib."))


def test_the_watch_lets_local_sockets_pass(tmp_path):
    pair = "a, b = socket.socketpair(); c = socket.socket(socket.AF_UNIX); c.bind('here')"
    assert sockets(pair, tmp_path)[1] == ""
