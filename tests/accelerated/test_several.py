"""Several accelerators: a spawned process each, with the CPU's files."""

from pathlib import Path

import pytest

import accelerator
import nufed
from accelerated.test_runs import trained
from accelerator import NAME
from nufed.lab.config import load_config
from nufed.lab.experiment.setup import worker_count

# in a new interpreter: two devices, and a note of which one it uses
CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import accelerator
accelerator.Backend.device_count = lambda self: 2
accelerator.Backend.set_device = lambda self, number: (
    Path({folder!r}, f"device-{{number}}").touch()
)
"""


@pytest.fixture
def two_devices(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    tests = str(Path(accelerator.__file__).parent)
    (site / "sitecustomize.py").write_text(CHILD.format(tests=tests, folder=str(site)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(accelerator.Backend, "device_count", lambda self: 2)
    return site


def test_methods_are_spread_over_two_devices(two_devices, tmp_path):
    right = trained(tmp_path / "cpu", "cpu")
    assert trained(tmp_path / NAME, NAME) == right
    used = {path.name for path in two_devices.glob("device-*")}
    assert used == {"device-0", "device-1"}


def test_as_many_workers_as_devices(two_devices):
    def workers(device, number="auto"):
        return worker_count(load_config({"device": device, "workers": number}))

    assert workers(NAME) == 2 and workers(f"{NAME}:0") == 1
    with pytest.raises(nufed.InputError, match="workers = 3: must be 2 or fewer, because device"):
        workers(NAME, 3)
