"""`nufed doctor`: one screen of findings and advice, and an exit code."""

import json
from pathlib import Path

import pytest

from nufed.lab.cli import doctor


@pytest.fixture
def healthy(tmp_path, monkeypatch):
    monkeypatch.setenv("NUFED_DATA", str(tmp_path / "data"))
    return tmp_path


def test_a_healthy_machine(healthy, nufed):
    done = nufed("doctor", cwd=healthy)
    assert done.returncode == 0, done.stdout
    assert "nufed data get cifar10" in done.stdout.replace("\n", "")
    assert len(done.stdout.splitlines()) < 30
    findings = json.loads(nufed("doctor", "--json", cwd=healthy).stdout)
    states = {finding["name"]: finding["state"] for finding in findings}
    assert states["Python"] == states["torch"] == states["disk"] == "ok"
    assert states["cifar10"] == "note"


@pytest.mark.parametrize(
    ("name", "setting", "value", "advice"),
    [
        ("Python", "MIN_PYTHON", (9, 9), "install Python 9.9"),
        ("torch", "MIN_TORCH", (9, 9), "install torch 9.9"),
        ("memory", "MIN_MEMORY", 1e9, "free some"),
        ("disk", "MIN_DISK", 1e9, "free some space"),
    ],
)
def test_what_is_too_little_is_a_problem(healthy, nufed, monkeypatch, name, setting, value, advice):
    if name == "memory" and not Path("/proc/meminfo").exists():
        pytest.skip("this system does not tell how much memory is free")
    monkeypatch.setattr(doctor, setting, value)
    done = nufed("doctor", "--json", cwd=healthy)
    (found,) = [f for f in json.loads(done.stdout) if f["name"] == name]
    assert found["state"] == "problem" and advice in found["advice"] and done.returncode == 1


def test_damaged_data_is_a_problem(healthy, nufed):
    file = healthy / "data" / "cifar-100-binary" / "train.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not it")
    done = nufed("doctor", cwd=healthy)
    assert done.returncode == 1 and "damaged" in done.stdout


def test_a_directory_that_cannot_be_written_is_a_problem(healthy, nufed, monkeypatch):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    done = nufed("doctor", cwd=healthy)
    assert done.returncode == 1 and "Read-only file system" in done.stdout.replace("\n", " ")
