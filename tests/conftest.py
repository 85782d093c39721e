"""Settings that every test shares."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# `make test` runs the same examples every time; `make test-slow` searches for new ones
settings.register_profile("repeatable", derandomize=True, max_examples=60, deadline=None)
settings.register_profile(
    "search", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("NUFED_HYPOTHESIS", "repeatable"))


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
