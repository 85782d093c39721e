"""``device = "auto"``."""

import pytest

from nufed.lab.config import devices, load_config


@pytest.mark.parametrize(
    "usable, picked",
    [("", "cpu"), ("mps", "mps"), ("xpu mps", "xpu"), ("cuda xpu mps", "cuda")],
)
def test_auto_is_the_first_accelerator_that_can_be_used(usable, picked, monkeypatch):
    for name in devices.ACCELERATORS:
        monkeypatch.setitem(devices.ACCELERATORS, name, lambda name=name: name in usable.split())
    config = load_config({"device": "auto"})
    assert config.device == picked  # as the run records it
    assert load_config({"device": "cuda:1"}).device == "cuda:1"


def test_the_default_is_the_cpu():
    assert load_config({}).device == "cpu"
