"""Networks without autograd: the bits of autograd's gradients, and which modules are such."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Objective
from nufed.models import multi_exit
from nufed.objective.exits import FirstExits
from nufed.objective.loss_gradient import loss_gradient

RELU = nn.ReLU()
NETS = {
    "norms": [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)],
    "one activation twice": [
        nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3), RELU,
        nn.Sequential(nn.Linear(5, 5, bias=False), RELU), nn.Linear(5, 4),
    ],
    "norm first and last": [nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4, eps=0.1)],
}  # fmt: skip


def exits(depth=3):
    return FirstExits(multi_exit((2, 3), 4, hidden=(7, 5, 5)), depth)


def sum_of_exits(outputs, targets):
    return sum((j + 1) * F.cross_entropy(z, targets) for j, z in enumerate(outputs))


def smooth(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def example(name, loss, dtype=torch.float32):
    torch.manual_seed(0)
    module = exits() if name == "exits" else nn.Sequential(*NETS[name])
    objective = Objective(module.to(dtype), loss, running_stats="tracked")
    batches = [(torch.randn(9, 6, dtype=dtype), torch.randint(0, 4, (9,)), 5) for _ in range(3)]
    return objective, objective.initial(), batches


def by_autograd(objective, w, batches, lr):
    for batch in batches:
        after = torch.sub(w, objective.grad(w, batch), alpha=lr)
        w = objective.track(after, batch, at=w)
    return w


CASES = [(name, loss) for name in NETS for loss in (F.cross_entropy, smooth)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "loss"), [*CASES, ("exits", sum_of_exits)])
def test_steps_have_the_bits_of_autograd(name, loss, dtype):
    objective, start, batches = example(name, loss, dtype)
    assert objective._plan is not None and objective._chain is None
    w = start.clone()
    objective.descend(w, batches, 0.1)
    assert torch.equal(w, by_autograd(objective, start, batches, 0.1))
    assert not torch.equal(w, start)


@pytest.mark.parametrize("name", [*NETS, "exits", "dropout"])
def test_steps_of_tensors_that_are_in_no_vector(name):
    """To rounding those of a vector, with any strides; without a plan its very bits."""
    torch.manual_seed(0)
    if name == "dropout":
        objective = Objective(OTHERS[name]().double())
        batches = example("norms", F.cross_entropy, torch.float64)[2]
    else:
        loss = sum_of_exits if name == "exits" else F.cross_entropy
        objective, _, batches = example(name, loss, torch.float64)
    batches.append((*batches[0][:2], None))  # in evaluation mode, which no plan takes with norms
    w = objective.initial()
    wide = {n: torch.full([2 * k for k in t.shape], 9.0).double() for n, t in views(objective, w)}
    inside = {n: wide[n][tuple(map(slice, t.shape))] for n, t in views(objective, w)}
    for n, t in views(objective, w):
        inside[n].copy_(t)
    objective.descend_tensors(inside, batches, 0.1)
    objective.descend(w, batches, 0.1)
    for n, right in views(objective, w):
        torch.testing.assert_close(inside[n], right, rtol=1e-12, atol=1e-14)
        assert name != "dropout" or torch.equal(inside[n], right)
        assert (wide[n] == 9).sum() == wide[n].numel() - right.numel()


def views(objective, w):
    return objective.tensors_in((objective.part("all"), w)).items()


@pytest.mark.parametrize("case", ["no seed", "images", "one sample"])
def test_other_batches(case):
    """In evaluation mode, flattened, and refused by BatchNorm."""
    objective, start, [(x, y, seed), *_] = example("one activation twice", F.cross_entropy)
    batch = {"no seed": (x, y), "images": (x.view(9, 2, 3), y, seed), "one sample": (x[:1], y, 1)}
    w = start.clone()
    if case == "one sample":
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            objective.descend(w, [batch[case]], 0.1)
        return
    objective.descend(w, [batch[case]], 0.1)
    assert torch.equal(w, by_autograd(objective, start, [batch[case]], 0.1))


def hooked():
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    module[0].register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)
    return module


def tied():
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    module[2].weight = module[0].weight
    return module


def frozen():
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    module[0].bias.requires_grad_(False)
    return module


def evaluated():
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    module[1].eval()
    return module


OTHERS = {
    "hook": hooked,
    "tied": tied,
    "frozen": frozen,
    "evaluated": evaluated,
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 4)),
    "no affine norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False)),
    "last exit only": lambda: multi_exit((6,), 4, hidden=(7, 5)),
    "fewer exits": lambda: exits(depth=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_stay_with_autograd(name):
    objective = Objective(OTHERS[name](), running_stats="tracked")
    assert objective._plan is None
    x, y = torch.randn(9, 6), torch.randint(0, 4, (9,))
    if name != "fewer exits":
        w = objective.initial()
        objective.descend(w, [(x, y, 5)], 0.1)
        assert torch.equal(w, by_autograd(objective, objective.initial(), [(x, y, 5)], 0.1))


def test_frozen_statistics_stay_with_autograd():
    assert Objective(nn.Sequential(*NETS["norms"]), running_stats="frozen")._plan is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_derivative_of_cross_entropy_has_autograds_bits(dtype):
    z, y = torch.randn(40, 10, dtype=dtype), torch.randint(0, 10, (40,))
    y[3] = -100  # which cross-entropy leaves out
    leaf = z.clone().requires_grad_()
    (right,) = torch.autograd.grad(F.cross_entropy(leaf, y), leaf)
    assert torch.equal(loss_gradient(F.cross_entropy, z, y), right)
    assert loss_gradient(F.cross_entropy, z, torch.softmax(z, 1)) is None
    assert loss_gradient(F.mse_loss, z, z) is None
