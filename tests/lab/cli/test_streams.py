"""Output to unusual streams: other encodings, full devices, broken pipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cli.test_commands import QUICK as SHORT
from processes import NUFED

QUICK = [*SHORT, "methods={gmeta={}}", "baselines=[]", "workers=1", "--no-figures"]
NOT_UTF8 = os.fsdecode(b"run-\xff")


# runs commands one after another, each in a fork: importing torch takes two seconds
FORKS = """
import json, os, sys
from nufed.lab.cli import main

codes = []
for number, arguments in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if not pid:
        for stream in json.loads(sys.argv[2]):
            os.dup2(os.open(f"{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["nufed", *arguments]
        main()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with open("codes", "w") as file:
    json.dump(codes, file)
"""


def environment(unbuffered, changes):
    found = {**os.environ, **changes}
    found.pop("PYTHONUNBUFFERED", None)
    return found | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {})


def start(*arguments, cwd, changes=(), **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    own = environment(False, dict(changes))
    return subprocess.Popen([*NUFED, *arguments], cwd=cwd, env=own, **options)


def each(commands, folder, *, stdout=None, unbuffered=False, changes=()):
    """The exit code, output and errors of every command, in that environment."""
    written = [2] if stdout else [1, 2]
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS, json.dumps(commands), json.dumps(written)],
        cwd=folder,
        env=environment(unbuffered, dict(changes)),
        stdout=stdout,
    )
    assert process.wait() == 0
    for number, code in enumerate(json.loads((folder / "codes").read_text())):
        files = [folder / f"{number}.{stream}" for stream in (1, 2)]
        yield code, *(file.read_bytes() if file.exists() else b"" for file in files)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run whose directory has a name that is not UTF-8, printed to a strict UTF-8 stream."""
    cwd = tmp_path_factory.mktemp("work")
    utf8 = {"PYTHONIOENCODING": "utf-8:strict"}
    run = start("run", "quickstart", *QUICK, "--out", NOT_UTF8, cwd=cwd, changes=utf8)
    out, err = run.communicate()
    return cwd, run.returncode, out.decode(), err.decode()


def test_a_directory_whose_name_is_not_utf8(done, nufed):
    cwd, code, out, err = done
    assert code == 0, err
    assert out.endswith("report: run-\\udcff/report.html\n") and "Traceback" not in err
    assert "<h1>run-\\udcff</h1>" in (cwd / NOT_UTF8 / "report.html").read_text("utf-8")
    for command in (["report", NOT_UTF8], ["run", "--resume", NOT_UTF8, "rounds=3"]):
        result = nufed(*command, "--no-figures", cwd=cwd)
        assert result.returncode == 0, result.stderr
    printed = json.loads(nufed("report", NOT_UTF8, "--no-figures", "--json", cwd=cwd).stdout)
    assert Path(printed[0]["directory"]) == Path(NOT_UTF8)


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_what_an_encoding_lacks_is_escaped(done, tmp_path, encoding):
    run = str(done[0] / NOT_UTF8)
    commands = (["report", run, "--no-figures"], ["list"], ["data", "show"])
    for code, out, err in each(commands, tmp_path, changes={"PYTHONIOENCODING": encoding}):
        assert code == 0 and not err
        assert "\\u" in out.decode(encoding)  # ν, or shades of grey


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_device_is_one_sentence(done, tmp_path, unbuffered):
    run = done[0] / NOT_UTF8
    (run / "report.html").unlink(missing_ok=True)
    commands = (["list"], ["list", "--json"], ["report", str(run), "--no-figures"])
    with Path("/dev/full").open("wb") as full:
        results = list(each(commands, tmp_path, stdout=full, unbuffered=unbuffered))
    assert len(results) == 3
    for code, _, err in results:
        assert code == 2
        assert err.decode().startswith("nufed: error: standard output can't be written (No space")
        assert err.count(b"\n") == 1
    assert (run / "report.html").exists()


def test_a_full_device_for_progress_does_not_end_a_run(tmp_path):
    with Path("/dev/full").open("wb") as full:
        arguments = ["run", "quickstart", *QUICK, "--out", "run"]
        process = start(*arguments, cwd=tmp_path, stderr=full)
        out, _ = process.communicate()
    assert process.returncode == 0 and b"report: run/report.html" in out


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_broken_pipe_ends_a_command_silently(tmp_path, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    commands = (["list"], ["list", "--json"], ["run", "--help"])
    results = list(each(commands, tmp_path, stdout=writer, unbuffered=unbuffered))
    os.close(writer)
    assert results == [(141, b"", b"")] * 3  # 128 + SIGPIPE, as shells report it


def test_a_run_whose_progress_nobody_reads_can_be_resumed(tmp_path, nufed):
    arguments = ["run", "quickstart", *QUICK, "--out", "run"]
    process = start(*arguments, cwd=tmp_path, stderr=subprocess.STDOUT)
    process.stdout.close()
    assert process.wait() == 141
    assert nufed("run", "--resume", "run", "--no-figures", cwd=tmp_path).returncode == 0
