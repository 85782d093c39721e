"""Products by oneDNN: equal to torch's own to rounding, with derivatives of any order."""

import pytest
import torch
from torch import nn

from nufed import Objective
from nufed.models import fcnn
from nufed.objective.fast import onednn
from nufed.objective.fast.gram_space import first_layer
from nufed.objective.fast.onednn import (
    OneDNNFirstLayer,
    OneDNNLinear,
    closed_form,
    has_large_products,
    product,
    with_onednn,
)
from nufed.objective.objective import edited_features

CLOSE = 1e-6  # of the norm; ε is 6e-8, and sums of up to 3,000 numbers add up to 2e-7


def near(a, b, relative=CLOSE):
    assert a.dtype == b.dtype and a.shape == b.shape
    return float((a - b).norm()) <= relative * float(b.norm())


def random(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


@pytest.fixture
def calls(monkeypatch):
    """The shapes of products that oneDNN computes, also small ones."""
    seen, by_onednn = [], torch.ops.mkldnn._linear_pointwise

    class Watched:
        @staticmethod
        def _linear_pointwise(a, b, *rest):
            seen.append((*a.shape, len(b)))
            return by_onednn(a, b, *rest)

    monkeypatch.setattr(onednn, "LARGE", 1)
    monkeypatch.setattr(torch.ops, "mkldnn", Watched)
    return seen


@pytest.mark.parametrize("shape", [(40, 3072, 80), (37, 1001, 81), (80, 40, 3072)])
@pytest.mark.parametrize("flipped", ["", "a", "b", "ab"])
def test_products_in_every_layout(shape, flipped):
    m, k, n = shape
    a = random(k, m).T if "a" in flipped else random(m, k)
    b = random(k, n).T if "b" in flipped else random(n, k)
    got, right = product(a, b), a.double() @ b.double().T
    assert near(got.double(), right) and got.is_contiguous()


def test_only_large_products_in_float32_are_onednns(calls, monkeypatch):
    a, b = random(8, 16), random(4, 16)
    for dtype in (torch.float64, torch.bfloat16):
        assert product(a.to(dtype), b.to(dtype)).equal(a.to(dtype) @ b.to(dtype).T)
    monkeypatch.setattr(onednn, "LARGE", 8 * 16 * 4 + 1)
    assert product(a, b).equal(a @ b.T) and not calls
    monkeypatch.setattr(onednn, "LARGE", 8 * 16 * 4)
    assert near(product(a, b), a @ b.T) and calls == [(8, 16, 4)]


class Tokens(nn.Module):
    """Linear layers with three dimensions, one of them used twice, one frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        x = x.view(len(x), 2, 6)
        return self.head(torch.tanh(self.first(self.frozen(torch.tanh(self.first(x)))))).sum(1)


@pytest.mark.parametrize("make", [lambda: fcnn((12,), 3, hidden=(7, 5), activation="tanh"), Tokens])
def test_gradients_and_hessian_vector_products(make, calls):
    torch.manual_seed(0)
    objective = Objective(make())
    fast = with_onednn(objective)
    w, v = objective.initial(), random(objective.size)
    batch = random(9, 12), torch.arange(9) % 3
    right = objective.grad(w, batch), objective.hvp(w, batch, v), objective.predict(w, batch[0])
    assert not calls
    got = fast.grad(w, batch), fast.hvp(w, batch, v), fast.predict(w, batch[0])
    assert all(map(near, got, right)) and calls
    part = objective.part("head")
    assert near(fast.grad(w, batch, part), part.take(right[0]))
    calls.clear()
    assert near(fast.double.hvp(w.double(), batch, v.double()), right[1].double()) and not calls


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_written_out_derivatives_of_a_single_network(activation, calls):
    torch.manual_seed(0)
    objective = Objective(fcnn((12,), 3, hidden=(7, 5), activation=activation))
    for plain, close in ((objective, CLOSE), (objective.double, 1e-13)):
        fast = closed_form(plain)
        w = plain.initial()
        v, batch = random(plain.size).to(w), (random(9, 12).to(w), torch.arange(9) % 3)
        assert near(fast.grad(w, batch), plain.grad(w, batch), close)
        assert near(fast.hvp(w, batch, v), plain.hvp(w, batch, v), close)
        for name in ("head", "body", "*.bias", "1.weight", "none"):
            part = plain.part(name)
            pair = (f.grad(w, batch, part) for f in (fast, plain))
            assert near(*pair, close), name
            pair = (f.hvp(w, batch, v, part) for f in (fast, plain))
            assert near(*pair, close), name
        assert bool(calls) == (plain is objective)
        calls.clear()


def test_which_derivatives_are_written_out():
    net = fcnn((12,), 3, hidden=(7,))
    w, batch = Objective(net).initial(), (random(9, 12), torch.arange(9) % 3)
    fast = closed_form(Objective(net))
    twice = fast.variant(loss=lambda outputs, y: 2 * nn.functional.cross_entropy(outputs, y))
    assert near(twice.grad(w, batch), 2 * fast.grad(w, batch))
    shift = random(3)
    by_loss = Objective(net, lambda g, y: nn.functional.cross_entropy(g + shift, y))
    for shifted in (fast.variant(shift=shift), Objective(net).variant(shift=shift)):
        assert near(shifted.grad(w, batch), by_loss.grad(w, batch))
        v = random(shifted.size)
        assert near(shifted.hvp(w, batch, v), by_loss.hvp(w, batch, v))
        doubles = (each.double.grad(w.double(), batch) for each in (shifted, by_loss))
        assert near(*doubles)
    with edited_features(fast, torch.zeros_like):  # the features are not those of the network
        assert not near(fast.grad(w, batch), Objective(net).grad(w, batch), 0.1)
    assert closed_form(Objective(net, nn.functional.mse_loss)) is None
    assert closed_form(Objective(Tokens())) is None
    assert closed_form(Objective(net, precision="bfloat16")) is None
    assert closed_form(Objective(net, micro_batch=4)) is None


def test_the_objective_itself_is_unchanged_and_shares_its_parameters(calls):
    objective = Objective(Tokens())
    w, batch = objective.initial(), (random(9, 12), torch.arange(9) % 3)
    before = objective.grad(w, batch)
    fast = with_onednn(objective)
    assert objective.grad(w, batch).equal(before) and not calls
    ours, theirs = objective._module, fast._module
    assert type(ours.first) is nn.Linear and type(theirs.first) is OneDNNLinear
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(p is q for p, q in pairs)


def test_hooks_and_mixed_precision_keep_their_layers():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].register_forward_hook(lambda *_: None)
    kinds = [type(layer) for layer in with_onednn(Objective(module))._module]
    assert kinds == [nn.Linear, OneDNNLinear]
    mixed = Objective(nn.Linear(1024, 1024), precision="bfloat16")
    assert type(with_onednn(mixed)._module) is nn.Linear
    assert not has_large_products(mixed, 40)


@pytest.mark.parametrize(("outputs", "samples"), [(1024, 512), (1024, 511)])
def test_has_large_products(outputs, samples):
    wide, narrow = nn.Linear(64, outputs), nn.Linear(outputs, 2)
    net = Objective(nn.Sequential(wide, nn.ReLU(), narrow))
    assert has_large_products(net, samples) == (samples == 512)
    assert not has_large_products(net.double, samples)
    images = Objective(nn.Sequential(nn.Conv2d(3, 64, 5), nn.Flatten(), nn.Linear(64, 2)))
    assert not has_large_products(images, samples)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [2, 1024])
def test_a_first_layer(bias, block, calls, monkeypatch):
    monkeypatch.setattr(onednn, "BLOCK", block)
    torch.manual_seed(0)
    objective = Objective(nn.Sequential(nn.Linear(11, 5, bias=bias), nn.ReLU(), nn.Linear(5, 2)))
    plain, fast = (first_layer(objective, (11,), *kind) for kind in ((), (OneDNNFirstLayer,)))
    w, x, rows = objective.initial(), random(9, 11), random(9, 5)
    others = plain.others(w) + 1
    for name, arguments in {
        "apply": (w, x),
        "gram": (x, x[:4]),
        "vector": (w, 0.75, rows, x, others),
    }.items():
        assert near(getattr(fast, name)(*arguments), getattr(plain, name)(*arguments)), name
    assert calls[:2] == [(9, 11, 5), (9, 11, 4)] and len(calls) == (5 if block == 2 else 3)
    assert w.equal(objective.initial())
