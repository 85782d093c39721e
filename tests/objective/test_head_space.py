"""Meta-gradients in the head alone, with one pass of the body for all batches."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Exact, FirstOrder, HessianFree, Objective
from nufed.meta.meta_gradient import MetaBatch, meta_gradient


def by_autograd(outputs, targets):
    return F.cross_entropy(outputs, targets)


def objectives(widths, bias=True, activation=nn.Tanh, last=()):
    """A perceptron as such, and as any module."""
    torch.manual_seed(2)
    layers = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow, bias=bias), activation()]
    module = nn.Sequential(nn.Flatten(), *layers[:-1], *last).double()
    return Objective(module), Objective(module, by_autograd)


def samples(number, classes):
    return torch.randn(number, 2, 3, dtype=torch.float64), torch.randint(0, classes, (number,))


def meta_batch(steps, classes, curved=True):
    adapt, curvature = ([samples(n, classes) for n in range(4, 4 + steps)] for _ in range(2))
    return MetaBatch(adapt, samples(9, classes), curvature if curved else ())


@pytest.mark.parametrize("curvature", [Exact(), FirstOrder()], ids=["exact", "first_order"])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("widths", [[6, 3], [6, 4, 3], [6, 7, 5, 4]], ids=len)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_meta_gradient_of_any_module(widths, bias, steps, curvature):
    own, other = objectives(widths, bias)
    w, batch = own.initial(), meta_batch(steps, widths[-1], curvature == Exact())
    found, right = (
        meta_gradient(each, w, batch, lr=0.7, curvature=curvature, part=each.part("head"))
        for each in (own, other)
    )
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-13)
    assert own.head_space(w, [batch.outer], own.part("head")) is not None
    assert other.head_space(w, [batch.outer], other.part("head")) is None


def test_a_batch_may_serve_a_step_and_a_product():
    own, other = objectives([6, 5, 3], activation=nn.ReLU, last=[nn.Sigmoid()])
    w, x = own.initial(), samples(8, 3)
    batch = MetaBatch([x, x], x, [x, x])
    found, right = (
        meta_gradient(each, w, batch, lr=0.7, curvature=Exact(), part=each.part("3.*"))
        for each in (own, other)
    )
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-13)


def test_calls_do_not_change_each_other():
    """They share the memory of stacked inputs."""
    own, _ = objectives([6, 5, 3])
    w, head = own.initial(), own.part("head")
    batches = [meta_batch(1, 3), meta_batch(1, 3), meta_batch(2, 3)]
    settings = {"lr": 0.7, "curvature": Exact(), "part": head}
    first = [meta_gradient(own, w, batch, **settings) for batch in batches]
    alone = [meta_gradient(objectives([6, 5, 3])[0], w, batch, **settings) for batch in batches]
    assert all(map(torch.equal, first, alone))
    assert meta_gradient(own.double, w, batches[0], **settings).dtype == torch.float64


def test_other_parts_stacks_and_curvatures_have_no_head_space():
    own, other = objectives([6, 5, 3])
    w, batch = own.initial(), meta_batch(1, 3)
    for part in ("body", "all", "none", "*.bias"):
        assert own.head_space(w, [batch.outer], own.part(part)) is None
    assert own.head_space(torch.stack([w, w]), [batch.outer], own.part("head")) is None
    found, right = (
        meta_gradient(each, w, batch, lr=0.7, curvature=HessianFree(), part=each.part("head"))
        for each in (own, other)
    )
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-8)
