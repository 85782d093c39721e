"""The automatic step lands in the good range, and poor fixed steps are noticed."""

import warnings

import pytest
import torch
from torch import nn

from nufed import Batch, Exact, HessianFree, InputError, NumericalWarning, Objective, adapt
from nufed.meta.curvature import difference
from nufed.models import fcnn
from support import batches, mlp, relative_error


def smooth_net():
    """A smooth net of the quickstart's size, in float32."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def images(count, size, seed):
    """Image-like inputs in [0, 1]: neighbouring pixels alike, few classes, as an agent has them."""
    generator = torch.Generator().manual_seed(seed)
    side = {3072: 32, 64: 8}[size]
    channels = size // side**2
    coarse = torch.rand(count, channels, 5, 5, generator=generator)
    pixels = nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")
    return Batch(pixels.flatten(1), torch.randint(0, 3, (count,), generator=generator))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("make", "size", "within"), [(smooth_net, 64, 0.01), (lambda: fcnn((3072,), 10), 3072, 0.05)]
)
def test_auto_is_close_to_exact_in_float32(make, size, within, trained):
    objective = Objective(make())
    w = objective.initial()
    if trained:
        w = adapt(objective, w, [images(40, size, seed) for seed in range(100, 250)], lr=0.05)
    for seed in range(5):
        batch, outer = images(40, size, 2 * seed), images(40, size, 2 * seed + 1)
        d = objective.grad(w, outer)
        exact = objective.hvp(w, batch, d)
        got = HessianFree("auto").product(objective, w, batch, d)
        assert got.dtype == torch.float32
        assert relative_error(got, exact) < within


def test_a_fixed_step_that_crosses_kinks_is_warned_about_once():
    objective = Objective(fcnn((3072,), 10))
    w = objective.initial()
    batch = images(40, 3072, 1)
    d = objective.grad(w, images(40, 3072, 2))
    how = HessianFree(1e-3)
    with pytest.warns(NumericalWarning, match=r"fd_step = 0.001 .* kinks .*\"auto\"") as caught:
        for _ in range(12):
            how.product(objective, w, batch, d)
    assert len(caught) == 1


def test_a_fixed_step_that_drowns_in_rounding_is_warned_about():
    objective = Objective(smooth_net())
    w = objective.initial()
    batch = images(40, 64, 1)
    with pytest.warns(NumericalWarning, match=r"fd_step = 1e-08 .* rounding of torch.float32"):
        HessianFree(1e-8).product(objective, w, batch, objective.grad(w, batch))


def test_a_good_fixed_step_is_not_warned_about():
    objective = Objective(mlp())
    w = objective.initial()
    (batch,) = batches(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HessianFree(1e-4).product(objective, w, batch, objective.grad(w, batch))


def test_the_direction_zero_gives_zero():
    objective = Objective(mlp())
    w = objective.initial()
    (batch,) = batches(1)
    assert not HessianFree().product(objective, w, batch, torch.zeros_like(w)).any()


def test_both_sides_of_the_difference_see_the_same_dropout_mask():
    objective = Objective(
        nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Dropout(), nn.Linear(40, 3))
    )
    w = objective.initial()
    batch = Batch(*batches(1)[0][:2], seed=7)
    v = torch.randn_like(w)
    exact = objective.hvp(w, batch, v)
    # float32 and float64 draw the same masks too, so that this agrees with the exact product
    assert relative_error(HessianFree().product(objective, w, batch, v), exact) < 1e-5
    other = objective.hvp(w, batch._replace(seed=8), v)
    assert relative_error(other, exact) > 0.1


def test_modules_that_cannot_run_in_double_are_named_with_the_ways_out():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x) @ torch.eye(3, dtype=torch.float32)

    objective = Objective(Stubborn())
    w = objective.initial()
    (batch,) = batches(1)
    with pytest.raises(InputError, match="float64, which this module or loss does not take"):
        HessianFree().product(objective, w, batch, w)


def test_the_automatic_step_follows_the_norms(monkeypatch):
    objective = Objective(mlp())
    (batch,) = batches(1)
    steps = []
    monkeypatch.setattr(
        Objective,
        "beside",
        lambda self, w, batch, v, step: steps.append(float(step)) or (torch.zeros_like(v),) * 2,
    )
    w, v = torch.ones(objective.size, dtype=torch.float64), objective.initial()
    for scale_w, scale_v in [(1, 1), (3, 1), (1, 10)]:
        HessianFree().product(objective, scale_w * w, batch, scale_v * v)
    norm = float(w.norm())
    assert steps[1] / steps[0] == pytest.approx((1 + 3 * norm) / (1 + norm))
    assert steps[2] / steps[0] == pytest.approx(1 / 10)
    assert steps[0] == pytest.approx(2**-26 * (1 + norm) / float(v.norm()))


@pytest.mark.parametrize("distance", [0.0, 1e-13, 1e-11, 1e-9, 1e-8, -1e-12, -1e-9])
def test_the_automatic_step_stays_on_one_side_of_a_kink(distance):
    """A ReLU unit whose input lies very close to 0, in one row of a stack of two."""
    objective = Objective(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)).double())
    near = torch.tensor([1.0, -1.0 + distance, 0.7, -0.4, 0.1, 0.2], dtype=torch.float64)
    far = torch.tensor([1.0, 0.5, 0.7, -0.4, 0.1, 0.2], dtype=torch.float64)
    w = torch.stack([near, far])
    inputs, targets = torch.ones(2, 1, 1, dtype=torch.float64), torch.zeros(2, 1).long()
    v = torch.full_like(w, 0.3)
    batch = Batch(inputs, targets)
    exact = Exact().product(objective, w, batch, v)
    assert relative_error(HessianFree().product(objective, w, batch, v), exact) < 1e-2
    jump = difference(objective, w, batch, v, 1e-7)  # the step without that care
    assert relative_error(jump, exact) > 1e3


def test_the_automatic_step_between_two_kinks():
    """Two ReLU units whose inputs change their signs on either side, very close."""
    objective = Objective(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).double())
    w = objective.initial()
    w[:2], w[2:4] = 1.0, torch.tensor([-1 + 1e-10, -1 - 1e-10], dtype=torch.float64)
    v = torch.full_like(w, 0.3)
    batch = Batch(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1).long())
    assert difference(objective, w, batch, v, 1e-8).norm() > 1e5 * v.norm()
    assert HessianFree().product(objective, w, batch, v).norm() < 10 * v.norm()  # one side's


def test_steep_but_smooth_products_are_kept():
    module = nn.Linear(1, 1, bias=False).double()
    objective = Objective(
        module, lambda outputs, targets: 1e6 * (outputs - targets).square().mean()
    )
    w = objective.initial()
    batch = Batch(torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))
    product = HessianFree().product(objective, w, batch, torch.ones_like(w))
    assert float(product) == pytest.approx(2e6, rel=1e-4)


def test_products_with_frozen_statistics():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    objective = Objective(module, running_stats="frozen")
    w = objective.initial()
    (batch,) = batches(1)
    v = torch.randn_like(w)
    exact = objective.hvp(w, batch, v)
    assert relative_error(HessianFree().product(objective, w, batch, v), exact) < 1e-6


def test_a_wrong_second_derivative_of_torch_is_noticed():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.Tanh())
    objective = Objective(nn.Sequential(module, nn.Linear(8, 3)))
    w = objective.initial()
    (batch,) = batches(1)
    d = objective.grad(w, batch)
    if (
        relative_error(objective.hvp(w, batch, d), HessianFree().product(objective, w, batch, d))
        < 0.1
    ):
        pytest.skip("this torch computes the second derivative of weight_norm rightly")
    with pytest.warns(NumericalWarning, match="wrong second derivative in torch"):
        Exact().product(objective, w, batch, d)
