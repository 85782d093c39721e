"""Directories of runs, sites and keys are accessible by their owner only, under any umask."""

import os

import pytest
import torch

from nufed.errors import RunError
from nufed.flower.app.site import SiteRecord, save_record
from nufed.flower.ops import local
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.site_runner import make_folder
from nufed.lab.runs import RunDirectory


@pytest.fixture(autouse=True)
def _usual_umask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


def test_a_run_directory(tmp_path):
    for made in (RunDirectory.create("new"), RunDirectory.create("new", tmp_path / "a" / "b")):
        assert mode(made.path) == 0o700
    assert mode(tmp_path / "runs") == mode(tmp_path / "a") == 0o755


def test_an_existing_directory_keeps_its_mode(tmp_path):
    (tmp_path / "mine").mkdir(0o750)
    RunDirectory.create("new", tmp_path / "mine")
    assert mode(tmp_path / "mine") == 0o750


def test_a_sites_folder(tmp_path):
    make_folder(tmp_path / "made")
    save_record(tmp_path / "site" / "run" / "agent-0", SiteRecord(after={"w": torch.ones(2)}))
    for folder in ("made", "site", "site/run"):
        assert mode(tmp_path / folder) == 0o700


def test_folders_of_keys(tmp_path):
    make_authority(tmp_path / "keys")
    make_site_key(tmp_path / "site" / "key")
    assert mode(tmp_path / "keys") == mode(tmp_path / "site") == 0o700


def test_folders_of_a_local_federation(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RunError("no server")

    monkeypatch.setattr(local, "start_superlink", fail)
    with pytest.raises(RunError, match="no server"):
        local.run_locally(tmp_path, 2, tmp_path / "run", insecure=True, say=print)
    beside = tmp_path / "run-federation"
    assert {mode(path) for path in (beside, *beside.iterdir())} == {0o700}
    assert {path.name for path in beside.iterdir()} == {"site-0", "site-1"}
