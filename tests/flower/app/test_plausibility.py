"""Honest noisy updates are never rejected, whatever else is."""

import math

import pytest
import torch

from nufed.flower.app.privacy import FALSE_REJECTION, Privacy, implausible, protect
from nufed.server.checks import Unreadable


def received(dimension, dtype=torch.float32, scale=1.0):
    half = dimension // 2
    sizes = {"model": dimension - half, **({"control": half} if half else {})}
    generator = torch.Generator().manual_seed(dimension)
    return {n: (scale * torch.randn(s, generator=generator)).to(dtype) for n, s in sizes.items()}


@pytest.mark.parametrize("dimension", [1, 2, 3, 10, 1000, 100_000])
@pytest.mark.parametrize("noise", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 1.0), (torch.float32, 1e4), (torch.float64, 1.0)]
)
def test_what_an_honest_site_sends_is_accepted(dimension, noise, dtype, scale):
    before, privacy = received(dimension, dtype, scale), Privacy(clip=0.5, noise=noise)
    for move in (0.0, 1e-3, 1.0):  # unchanged, and changes below and above the clipping norm
        after = {name: vector + move for name, vector in before.items()}
        for _ in range(20 if dimension < 1000 else 2):
            assert implausible(protect(after, before, privacy), before, privacy) is None


@pytest.mark.parametrize("dimension", [1, 2, 100, 10_000])
def test_the_bounds_hold_with_the_exact_tails_of_the_chi_distribution(dimension):
    stats = pytest.importorskip("scipy.stats")
    root = math.sqrt(2 * math.log(3 / FALSE_REJECTION))
    assert stats.chi.logsf(math.sqrt(dimension) + root, dimension) < math.log(FALSE_REJECTION / 3)
    least = dimension / math.sqrt(dimension + 1) - root
    if least > 0:
        assert stats.chi.logcdf(least, dimension) < math.log(FALSE_REJECTION / 3)
    spread = math.sqrt(2 * math.log(3 * dimension / FALSE_REJECTION))
    both = math.log(2 * dimension) + stats.norm.logsf(spread)
    assert both < math.log(FALSE_REJECTION / 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v: v * 0 + 1e15, "has norm"),
        (lambda v: v + 0.4 * torch.ones(5000), "has norm"),  # within the bound of each number
        (lambda v: v + 8.0 * torch.eye(5000)[7], "has a number"),  # within the bound of the norm
        (lambda v: v * 0, "below"),  # no noise
    ],
)
def test_what_can_not_be_clipped_and_noisy_is_named(change, reason):
    privacy, before = Privacy(clip=0.5, noise=1.0), {"model": torch.zeros(5000)}
    honest = protect(before, before, privacy)
    assert implausible(honest, before, privacy) is None
    found = implausible({"model": change(honest["model"])}, before, privacy)
    assert reason in found and found.endswith("with probability below 1e-20")


def test_several_vectors_are_tested_jointly():
    """Each is within the bound of its own size, both together are not."""
    privacy = Privacy(clip=0.5, noise=1.0)
    before = {"model": torch.zeros(400), "control": torch.zeros(400)}
    length = 0.5 + 0.5 * (20 + 9.7)
    sent = {name: torch.full((400,), length / 20) for name in before}
    assert implausible({"model": sent["model"]}, before, privacy) is None
    assert "above" in implausible(sent, before, privacy)


@pytest.mark.parametrize(
    "vectors",
    [
        {"model": torch.full((3,), float("nan"))},
        {"model": torch.zeros(4)},
        {"model": Unreadable("is not an array")},
        {"other": torch.zeros(3)},
    ],
)
def test_what_other_checks_reject_is_left_to_them(vectors):
    assert implausible(vectors, {"model": torch.zeros(3)}, Privacy(clip=0.5, noise=1.0)) is None
