"""Frozen parameters are used in float64 without a copy of all of them."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nufed import Objective
from nufed.models.trainable import train_only
from nufed.objective.frozen import InDouble


class Mixed(nn.Module):
    """An embedding, a convolution, attention, norms and linear layers; the head is trained."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 8, padding_idx=0)
        self.across = nn.Conv1d(8, 8, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8, 3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.words(x)
        h = self.layer(h + self.across(h.mT).mT).to(self.scale.dtype)
        h = self.recurrent(h)[0]
        return self.head(h[:, 0]) + torch.tanh(h[:, 1]) @ self.scale.T.mT


def mixed(part):
    torch.manual_seed(0)
    module = Mixed()
    train_only(module, part)
    return module


BATCH = (
    torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(0)),
    torch.arange(5) % 3,
)


@pytest.mark.parametrize("part", ["head", "words.weight, *.bias", "layer.linear1.weight"])
def test_derivatives_are_those_of_a_copy_in_float64(part):
    module = mixed(part)
    double, copied = Objective(module).double, Objective(copy.deepcopy(module).double())
    w = copied.initial() + 0.1
    for found, right in (
        (double.grad(w, BATCH), copied.grad(w, BATCH)),
        (double.hvp(w, BATCH, w.cos()), copied.hvp(w, BATCH, w.cos())),
        (double.predict(w, BATCH[0]), copied.predict(w, BATCH[0])),
    ):
        assert found.dtype == torch.float64 and right.norm() > 0
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


def test_frozen_parameters_are_shared_and_unchanged():
    module = mixed("head")
    objective = Objective(module)
    before = copy.deepcopy(module.state_dict())
    objective.double.grad(objective.initial().double(), BATCH)
    wide = dict(objective.double._module.named_parameters())
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            assert wide[name].data_ptr() == parameter.data_ptr(), name
        assert torch.equal(parameter, before[name])


def test_one_operation_at_a_time_holds_its_parameters_in_float64():
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    train_only(layers, "0.weight")
    made, alive = [], []
    around = InDouble(layers)
    double = torch.Tensor.double

    def counted(x):
        wide = double(x)
        if any(x is p for p in around.parameters):
            made.append(weakref.ref(wide))
            alive.append(sum(each() is not None for each in made))
        return wide

    first = layers[0].weight.detach().double().requires_grad_()
    torch.Tensor.double = counted
    try:
        with around:
            x = F.linear(torch.ones(2, 4, dtype=torch.float64), first)
            loss = layers[2](layers[1](x).tanh()).square().sum()
        assert not any(each() is not None for each in made)
        torch.autograd.grad(loss, first)
    finally:
        torch.Tensor.double = double
    assert len(made) == 4 and set(alive) == {1}  # forwards and backwards, one at a time


class Kept(torch.autograd.Function):
    """Keeps a view of its weight where no hook sees it, and uses it in its backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight.T
        return x @ ctx.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.T, None


class Layers(nn.Module):
    """Large frozen layers, two of which keep views of their weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        transposed = self.layers[0].weight.T  # used when another layer's weight is converted
        x = torch.tanh(self.layers[1](x)) @ transposed
        return self.layers[3](torch.tanh(Kept.apply(x, self.layers[2].weight)))


def test_memory_is_used_again_only_when_no_tensor_refers_to_it(monkeypatch):
    monkeypatch.setattr("nufed.objective.frozen.LARGE", 1)
    torch.manual_seed(0)
    module = Layers()
    train_only(module, "first.*")
    double, copied = Objective(module).double, Objective(copy.deepcopy(module).double())
    w, batch = copied.initial(), (torch.rand(4, 3), torch.arange(4))
    torch.testing.assert_close(double.grad(w, batch), copied.grad(w, batch), rtol=1e-12, atol=0)
    around = double._in_double
    with around:
        places = {around._double(layer.weight).data_ptr() for layer in module.layers}
        kept = around._double(module.layers[0].weight)
        assert around._double(module.layers[1].weight).data_ptr() != kept.data_ptr()
    assert len(places) == 1 and torch.equal(kept, module.layers[0].weight.double())
