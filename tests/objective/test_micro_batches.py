"""Micro-batches and layers that are computed again: less memory, the same derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nufed import Batch, InputError, Objective
from nufed.data.text import next_token_loss
from nufed.objective.objective import grad_with_features
from support import batches, mlp, relative_error

SIZES = 1, 4, 5, 6, 100  # of micro-batches; a batch has 6 samples


def derivatives(objective, batch):
    w = objective.initial()
    return [
        objective.value(w, batch).reshape(1),
        objective.forward(w, batch).detach().reshape(1),
        objective.grad(w, batch),
        objective.grad(w, batch, objective.part("head")),
        objective.hvp(w, batch, w.cos()),
        *objective.beside(w, batch, w.cos(), 1e-3),
        objective.predict(w, batch[0]),
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_derivatives_are_those_of_the_whole_batch(size, loss):
    (batch,) = batches(1)
    assert len(batch[1]) == 6
    module = mlp()
    micro, whole = (Objective(module, loss, micro_batch=m) for m in (size, 0))
    for found, right in zip(derivatives(micro, batch), derivatives(whole, batch), strict=True):
        assert relative_error(found, right) < 1e-13
        assert torch.equal(found, right) or size < 6  # a batch that fits is computed as before


class Tokens(nn.Module):
    """Logits for every token, from two inputs."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids, scale):
        return self.head(torch.tanh(self.words(ids)) * scale)


@pytest.mark.parametrize("several", [tuple, dict])
def test_parts_count_by_the_targets_that_are_not_ignored(several):
    torch.manual_seed(0)
    ids, scale = torch.randint(0, 9, (5, 4)), torch.rand(5, 4, 1, dtype=torch.float64)
    targets = ids.roll(-1, dims=1)
    targets[0, 1:], targets[2:4] = -100, -100  # two samples have no target at all
    inputs = (ids, scale) if several is tuple else {"ids": ids, "scale": scale}
    micro, whole = (Objective(Tokens().double(), next_token_loss, micro_batch=m) for m in (2, 0))
    w = micro.initial()
    for f in (Objective.value, Objective.grad):
        assert (
            relative_error(f(micro, w, (inputs, targets)), f(whole, w, (inputs, targets))) < 1e-13
        )


def test_terms_in_features_are_of_whole_batches():
    (batch,) = batches(1)
    module = mlp()
    micro, whole = (Objective(module, micro_batch=m) for m in (2, 0))
    w = micro.initial()
    found, right = (grad_with_features(o, w, batch, lambda z: z.std()) for o in (micro, whole))
    assert torch.equal(found, right)
    assert relative_error(micro.grad(w, batch), whole.grad(w, batch)) < 1e-13


def test_dropout_masks_differ_between_parts_and_are_those_of_the_seed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 2))
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    objective = Objective(net, micro_batch=2)
    w = objective.initial()
    first, again, other = (objective.grad(w, Batch(x, y, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    parts = [Objective(net).grad(w, Batch(x[:2], y[:2], seed)) for seed in (1, 2)]
    assert not any(torch.allclose(first, part) for part in parts)


def test_a_loss_that_is_no_mean_is_refused():
    (batch,) = batches(1)
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64))
    for loss in (weighted, nn.CrossEntropyLoss(reduction="sum")):
        objective = Objective(mlp(), loss, micro_batch=4)
        with pytest.raises(InputError, match="micro_batch = 4: the loss of 6 samples is"):
            objective.grad(objective.initial(), batch)


def test_statistics_of_batches_are_refused():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r'micro_batch = 2: .*running_stats = "tracked"'):
        Objective(net, running_stats="tracked", micro_batch=2)
    Objective(net, running_stats="frozen", micro_batch=2)


class Again(nn.Module):
    """Three layers, of which backward passes compute the middle ones again."""

    def __init__(self, again):
        super().__init__()
        self.layers, self.again = nn.ModuleList(nn.Linear(5, 5) for _ in range(4)), again
        self.drop, self.head, self.calls = nn.Dropout(0.3), nn.Linear(5, 3), 0

    def block(self, x):
        self.calls += 1
        return self.drop(torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)))))

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return self.head(torch.tanh(self.layers[3](self.layers[2](x))))


@pytest.mark.parametrize("frozen", [(), ("layers.1.weight", "layers.3.bias")])
def test_layers_that_are_computed_again_see_the_same_parameters(frozen):
    """Not those of the module, which it holds again after its forward pass."""
    (batch,) = batches(1)
    plain, again = (_seeded(value, frozen) for value in (False, True))
    one, two = Objective(plain), Objective(again)
    w = torch.randn(one.size, generator=torch.Generator().manual_seed(1))
    for seed in (None, 7):
        given = Batch(batch[0].float(), batch[1], seed)
        assert torch.equal(one.grad(w, given), two.grad(w, given))
        assert torch.equal(one.hvp(w, given, w.cos()), two.hvp(w, given, w.cos()))
    if not frozen:
        wide = [o.double.grad(w.double(), batch) for o in (one, two)]
        assert torch.equal(*wide) and wide[0].dtype == torch.float64
    assert two._module.calls > one._module.calls


def _seeded(again, frozen):
    torch.manual_seed(0)
    module = Again(again)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return module
