"""Short cuts of derivatives at one vector: the bits of the long way."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nufed import Objective
from nufed.models import cnn_groupnorm, fcnn, multi_exit

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


@pytest.mark.parametrize("name", ["fcnn", "cnn"])
def test_one_graph_serves_the_gradient_and_all_products(name):
    objective, w, batch = example(name, torch.float64)
    g, product = objective.linearized(w, batch)
    # some layers compute a gradient that is differentiated again by other operations
    torch.testing.assert_close(g, objective.grad(w, batch), rtol=1e-12, atol=1e-14)
    for scale in (1.0, -2.0):
        v = scale * torch.linspace(-1, 1, objective.size, dtype=torch.float64)
        assert torch.equal(product(v), objective.hvp(w, batch, v))


def test_a_product_with_zeros_in_whole_tensors_is_that_of_the_whole_graph():
    objective, w, batch = example("fcnn", torch.float64)
    head = objective.part("head")
    v = head.only(torch.linspace(-1, 1, objective.size, dtype=torch.float64))
    _, product = objective.linearized(w, batch)
    assert torch.equal(objective.hvp(w, batch, v), product(v))
    assert not objective.hvp(w, batch, torch.zeros_like(v)).any()
    support = objective.support(v)
    assert (support.index, support.size) == (head.index, head.size)
    assert objective.support(torch.ones_like(v)) is None


def test_the_head_has_a_gradient_of_its_own_from_its_features():
    objective, w, batch = example("fcnn", torch.float32)
    shift = torch.tensor([0.5, -1.0, 0.0, 2.0])
    shifted = objective.with_shift(shift)
    plain = objective.with_loss(lambda outputs, y: F.cross_entropy(outputs + shift, y))
    gradient = shifted.gradient_at(w)
    for _ in range(2):
        g, features = gradient(batch)
        assert torch.equal(g, plain.grad(w, batch))
        assert torch.equal(features, objective.features(w, batch[0]))
        w.sub_(g, alpha=0.1)  # the next gradient is there
    g, features = gradient(batch)
    head = objective.part("head")
    other = head.take(w) * 2
    by_head = objective.head_grad(other, features, batch[1])
    assert torch.equal(by_head, objective.grad(head.put(w, other), batch, head))


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


def test_a_level_of_capacity_is_the_network_with_zeros_elsewhere():
    torch.manual_seed(0)
    objective = Objective(multi_exit((6,), 4, hidden=(5, 3)).double())
    w = objective.initial()
    batch = torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 4

    def loss(outputs, targets):
        return sum(F.cross_entropy(each, targets) for each in outputs)

    widths, depths = (Fraction(1, 2), Fraction(3, 4), Fraction(1)), (1, 2, 2)
    for level, depth in enumerate(depths):
        own, part = objective.level(widths, depths, level, loss)
        right = part.take(objective.with_exits(depth, loss).grad(part.only(w), batch))
        assert part.size == own.size and (part.size < len(w) or level == 2)
        torch.testing.assert_close(own.grad(part.take(w), batch), right, rtol=1e-12, atol=1e-15)


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
