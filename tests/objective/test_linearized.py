"""Products of one perceptron in closed form, against those of autograd."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Objective

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
WIDTHS = [[7, 3], [33, 8, 5, 4], [96, 80, 60, 10]]
PARTS = ["all", "head", "body", "0.*", "none"]


def example(activation, widths, dtype, bias=True):
    """The objective in closed form and by autograd, a vector, a batch and a direction."""
    torch.manual_seed(3)
    layers = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow, bias=bias), ACTIVATIONS[activation]()]
    module = nn.Sequential(*layers[:-1]).to(dtype)
    written, automatic = (Objective(module, loss) for loss in (F.cross_entropy, by_autograd))
    targets = torch.randint(0, widths[-1], (12,))
    targets[2] = -100  # a sample that cross-entropy leaves out
    batch = (torch.randn(12, widths[0], dtype=dtype), targets)
    return written, automatic, written.initial(), batch, torch.randn(written.size, dtype=dtype)


def by_autograd(outputs, targets):
    return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", WIDTHS, ids=len)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_products_have_the_bits_of_autograd(bias, activation, widths, dtype, part):
    written, automatic, w, batch, v = example(activation, widths, dtype, bias)
    v = written.part(part).only(v)
    assert torch.equal(written.hvp(w, batch, v), automatic.hvp(w, batch, v))
    (g, product), (right, other) = (each.linearized(w, batch) for each in (written, automatic))
    assert torch.equal(g, right)
    assert torch.equal(product(v), other(v))


@pytest.mark.parametrize("place", [0, 1], ids=["in closed form", "by autograd"])
@pytest.mark.parametrize("part", [*PARTS, "*.bias", "half"])
def test_with_a_part_the_direction_is_0_outside_it(part, place):
    *both, w, batch, v = example("relu", [33, 8, 5, 4], torch.float32)
    objective = both[place]
    if part == "half":  # of a tensor
        mask = torch.arange(objective.size) < 100
        own = objective.part("all").where(mask)
    else:
        own = objective.part(part)
    right = objective.hvp(w, batch, own.only(v))
    assert torch.equal(objective.hvp(w, batch, v, own), right)
    inputs, targets = batch[0], batch[1].clamp(min=0)
    stack, batches = torch.stack([w, w]), tuple(torch.stack([x, x]) for x in (inputs, targets))
    rows = objective.hvp(stack, batches, torch.stack([v, v]), own)
    assert torch.equal(rows, objective.hvp(stack, batches, own.only(torch.stack([v, v]))))
