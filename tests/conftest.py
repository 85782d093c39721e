"""Settings that every test shares."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

# `make test` runs the same examples every time; `make test-slow` searches for new ones
settings.register_profile("repeatable", derandomize=True, max_examples=60, deadline=None)
settings.register_profile(
    "search", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("NUFED_HYPOTHESIS", "repeatable"))


@pytest.fixture
def nufed(monkeypatch, capsys):
    """Runs the command line in this process."""

    from nufed import cli

    def call(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["nufed", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=exit.value.code or 0, stdout=out, stderr=err)

    return call


@pytest.fixture
def real_data():
    """The data directory that the environment names; without one the test is skipped."""
    given = os.environ.get("NUFED_DATA")
    if not given:
        pytest.skip("set NUFED_DATA to a directory made by `nufed data get cifar10`")
    return Path(given)


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
