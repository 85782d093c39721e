"""The meta-gradient against autograd through the unrolled loop, closed forms and slopes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from nufed import (
    Exact,
    FirstOrder,
    HessianFree,
    InputError,
    MetaBatch,
    Objective,
    meta_gradient,
    meta_gradient_with_rates,
    trajectory,
)
from support import batches, cnn, mlp, quadratic, relative_error, tied

MODULES = {"mlp": mlp, "cnn": cnn, "tied": tied}


def unrolled(module, w, batch, lr, first_order=False):
    """The gradients of the loss after fine-tuning by w and by rates, by autograd through all of it.

    ``first_order`` takes the gradients of fine-tuning as constants.
    """
    parameters = dict(module.named_parameters())
    sizes = [p.numel() for p in parameters.values()]

    def loss(w, batch):
        views = [v.view(p.shape) for v, p in zip(w.split(sizes), parameters.values(), strict=True)]
        outputs = functional_call(module, dict(zip(parameters, views, strict=True)), batch.inputs)
        return F.cross_entropy(outputs, batch.targets)

    start = w.clone().requires_grad_()
    rates = (lr * torch.ones_like(w)).requires_grad_()
    current = start
    for step in batch.adapt:
        (gradient,) = torch.autograd.grad(loss(current, step), current, create_graph=True)
        current = current - rates * (gradient.detach() if first_order else gradient)
    last = loss(current, batch.outer)
    return torch.autograd.grad(last, (start, rates), materialize_grads=True)


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("per_coordinate", [False, True])
def test_exact_equals_autograd_through_the_unrolled_loop(kind, steps, per_coordinate):
    module = MODULES[kind]()
    objective = Objective(module)
    w = objective.initial()
    own = batches(steps + 1)
    batch = MetaBatch(own[:-1], own[-1], curvature=own[:-1])
    lr = 1.0 * (0.5 + torch.rand_like(w)) if per_coordinate else 1.0
    right, by_rates = unrolled(module, w, batch, lr)
    got = meta_gradient(objective, w, batch, lr=lr, curvature=Exact())
    assert relative_error(got, right) < 1e-10
    both = meta_gradient_with_rates(objective, w, batch, lr=lr, curvature=Exact())
    assert torch.equal(both[0], got)
    torch.testing.assert_close(both[1], by_rates, rtol=1e-9, atol=1e-12)
    if steps > 1:
        assert relative_error(unrolled(module, w, batch, lr, first_order=True)[1], by_rates) > 0.05
    if steps:  # at these step sizes curvature matters, so that the test can tell
        first_order = meta_gradient(objective, w, batch, lr=lr, curvature=FirstOrder())
        assert relative_error(first_order, right) > 0.1


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_step_sizes_by_step_equal_autograd_through_the_unrolled_loop(rows):
    """Three steps with fewer, as many and more rows of step sizes; the last row serves the rest."""
    module, steps = mlp(), 3
    objective, own = Objective(module), batches(steps + 1)
    w, batch = objective.initial(), MetaBatch(own[:-1], own[-1], curvature=own[:-1])
    lr = 0.5 + torch.rand(rows, len(w), dtype=w.dtype, generator=torch.Generator().manual_seed(1))
    leaves = [each.clone().requires_grad_() for each in (w, lr)]
    current = leaves[0]
    for step, each in enumerate(batch.adapt):
        rate, value = leaves[1][min(step, rows - 1)], objective.forward(current, each)
        (gradient,) = torch.autograd.grad(value, current, create_graph=True)
        current = current - rate * gradient
    right = torch.autograd.grad(objective.forward(current, batch.outer), leaves)
    got = meta_gradient_with_rates(objective, w, batch, lr=lr, curvature=Exact())
    for one, other in zip(got, right, strict=True):
        assert relative_error(one, other) < 1e-11
    assert torch.equal(meta_gradient(objective, w, batch, lr=lr, curvature=Exact()), got[0])
    *_, last = trajectory(objective, w, batch.adapt, lr)
    assert relative_error(last, current.detach()) < 1e-14
    same = meta_gradient_with_rates(objective, w, batch, lr=lr[:1], curvature=Exact())
    shared = meta_gradient_with_rates(objective, w, batch, lr=lr[0], curvature=Exact())
    assert torch.equal(same[0], shared[0]) and torch.equal(same[1][0], shared[1])


@pytest.mark.parametrize("steps", range(5))
def test_closed_form_on_quadratics_with_independent_curvature_batches(steps):
    objective, make = quadratic()
    w = objective.initial()
    adapt, curvature = [[make(10 * i + j) for j in range(steps)] for i in (1, 2)]
    outer = make(99)
    alpha = 0.1
    model = w
    for a, b in adapt:
        model = model - alpha * (a @ model - b)
    right = outer[0] @ model - outer[1]
    for a, _ in reversed(curvature):
        right = right - alpha * a @ right
    for how in (Exact(), HessianFree(0.5), HessianFree("auto")):
        got = meta_gradient(
            objective, w, MetaBatch(adapt, outer, curvature), lr=alpha, curvature=how
        )
        # "auto" divides by a tiny step: on the scale of these numbers, eight digits are left
        assert relative_error(got, right) < (1e-7 if how == HessianFree() else 1e-12)


def test_the_order_of_curvature_batches_matters_and_is_right():
    objective, make = quadratic()
    w = objective.initial()
    adapt, curvature, outer = [make(1), make(2)], [make(3), make(4)], make(5)
    batch = MetaBatch(adapt, outer, curvature)
    got = meta_gradient(objective, w, batch, lr=0.1, curvature=Exact())
    *_, last = trajectory(objective, w, adapt, 0.1)
    identity = torch.eye(4, dtype=torch.float64)
    d = objective.grad(last, outer)
    first, second = (identity - 0.1 * a for a, _ in curvature)
    assert relative_error(got, first @ (second @ d)) < 1e-13
    assert relative_error(second @ (first @ d), first @ (second @ d)) > 1e-3


def test_rates_per_coordinate_use_the_transposed_jacobian():
    objective, make = quadratic()
    w = objective.initial()
    rates = torch.tensor([0.3, 0.1, 0.0, 0.2], dtype=torch.float64)
    batch = MetaBatch([make(1)], make(2), [make(3)])
    got = meta_gradient(objective, w, batch, lr=rates, curvature=Exact())
    adapted = w - rates * objective.grad(w, batch.adapt[0])
    jacobian = torch.eye(4, dtype=torch.float64) - torch.diag(rates) @ batch.curvature[0][0]
    right = jacobian.T @ objective.grad(adapted, batch.outer)
    assert relative_error(got, right) < 1e-13


@pytest.mark.parametrize("how", [Exact(), HessianFree(1e-3), HessianFree()])
def test_equal_rates_give_what_the_single_rate_gives(how):
    objective = Objective(mlp())
    w = objective.initial()
    own = batches(5)
    batch = MetaBatch(own[:2], own[2], own[3:])
    one = meta_gradient(objective, w, batch, lr=0.25, curvature=how)
    many = meta_gradient(objective, w, batch, lr=torch.full_like(w, 0.25), curvature=how)
    torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-14)
    none = meta_gradient(objective, w, batch, lr=torch.zeros_like(w), curvature=how)
    assert torch.equal(none, objective.grad(w, batch.outer))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_hessian_free_error_falls_with_slope_two(steps):
    objective = Objective(mlp())
    w = objective.initial()
    own = batches(2 * steps + 1)
    batch = MetaBatch(own[:steps], own[steps], own[steps + 1 :])
    exact = meta_gradient_with_rates(objective, w, batch, lr=0.5, curvature=Exact())
    deltas = [10**-x for x in (0.5, 1.0, 1.5, 2.0)]
    found = [
        meta_gradient_with_rates(objective, w, batch, lr=0.5, curvature=HessianFree(delta))
        for delta in deltas
    ]
    if steps == 1:  # the last step has no curvature behind it
        assert all(torch.equal(each[1], exact[1]) for each in found)
    for place in (0, 1) if steps > 1 else (0,):  # by w, by rates
        errors = [relative_error(each[place], exact[place]) for each in found]
        slopes = [
            (math.log(a) - math.log(b)) / (math.log(x) - math.log(y))
            for a, b, x, y in zip(errors, errors[1:], deltas, deltas[1:], strict=False)
        ]
        assert all(abs(slope - 2) < 0.1 for slope in slopes), slopes


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("with_batches", [False, True])
def test_first_order_by_rates_equals_autograd_with_constant_gradients(steps, with_batches):
    module = mlp()
    objective = Objective(module)
    w = objective.initial()
    own = batches(steps + 1)
    batch = MetaBatch(own[:-1], own[-1], own[:-1] if with_batches else ())
    lr = 0.5 + torch.rand_like(w)
    right = unrolled(module, w, batch, lr, first_order=True)
    got = meta_gradient_with_rates(objective, w, batch, lr=lr, curvature=FirstOrder())
    for mine, theirs in zip(got, right, strict=True):
        assert relative_error(mine, theirs) < 1e-13


def test_first_order_is_the_last_gradient_with_or_without_curvature_batches():
    objective = Objective(mlp())
    w = objective.initial()
    own = batches(5)
    *_, last = trajectory(objective, w, own[:2], 0.5)
    right = objective.grad(last, own[2])
    for curvature in ([], own[3:]):
        batch = MetaBatch(own[:2], own[2], curvature)
        got = meta_gradient(objective, w, batch, lr=0.5, curvature=FirstOrder())
        assert torch.equal(got, right)


@pytest.mark.parametrize("how", [Exact(), FirstOrder(), HessianFree()])
def test_without_steps_it_is_the_plain_gradient(how):
    objective = Objective(mlp())
    w = objective.initial()
    (outer,) = batches(1)
    got = meta_gradient(objective, w, MetaBatch([], outer), lr=0.5, curvature=how)
    assert torch.equal(got, objective.grad(w, outer))


def test_missing_curvature_batches_are_refused():
    objective = Objective(mlp())
    own = batches(3)
    with pytest.raises(InputError, match=r"Exact needs one curvature batch per .* step, 2"):
        meta_gradient(
            objective,
            objective.initial(),
            MetaBatch(own[:2], own[2], own[:1]),
            lr=0.1,
            curvature=Exact(),
        )


@pytest.mark.parametrize("step", [0, -1e-3, float("nan"), float("inf"), "small"])
def test_bad_steps_are_refused(step):
    with pytest.raises(InputError, match="fd_step = "):
        HessianFree(step)
