"""The test accelerator itself behaves like a GPU, and gives the CPU's bits."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import accelerator
from accelerator import NAME, counting

aten = torch.ops.aten


def both(compute):
    """What it computes on the CPU and on the device, which must be the same bits."""
    torch.manual_seed(3)
    right = compute("cpu")
    torch.manual_seed(3)
    found = compute(NAME)
    assert found.device.type == NAME
    assert torch.equal(found.cpu(), right)
    return right


def numbers(device, *shape):
    return (
        torch.linspace(-2, 3, torch.Size(shape).numel(), dtype=torch.float64).view(shape).to(device)
    )


VIEWS = {
    "slice": lambda x: x[1:, ::2],
    "transpose": lambda x: x.T,
    "split": lambda x: x.view(-1).split([5, 7, 12])[1],
    "expand": lambda x: x[:, :1].expand(-1, 3),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "diagonal": lambda x: x.diagonal(),
    "detach": lambda x: x.detach()[2:],
    "data": lambda x: x.data.view(6, 4),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_share_memory_and_have_the_strides_of_the_cpu(view):
    shapes = []

    def compute(device):
        x = numbers(device, 4, 6)
        part = view(x)
        shapes.append((part.shape, part.stride(), part.storage_offset()))
        if 0 not in part.stride():
            part.mul_(3)
        return torch.cat([x.flatten(), part.flatten()])

    both(compute)
    assert shapes[0] == shapes[1]


def test_bytes_of_a_tensor_are_those_of_its_numbers():
    both(lambda device: numbers(device, 3).view(torch.int64))
    both(lambda device: numbers(device, 3).view(torch.uint8))


def test_out_resizes_its_target():
    def compute(device):
        target = torch.empty(0, dtype=torch.float64, device=device)
        torch.sub(numbers(device, 2, 3), 1, out=target)
        assert target.shape == (2, 3)
        return target

    both(compute)


def test_in_place_operations_return_their_target():
    x = numbers(NAME, 4)
    assert x.add_(1) is x and x.unsqueeze_(0) is x and x.shape == (1, 4)
    into = torch.empty_like(x)
    assert torch.add(x, x, out=into) is into


def network(kind):
    layers = {
        "perceptron": lambda: [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)],
        "cnn": lambda: [
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 2),
            nn.GroupNorm(2, 4),
            nn.Softplus(),
            nn.Flatten(),
            nn.Linear(8, 3),
        ],
        "dropout": lambda: [nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)],
    }
    torch.manual_seed(0)
    return nn.Sequential(*layers[kind]()).double()


@pytest.mark.parametrize("kind", ["perceptron", "cnn", "dropout"])
def test_second_derivatives(kind):
    net = network(kind)

    def compute(device):
        own = copy.deepcopy(net).to(device)
        parameters = list(own.parameters())
        targets = torch.tensor([0, 2, 1, 0], device=device)
        loss = nn.functional.cross_entropy(own(numbers(device, 4, 6)), targets)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        length = sum((g * g).sum() for g in first)
        return torch.cat([g.flatten() for g in torch.autograd.grad(length, parameters)])

    assert both(compute).any()


def test_vmap_of_derivatives():
    def square(w):
        return (torch.tanh(w) ** 3).sum()

    both(lambda d: vmap(grad(lambda w: (grad(square)(w) ** 2).sum()))(numbers(d, 3, 4)))


def test_it_refuses_numpy():
    with pytest.raises(TypeError, match="can't convert fake"):
        numbers(NAME, 3).numpy()


def test_it_refuses_tensors_of_the_cpu_that_have_dimensions():
    x = numbers(NAME, 3)
    for mix in (
        lambda: x + torch.ones(3),
        lambda: torch.cat([x, torch.ones(1)]),
        lambda: x[torch.tensor([0, 1])],
        lambda: torch.ones(3, dtype=torch.float64).add_(x),
        lambda: torch.add(x, x, out=torch.empty(3, dtype=torch.float64)),
    ):
        with pytest.raises(RuntimeError, match=r"tensor of the CPU|on the same device"):
            mix()
    assert torch.equal((x * torch.tensor(2.0)).cpu(), numbers("cpu", 3) * 2)


def test_it_has_a_generator_of_its_own():
    def draws():
        return torch.rand(4, device=NAME).cpu()

    torch.manual_seed(1)
    first, second = draws(), draws()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    torch.rand(100)  # of the CPU
    torch.default_generator.manual_seed(7)
    host = torch.get_rng_state()
    assert torch.equal(draws(), first)
    assert torch.equal(torch.get_rng_state(), host)
    with torch.random.fork_rng([torch.device(NAME)], device_type=NAME):
        torch.manual_seed(5)
        draws()
    assert torch.equal(draws(), second)
    both(lambda device: torch.rand(4, device=device))


def test_it_counts_copies():
    x = torch.ones(3)
    with counting() as found:
        there = x.to(NAME)
        again = there.to(NAME)  # it is there already
        (there + again).cpu()
        torch.zeros(3, device=NAME)
        torch.tensor([1.0, 2.0], device=NAME)
    assert found == {"to_device": 2, "to_host": 1, "synchronised": 0}


def test_it_counts_synchronisations():
    x = numbers(NAME, 4)
    waiting = (
        lambda: x.sum().item(),
        lambda: bool((x > 0).all()),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: torch.equal(x, x),
        lambda: x[0] if x[0] > 0 else x[1],
    )
    for wait in waiting:
        with counting() as found:
            wait()
        assert found["synchronised"] == 1 == len(accelerator.waits), accelerator.waits
    with counting() as found:
        torch.where(x > 0, x, 0).sum()
        x[torch.tensor([0, 1], device=NAME)]
    assert found["synchronised"] == 0


def test_numbers_of_tensors_that_are_gone_are_freed():
    for _ in range(3 * accelerator.SWEEP):
        numbers(NAME, 2)
    gc.collect()
    assert len(accelerator._numbers) < 2 * accelerator.SWEEP
