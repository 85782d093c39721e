"""Short cuts of derivatives at one vector: the bits of the long way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nufed import Objective
from nufed.models import cnn_groupnorm, fcnn
from nufed.objective.parts import support

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def networks():
    torch.manual_seed(0)
    return {
        "fcnn": (fcnn((2, 3), 4, hidden=(7, 5)), (2, 3)),
        "flat": (nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4)), (6,)),
        "sigmoid": (nn.Sequential(nn.Linear(6, 4), nn.Sigmoid()), (6,)),
        "cnn": (cnn_groupnorm((1, 8, 8), 4), (1, 8, 8)),
        "norms": (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), (6,)),
    }


def example(name, dtype):
    module, shape = networks()[name]
    objective = Objective(module.to(dtype), running_stats="tracked")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, *shape, generator=generator, dtype=dtype)
    targets = torch.randint(0, 4, (9,), generator=generator)
    w = torch.randn(objective.size, generator=generator, dtype=dtype).abs() / 3
    return objective, w, (inputs, targets, 5)


def automatic(objective, w, batch):
    """The gradient by autograd alone."""
    leaf = w.clone().requires_grad_()
    return torch.autograd.grad(objective.forward(leaf, batch), leaf)[0]


@TYPES
@pytest.mark.parametrize("name", networks())
def test_the_gradient_has_the_bits_of_autograd(name, dtype):
    objective, w, batch = example(name, dtype)
    assert torch.equal(objective.grad(w, batch), automatic(objective, w, batch))


def test_other_targets_and_inputs_are_left_to_autograd():
    objective, w, (inputs, targets, _) = example("flat", torch.float64)
    ignored = targets.clone()
    ignored[0] = -100
    shares = F.softmax(torch.randn(9, 4, dtype=torch.float64), dim=1)
    for batch in [(inputs, ignored), (inputs, shares)]:
        assert torch.equal(objective.grad(w, batch), automatic(objective, w, batch))
    last = Objective(nn.Sequential(nn.Linear(6, 4), nn.ReLU()).double())  # without nn.Flatten
    cubes, classes = inputs.view(3, 3, 6).mT.contiguous().mT, torch.zeros(3, 4, dtype=torch.int64)
    v = last.initial()
    assert torch.equal(last.grad(v, (cubes, classes)), automatic(last, v, (cubes, classes)))


@pytest.mark.parametrize("part", ["head", "body", "all", "none", "*bias", "last:2"])
@pytest.mark.parametrize("name", networks())
def test_the_gradient_of_a_part_has_the_bits_of_the_whole_one(name, part):
    objective, w, batch = example(name, torch.float32)
    if part == "*bias" and name == "sigmoid":
        part = "0.bias"
    own = objective.part(part)
    assert torch.equal(objective.grad(w, batch, own), own.take(objective.grad(w, batch)))
    stacked = torch.stack([w, w])
    if name == "fcnn":
        batches = tuple(torch.stack([x, x]) for x in batch[:2])
        both = objective.grad(stacked, batches, own)
        assert torch.equal(both, own.take(objective.grad(stacked, batches)))


def test_a_product_with_zeros_in_whole_tensors_is_that_of_the_whole_graph():
    objective, w, batch = example("fcnn", torch.float64)
    head = objective.part("head")
    v = head.only(torch.linspace(-1, 1, objective.size, dtype=torch.float64))
    leaf = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(objective.forward(leaf, batch), leaf, create_graph=True)
    (product,) = torch.autograd.grad(g, leaf, v)
    assert torch.equal(objective.hvp(w, batch, v), product)
    ones = torch.ones_like(v)
    of_head = objective.hvp(w, batch, ones, head)
    assert torch.equal(of_head, objective.hvp(w, batch, head.only(ones)))
    assert not objective.hvp(w, batch, torch.zeros_like(v)).any()
    moved = support(v, objective.sizes)
    assert (moved.index, moved.size) == (head.index, head.size)
    assert support(torch.ones_like(v), objective.sizes) is None


def test_statistics_of_the_last_gradient_are_those_of_a_pass_of_their_own():
    objective, w, batch = example("norms", torch.float32)
    fresh, *_ = example("norms", torch.float32)
    after = w - objective.grad(w, batch)
    assert torch.equal(objective.track(after, batch, at=w), fresh.track(after, batch, at=w))
    others = (batch[0] + 1, *batch[1:])  # another batch, and a vector that was changed since
    assert torch.equal(objective.track(after, others, at=w), fresh.track(after, others, at=w))
    objective.grad(w, batch)
    w.mul_(2)
    assert torch.equal(objective.track(after, batch, at=w), fresh.track(after, batch, at=w))


def test_the_module_is_left_with_its_own_tensors():
    objective, w, batch = example("norms", torch.float64)
    start = objective.initial()
    module = objective.module(start)
    objective.grad(w, batch)
    objective.predict(w, batch[0])
    assert torch.equal(objective.initial(), start)
    own = dict(zip(module.state_dict(), module.state_dict().values(), strict=True))
    again = objective.module(start).state_dict()
    assert all(torch.equal(own[name], again[name]) for name in own)
    outputs = functional_call(objective.module(w), {}, (batch[0],))
    assert torch.equal(outputs, objective.predict(w, batch[0]))
