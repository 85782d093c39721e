import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Batch, InputError, Objective
from nufed.meta.curvature import double_difference
from support import batches, mlp, tied


def test_grad_and_hvp_equal_autograd_on_the_module():
    module = mlp()
    objective = Objective(module)
    (batch,) = batches(1)
    v = torch.randn(objective.size, dtype=torch.float64)

    parameters = list(module.parameters())
    loss = F.cross_entropy(module(batch.inputs), batch.targets)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)]
    )
    product = torch.cat([h.flatten() for h in torch.autograd.grad(gradient @ v, parameters)])

    w = objective.initial()
    assert torch.equal(objective.value(w, batch), loss.detach())
    torch.testing.assert_close(objective.grad(w, batch), gradient.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(objective.hvp(w, batch, v), product, rtol=1e-12, atol=1e-14)
    assert torch.equal(objective.predict(w, batch.inputs), module(batch.inputs).detach())


def test_objective_is_pure():
    module = mlp()
    objective = Objective(module)
    (batch,) = batches(1)
    w = objective.initial()
    before = w.clone(), copy.deepcopy(module.state_dict()), objective.grad(w, batch)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # the objective has its own copy
    objective.hvp(w, batch, w)
    assert torch.equal(w, before[0]) and not w.requires_grad
    assert torch.equal(objective.initial(), before[0])
    assert torch.equal(objective.grad(w, batch), before[2])
    assert not objective.grad(w, batch).requires_grad


def test_tied_weights_count_once_and_frozen_ones_not_at_all():
    module = tied()
    assert Objective(module).size == 25 + 5 + 5 + 18
    module.head.weight.requires_grad_(False)
    objective = Objective(module)
    assert objective.size == 25 + 5 + 5 + 3
    changed = objective.module(objective.initial() + 1)
    assert torch.equal(changed.head.weight, module.head.weight)
    assert changed.inner["decode"].weight is changed.inner["encode"].weight
    torch.testing.assert_close(changed.head.bias, module.head.bias + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_is_kept(dtype):
    objective = Objective(mlp(dtype))
    (batch,) = batches(1)  # float64 inputs are cast to the objective's dtype
    w = objective.initial()
    assert {t.dtype for t in (w, objective.grad(w, batch), objective.hvp(w, batch, w))} == {dtype}


def test_modules_with_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x, shift):
            return self.layer(x + shift)

    objective = Objective(Two())
    w, y = objective.initial(), torch.tensor([0, 2])
    x, shift = torch.randn(2, 5), torch.randn(2, 5)
    as_tuple = objective.grad(w, ((x, shift), y))
    as_mapping = objective.grad(w, ({"shift": shift, "x": x}, y))
    assert torch.equal(as_tuple, as_mapping) and as_tuple.norm() > 0


def test_a_loss_linear_in_the_parameters_has_zero_curvature():
    objective = Objective(nn.Linear(2, 1), lambda outputs, targets: (outputs * targets).mean())
    w = objective.initial()
    batch = (torch.randn(4, 2), torch.randn(4, 1))
    assert torch.equal(objective.hvp(w, batch, torch.ones(3)), torch.zeros(3))


def test_dropout_masks_come_from_the_batch_seed():
    objective = Objective(nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)))
    w = objective.initial()
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    state = torch.get_rng_state()
    first, again = (objective.grad(w, Batch(x, y, seed=1)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, objective.grad(w, Batch(x, y, seed=2)))
    assert torch.equal(torch.get_rng_state(), state)  # the caller's randomness is untouched
    # no seed, no noise
    assert torch.equal(objective.grad(w, (x, y)), objective.grad(w, (x, y)))
    # the gradient and its product see the same mask: a hidden unit with zero gradient is masked
    dead = (first[: 40 * 5].view(40, 5) == 0).all(dim=1)
    product = objective.hvp(w, Batch(x[:1], y[:1], seed=1), torch.randn_like(w))
    masked = (objective.grad(w, Batch(x[:1], y[:1], seed=1))[:200].view(40, 5) == 0).all(dim=1)
    assert 5 < masked.sum() < 35
    assert (product[:200].view(40, 5)[masked] == 0).all()
    assert dead.sum() < masked.sum()


def test_running_statistics_are_refused_unless_frozen():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"running statistics \(1\).*GroupNorm.*frozen"):
        Objective(module)
    objective = Objective(module, running_stats="frozen")
    w = objective.initial()
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    seeded = objective.grad(w, Batch(x, y, seed=3))
    assert torch.equal(seeded, objective.grad(w, (x, y)))
    frozen = objective.module(w)[1]
    assert torch.equal(frozen.running_mean, torch.zeros(4)) and frozen.num_batches_tracked == 0


def test_predictions_have_no_dropout_and_own_modes_are_kept():
    module = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    objective = Objective(module)
    w, x, y = objective.initial(), torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    noisy = objective.value(w, Batch(x, y, seed=1))
    assert torch.equal(objective.predict(w, x), module.eval()(x))
    assert objective.value(w, (x, y)) != noisy
    module.train()[1].eval()  # the user switched this layer off
    assert Objective(module).value(w, Batch(x, y, seed=1)) == objective.value(w, (x, y))


def test_a_loss_without_gradient_is_refused():
    objective = Objective(mlp(), lambda outputs, targets: outputs.detach().sum())
    with pytest.raises(InputError, match="does not depend on the parameters"):
        objective.grad(objective.initial(), batches(1)[0])


def test_products_through_fused_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))
    objective = Objective(module)
    w = objective.initial()
    batch = (torch.randn(6, 4, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
    v = torch.randn_like(w)
    difference = double_difference(objective, w, batch, v)
    assert (objective.hvp(w, batch, v) - difference).norm() < 1e-2 * difference.norm()


def test_other_state_kept_in_buffers_is_refused_when_it_changes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("constant", torch.tensor(float("nan")))  # may stay as it is
            self.seen = 0

        def forward(self, x):
            self.seen = self.seen + 1
            if self.seen > 2:  # not from the start, and in evaluation mode too
                self.calls += 1
            return self.layer(x)

    objective = Objective(Counting())
    w, batch = objective.initial(), (torch.randn(2, 5), torch.tensor([0, 1]))
    objective.grad(w, batch), objective.grad(w, batch)
    with pytest.raises(InputError, match="buffer 'calls'"):
        objective.grad(w, batch)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "ReLU has no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "several kinds"),
        (nn.Sequential(nn.Tanh(), nn.LazyLinear(2)), "the module's 1.weight is not initialized"),
        (nn.Sequential(nn.LazyBatchNorm1d(affine=False)), "0.running_mean is not initialized"),
        (nn.Linear(2, 2, device="meta"), "the module's weight is on the meta device"),
    ],
)
def test_unusable_modules_are_refused(module, message):
    with pytest.raises(InputError, match=message):
        Objective(module)


def test_wrong_vectors_and_losses_are_refused():
    objective = Objective(mlp())
    (batch,) = batches(1)
    with pytest.raises(InputError, match=r"shape \(3,\).*vector of 66 numbers"):
        objective.grad(torch.zeros(3, dtype=torch.float64), batch)
    with pytest.raises(InputError, match=r"float32.*dtype torch.float64"):
        objective.value(objective.initial().float(), batch)
    unreduced = Objective(mlp(), lambda o, t: F.cross_entropy(o, t, reduction="none"))
    with pytest.raises(InputError, match=r"returned \(6,\).*one number"):
        unreduced.value(unreduced.initial(), batch)


def test_in_float64_layers_that_the_user_froze_stay_so_and_the_start_is_the_same():
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    module[1].eval()
    objective = Objective(module)
    double, (inputs, targets, _) = objective.double, batches(1)[0]
    w = objective.initial().double()
    assert torch.equal(double.initial(), w)
    values = [double.value(w, Batch(inputs, targets, seed)) for seed in (None, 1)]
    assert torch.equal(*values)


def test_a_layer_that_occurs_several_times_counts_every_time():
    """One activation object in several places is what many people write."""
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes, dtype=torch.float64) for sizes in ((4, 5), (5, 6), (6, 3))]
    first, second, last = layers
    tanh = nn.Tanh()
    repeated, apart = (
        Objective(nn.Sequential(first, one, second, other, last))
        for one, other in ((tanh, tanh), (nn.Tanh(), nn.Tanh()))
    )
    w = apart.initial()
    v = torch.randn_like(w)
    batch = Batch(torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3)
    stacked = Batch(*(x.expand(2, *x.shape) for x in batch[:2]))
    both = torch.stack([w, v])
    for found, right in (
        (repeated.grad(w, batch), apart.grad(w, batch)),
        (repeated.hvp(w, batch, v), apart.hvp(w, batch, v)),
        (repeated.value(both, stacked), apart.value(both, stacked)),
        (repeated.grad(both, stacked), apart.grad(both, stacked)),
    ):
        assert torch.equal(found, right)
    module = repeated.module(w)
    loss = F.cross_entropy(module(batch.inputs), batch.targets)
    by_autograd = torch.cat([g.flatten() for g in torch.autograd.grad(loss, module.parameters())])
    assert torch.allclose(repeated.grad(w, batch), by_autograd, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_that_change_gradients_are_called(hook):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    hooked = copy.deepcopy(plain)
    getattr(hooked[1], hook)(lambda layer, *given: tuple(2 * d for d in given[0]))
    one, other = Objective(plain), Objective(hooked)
    batch = Batch(torch.randn(7, 4), torch.arange(7) % 3)
    right, found = (objective.grad(one.initial(), batch) for objective in (one, other))
    lower, upper = slice(0, 25), slice(25, None)
    torch.testing.assert_close(found[lower], 2 * right[lower])
    torch.testing.assert_close(found[upper], right[upper])
