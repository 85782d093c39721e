"""Checkpoints: written atomically, damage is detected, the newest valid one is used."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from nufed.errors import RunError
from nufed.lab.files import locked, sha256, write_durably
from nufed.lab.runs.part_files import Checkpoint, PartFiles, load_checkpoint, save_checkpoint
from nufed.lab.runs.records import Manifest

BELONGS = {"configuration": "a", "data": "b", "split": "c"}


def checkpoint(round, metrics=b"one\n"):
    generator = torch.Generator().manual_seed(round)
    vector = torch.randn(7, generator=generator)
    about = Manifest(
        round=round,
        states=(2, round + 3),
        metrics_bytes=len(metrics),
        metrics_sha256=sha256(metrics),
        belongs_to=BELONGS,
        notes={"warnings": [round]},
    )
    return Checkpoint(about, {"model": vector, "control": vector + 1})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"one\ntwo\nthr")  # truncated by a kill
    for round in (10, 20, 30):
        save_checkpoint(tmp_path, checkpoint(round))
    return tmp_path


def same(a, b):
    assert a.about == b.about and a.server.keys() == b.server.keys()
    assert all(torch.equal(a.server[name], b.server[name]) for name in a.server)


def test_the_last_two_are_kept_and_the_newest_is_read(folder):
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ["checkpoint-000020.safetensors", "checkpoint-000030.safetensors"]
    found, problems = load_checkpoint(folder, BELONGS)
    same(found, checkpoint(30))
    assert problems == []


def test_damaged_metrics_are_detected(folder):
    (folder / "metrics.jsonl").write_bytes(b"onX\ntwo\n")
    found, problems = load_checkpoint(folder, BELONGS)
    assert found is None and len(problems) == 2 and "metrics.jsonl is damaged" in problems[0]


def test_a_state_without_seal_is_not_a_checkpoint(folder):
    save_file(checkpoint(30).server, folder / "checkpoint-000030.safetensors")
    found, problems = load_checkpoint(folder, BELONGS)
    assert found.round == 20 and len(problems) == 1


@pytest.mark.parametrize("what", BELONGS)
def test_a_checkpoint_of_something_else_is_not_used(folder, what):
    found, problems = load_checkpoint(folder, {**BELONGS, what: "other"})
    assert found is None and f"belongs to another {what}" in problems[0]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, call, number):
    path = tmp_path / "file"
    write_durably(path, b"old")

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    if call == "write":
        monkeypatch.setattr("pathlib.Path.open", fail)
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr("pathlib.Path.replace", fail)
    words = "the disk is full: free some space" if number == errno.ENOSPC else "make it writable"
    with pytest.raises(RunError, match=words):
        write_durably(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_second_run_is_refused_and_a_crash_leaves_no_lock(tmp_path):
    hold = (
        "import time\nfrom pathlib import Path\nfrom nufed.lab.files import locked\n"
        f"with locked(Path({str(tmp_path)!r})):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match="in use by another run"), locked(tmp_path):
            pass
        process.kill()
    with locked(tmp_path):
        pass


def test_metrics_resume_from_the_checkpoint(tmp_path):
    whole = PartFiles(tmp_path, BELONGS)
    assert whole.begin(rounds=9, eval_every=1) is None
    for round in range(3):
        whole.add({"round": round})
    whole.checkpoint(2, {"model": torch.zeros(2)})
    whole.add({"round": 3})
    whole.close()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"rou')  # killed in the middle of a line
    again = PartFiles(tmp_path, BELONGS)
    assert again.begin(rounds=9, eval_every=1).round == 2
    again.add({"round": 3})
    again.checkpoint(3, {"model": torch.zeros(2)})
    again.close()
    lines = metrics.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]
    assert load_checkpoint(tmp_path, BELONGS)[0].round == 3
