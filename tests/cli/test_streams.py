"""Output to unusual streams: other encodings, full devices, broken pipes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cli.test_commands import QUICK
from processes import NUFED

NOT_UTF8 = os.fsdecode(b"run-\xff")


def start(*arguments, cwd, unbuffered=False, **options):
    environment = {**os.environ, **options.pop("environment", {})}
    environment.pop("PYTHONUNBUFFERED", None)
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*NUFED, *arguments], cwd=cwd, env=environment, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run whose directory has a name that is not UTF-8, printed to a strict UTF-8 stream."""
    cwd = tmp_path_factory.mktemp("work")
    utf8 = {"PYTHONIOENCODING": "utf-8:strict"}
    run = start("run", "quickstart", *QUICK, "--out", NOT_UTF8, cwd=cwd, environment=utf8)
    out, err = run.communicate(timeout=200)
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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_escaped(done, encoding):
    cwd, *_ = done
    for command in (["report", NOT_UTF8, "--no-figures"], ["list"], ["data", "show"]):
        narrow = {"PYTHONIOENCODING": encoding}
        process = start(*command, cwd=cwd, environment=narrow)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0 and not err
        assert "\\u" in out.decode(encoding)  # ν, or shades of grey


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_device_is_one_sentence(done, unbuffered):
    cwd, *_ = done
    for command in (["list"], ["list", "--json"], ["report", NOT_UTF8, "--no-figures"]):
        (cwd / NOT_UTF8 / "report.html").unlink(missing_ok=True)
        with Path("/dev/full").open("wb") as full:
            process = start(*command, cwd=cwd, unbuffered=unbuffered, stdout=full)
            _, err = process.communicate(timeout=100)
        assert process.returncode == 2
        assert err.decode().startswith("nufed: error: standard output can't be written (No space")
        assert err.count(b"\n") == 1
    assert (cwd / NOT_UTF8 / "report.html").exists()


def test_a_full_device_for_progress_does_not_end_a_run(tmp_path):
    with Path("/dev/full").open("wb") as full:
        arguments = ["run", "quickstart", *QUICK, "--no-figures", "--out", "run"]
        process = start(*arguments, cwd=tmp_path, stderr=full)
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and b"report: run/report.html" in out


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["run", "--help"]])
def test_a_broken_pipe_ends_a_command_silently(tmp_path, command, unbuffered):
    process = start(*command, cwd=tmp_path, unbuffered=unbuffered)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(100) == 141  # 128 + SIGPIPE, as shells report it


def test_a_run_whose_progress_nobody_reads_can_be_resumed(tmp_path, nufed):
    arguments = ["run", "quickstart", *QUICK, "--no-figures", "--out", "run"]
    process = start(*arguments, cwd=tmp_path, stderr=subprocess.STDOUT)
    process.stdout.close()
    assert process.wait(100) == 141
    assert nufed("run", "--resume", "run", "--no-figures", cwd=tmp_path).returncode == 0
