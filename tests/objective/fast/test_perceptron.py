"""The written-out derivatives of fully connected networks, against automatic ones."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nufed.objective.fast.perceptron import faster as perceptron
from support import mlp, tied

AGENTS, SAMPLES = 3, 4
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


def chain(activation, depth, bias=True, starts_with_activation=False):
    widths = [5, *[6, 4][: depth - 1], 3]
    layers = [ACTIVATIONS[activation]()] if starts_with_activation else []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow, bias=bias), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1]).double()


def stack_of(module):
    """Parameters, a direction, inputs, a change of them, and targets for every agent."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(AGENTS, *shape, generator=generator, dtype=torch.float64)

    p, v = ({n: randn(*x.shape) for n, x in module.named_parameters()} for _ in range(2))
    targets = torch.randint(0, 3, (AGENTS, SAMPLES), generator=generator)
    return p, v, randn(SAMPLES, 5), randn(SAMPLES, 5), targets


def automatic(module, p, inputs, targets, agent):
    """Leaves of one agent, and the gradient by them in autograd's graph."""
    names = list(p)
    leaves = [p[n][agent].clone().requires_grad_() for n in names]
    x = inputs[agent].clone().requires_grad_()
    outputs = functional_call(module, dict(zip(names, leaves, strict=True)), (x,))
    loss = F.cross_entropy(outputs, targets[agent])
    return [*leaves, x], torch.autograd.grad(loss, [*leaves, x], create_graph=True)


def assert_close(got, right):
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)


CHAINS = pytest.mark.parametrize(
    ("depth", "bias", "starts_with_activation"),
    [
        (1, True, False),
        (1, False, True),
        (2, True, False),
        (2, False, False),
        (2, True, True),
        (3, True, False),
        (3, False, True),
        (3, True, True),
    ],
)


@CHAINS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_equal_automatic_ones(activation, depth, bias, starts_with_activation):
    module = chain(activation, depth, bias, starts_with_activation)
    p, _, inputs, _, targets = stack_of(module)
    net = perceptron(module, F.cross_entropy)
    into = {n: torch.full_like(x, float("nan")) for n, x in p.items()}
    by_inputs = net.gradient(p, inputs, targets, into, by_inputs=True)
    for agent in range(AGENTS):
        _, right = automatic(module, p, inputs, targets, agent)
        for got, expected in zip([*into.values(), by_inputs], right, strict=True):
            assert_close(got[agent], expected.detach())
    again = {n: torch.full_like(x, float("nan")) for n, x in p.items()}
    assert net.gradient(p, inputs, targets, again, by_inputs=False) is None
    assert all(torch.equal(again[n], into[n]) for n in p)
    for names in [*([n] for n in p), list(p)[:2], list(p)[-2:]]:  # of some parameters only
        some = {n: torch.full_like(p[n], float("nan")) for n in names}
        net.gradient(p, inputs, targets, some, by_inputs=False)
        assert all(torch.equal(some[n], into[n]) for n in names)


@CHAINS
@pytest.mark.parametrize("changing", [True, False], ids=["inputs change", "inputs stay"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_products_equal_automatic_ones(activation, depth, bias, starts_with_activation, changing):
    module = chain(activation, depth, bias, starts_with_activation)
    p, v, inputs, change, targets = stack_of(module)
    net = perceptron(module, F.cross_entropy)
    into = {n: torch.full_like(x, float("nan")) for n, x in p.items()}
    by_inputs = net.product(p, v, inputs, change if changing else None, targets, into)
    for agent in range(AGENTS):
        leaves, gradient = automatic(module, p, inputs, targets, agent)
        moved = change[agent] if changing else torch.zeros_like(change[agent])
        right = torch.autograd.grad(
            gradient, leaves, [*(v[n][agent] for n in p), moved], materialize_grads=True
        )
        for name, expected in zip(p, right[:-1], strict=True):
            assert_close(into[name][agent], expected)
        if changing:
            assert_close(by_inputs[agent], right[-1])
    assert changing or by_inputs is None


def test_a_relu_at_its_kink_has_the_derivative_that_torch_gives_it():
    module = chain("relu", 2)
    p, _, inputs, _, targets = stack_of(module)
    p["0.weight"].zero_()
    p["0.bias"].zero_()
    into = {n: torch.empty_like(x) for n, x in p.items()}
    perceptron(module, F.cross_entropy).gradient(p, inputs, targets, into, by_inputs=False)
    for agent in range(AGENTS):
        _, right = automatic(module, p, inputs, targets, agent)
        for name, expected in zip(p, right[:-1], strict=True):
            assert_close(into[name][agent], expected.detach())


def test_large_outputs_do_not_overflow():
    module = chain("tanh", 2)
    p, v, inputs, _, targets = stack_of(module)
    p["2.weight"] *= 1e4
    into = {n: torch.empty_like(x) for n, x in p.items()}
    net = perceptron(module, F.cross_entropy)
    net.gradient(p, inputs, targets, into, by_inputs=False)
    assert all(x.isfinite().all() for x in into.values())
    net.product(p, v, inputs, None, targets, into)
    assert all(x.isfinite().all() for x in into.values())


def frozen():
    module = mlp()
    module[0].bias.requires_grad_(False)
    return module


def hooked(register):
    module = mlp()
    getattr(module[0], register)(lambda *arguments: None)
    return module


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def tied_layers():
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    module[2].weight = module[0].weight
    return module


def with_a_parameter():
    module = mlp()
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return module


OTHERS = {
    "tied": tied_layers,
    "tied and custom": tied,
    "frozen": frozen,
    "hooked": lambda: hooked("register_forward_hook"),
    "hooked before": lambda: hooked("register_forward_pre_hook"),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
    "other activation": lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)),
    "subclass": lambda: nn.Sequential(Halved(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)
    ),
    "part of it flattened": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(5, 3)),
    "parameter of its own": with_a_parameter,
    "layer twice": lambda: nn.Sequential(*[nn.Linear(5, 5)] * 2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_such_chain_is_not_taken_for_one(other):
    assert perceptron(OTHERS[other](), F.cross_entropy) is None


def test_chains_are_recognised_with_cross_entropy_only():
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Identity(), mlp()))
    for module in (mlp(), nested, nn.Linear(5, 3)):
        assert perceptron(module, F.cross_entropy) is not None
        for loss in (F.mse_loss, nn.CrossEntropyLoss(), lambda x, y: F.cross_entropy(x, y)):
            assert perceptron(module, loss) is None
