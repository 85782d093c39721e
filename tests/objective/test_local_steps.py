"""Steps in place: the bits of a gradient and a step, also of running statistics."""

import pytest
import torch
from torch import nn

from nufed import Objective
from nufed.models import cnn_groupnorm, fcnn

SHAPES = {"fcnn": (2, 3), "cnn": (1, 8, 8), "norms": (6,)}


def example(name, dtype):
    torch.manual_seed(0)
    norms = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)
    module = {
        "fcnn": fcnn((2, 3), 4, hidden=(7, 5)),
        "cnn": cnn_groupnorm((1, 8, 8), 4),
        "norms": nn.Sequential(*norms),
    }[name]
    objective = Objective(module.to(dtype), running_stats="tracked")
    batch = torch.randn(9, *SHAPES[name], dtype=dtype), torch.randint(0, 4, (9,)), 5
    return objective, objective.initial(), batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["all", "head", "*.bias", "none"])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_in_place_have_the_bits_of_gradients_and_steps(name, part, dtype):
    objective, start, batch = example(name, dtype)
    part, right = objective.part(part), start
    for _ in range(2):
        moved = torch.sub(right, objective.grad(right, batch), alpha=0.1)
        right = part.put(right, part.take(objective.track(moved, batch, at=right)))
    w, whole = start.clone(), part.name == "all"
    objective.descend(w, iter([batch, batch]), 0.1, None if whole else part)
    assert torch.equal(w, right) and torch.equal(w, start) == (part.size == 0)
    assert torch.equal(objective.grad(start, batch), example(name, dtype)[0].grad(start, batch))


@pytest.mark.parametrize("part", ["all", "head", "*.bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_in_place_with_a_proximal_term(name, part):
    objective, start, batch = example(name, torch.float64)
    part, centre, right = objective.part(part), torch.ones_like(start), start
    for _ in range(2):
        moved = right - 0.1 * (objective.grad(right, batch) + 0.5 * (right - centre))
        right = part.put(right, part.take(objective.track(moved, batch, at=right)))
    w = start.clone()
    objective.descend(w, [batch, batch], 0.1, part, pull=(0.5, centre))
    assert torch.allclose(w, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("part", ["all", "head", "*.bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_in_place_with_a_shift_of_the_gradient(name, part):
    objective, start, batch = example(name, torch.float32)
    part, shift, right = objective.part(part), torch.linspace(-1, 1, len(start)), start
    for _ in range(2):
        moved = torch.sub(right, objective.grad(right, batch) + shift, alpha=0.1)
        right = part.put(right, part.take(objective.track(moved, batch, at=right)))
    w = start.clone()
    objective.descend(w, [batch, batch], 0.1, part, shift=shift)
    assert torch.equal(w, right)


@pytest.mark.parametrize("name", ["fcnn", "norms"])
def test_shifted_steps_of_the_whole_vector_are_the_same_to_rounding(name):
    """There, perceptrons step matrices in one operation with the products of their gradients."""
    objective, start, batch = example(name, torch.float64)
    shift, right = objective.part("*.weight, *.bias").only(torch.ones_like(start)), start
    for _ in range(3):
        moved = right - 0.1 * (objective.grad(right, batch) + shift)
        right = objective.track(moved, batch, at=right)
    w = start.clone()
    objective.descend(w, [batch] * 3, 0.1, shift=shift)
    assert torch.allclose(w, right, rtol=0, atol=1e-13) and not torch.allclose(w, start)


def test_steps_of_running_statistics_alone_move_nothing_else():
    objective, start, batch = example("norms", torch.float32)
    part = objective.part("1.running_*")
    w = start.clone()
    objective.descend(w, [batch], 0.1, part)
    assert torch.equal(w, part.put(start, part.take(objective.track(start, batch))))
    assert not torch.equal(w, start)


def test_random_numbers_come_from_the_seed_of_the_batch():
    """Of a layer, of a loss, and of a layer that says nothing about it."""

    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.rand(4)

    def noisy_loss(outputs, targets):
        return nn.functional.cross_entropy(outputs + torch.rand(4), targets)

    plain = nn.functional.cross_entropy
    for last, loss in (
        (Noisy(6, 4), plain),
        (nn.Linear(6, 4), noisy_loss),
        (nn.Linear(6, 4), plain),
    ):
        objective = Objective(nn.Sequential(nn.Flatten(), last, nn.LayerNorm(4)), loss)
        start, (inputs, targets, _) = objective.initial(), example("norms", torch.float32)[2]
        found = []
        for seed in (1, 1, 2):
            found.append(start.clone())
            objective.descend(found[-1], [(inputs, targets, seed)], 0.1)
        assert torch.equal(found[0], found[1])
        random = last is not objective.layer("1") and (type(last) is Noisy or loss is not plain)
        assert torch.equal(found[0], found[2]) != random
