"""Gram space, against the same computation on the weights themselves."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Batch, Objective
from nufed.meta.curvature import double_difference
from nufed.models import fcnn, logistic
from nufed.objective.fast.gram_space import GramObjective, GramVector, first_layer

AGENTS, SAMPLES, INPUTS = 3, 7, 9
TABLES = torch.tensor([2, 0, 3])  # of five


class LateFirst(nn.Module):
    """The first layer's weight stands between other parameters."""

    def __init__(self):
        super().__init__()
        self.gain, self.middle = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.first, self.out = nn.Linear(INPUTS, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.gain * torch.sigmoid(self.first(x)))))


MODULES = {
    "tanh": lambda: fcnn((INPUTS,), 3, hidden=(6, 4), activation="tanh"),
    "relu": lambda: fcnn((3, 3), 3, hidden=(6,)),
    "logistic": lambda: logistic((INPUTS,), 3),
    "without bias": lambda: nn.Linear(INPUTS, 3, bias=False),
    "late": LateFirst,
}


class Problem:
    """An objective, some agents' samples, and the map from Gram space to flat vectors."""

    def __init__(self, module, dtype=torch.float64, loss=F.cross_entropy, orthogonal=False):
        self.base = Objective(module.to(dtype), loss)
        self.w0 = self.base.initial()
        self.layer = first_layer(self.base, (INPUTS,))
        self.inputs = torch.randn(AGENTS, SAMPLES, INPUTS, dtype=dtype)
        if orthogonal:
            bases = torch.linalg.qr(self.inputs.mT).Q.mT
            self.inputs = bases * (1 + torch.arange(SAMPLES).unsqueeze(1))
        self.targets = torch.randint(0, 3, (AGENTS, SAMPLES))
        gram = torch.full((5, SAMPLES, SAMPLES), float("nan"), dtype=dtype)
        for agent, table in enumerate(TABLES):
            self.layer.fill_gram(gram[table], self.inputs[agent])
        start = torch.stack([self.layer.apply(self.w0, x) for x in self.inputs])
        self.space = GramObjective(
            self.base, self.layer, gram, TABLES, start, self.layer.norm(self.w0)
        )
        self.start = self.space.initial(self.layer.others(self.w0))

    def batch(self, size=4):
        places = torch.stack([torch.randperm(SAMPLES)[:size] for _ in range(AGENTS)])
        return Batch(places, torch.gather(self.targets, 1, places))

    def flat(self, vector):
        """The flat vectors that a Gram vector stands for, (agents, numbers)."""
        flat = []
        for agent in range(AGENTS):
            scale, places, rows, others = vector.of(agent)
            own = self.inputs[agent, places]
            flat.append(self.layer.vector(self.w0, scale, rows, own, others))
        return torch.stack(flat)

    def own(self, batch, agent):
        return self.inputs[agent, batch.inputs[agent]].view(-1, INPUTS), batch.targets[agent]

    def moved(self, steps=3):
        """A point after some gradient steps, in both spaces."""
        point, flat = self.start, self.flat(self.start)
        for _ in range(steps):
            batch = self.batch()
            point = point - 0.3 * self.space.grad(point, batch)
            gradients = [
                self.base.grad(flat[agent], self.own(batch, agent)) for agent in range(AGENTS)
            ]
            flat = flat - 0.3 * torch.stack(gradients)
        return point, flat


def assert_close(got, right):
    torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


@pytest.fixture(params=MODULES)
def problem(request):
    return Problem(MODULES[request.param]())


def test_the_start_stands_for_the_model_itself(problem):
    assert torch.equal(problem.flat(problem.start), problem.w0.expand(AGENTS, -1))


def test_steps_in_gram_space_are_the_steps_on_the_weights(problem):
    point, flat = problem.moved()
    assert_close(problem.flat(point), flat)
    assert (flat - problem.w0).norm(dim=1).min() > 0.01


def test_gradients_are_those_on_the_weights(problem):
    point, flat = problem.moved()
    batch = problem.batch()
    gradients = problem.flat(problem.space.grad(point, batch))
    for agent in range(AGENTS):
        assert_close(gradients[agent], problem.base.grad(flat[agent], problem.own(batch, agent)))


def test_products_are_those_on_the_weights(problem):
    point, flat = problem.moved()
    gradient = problem.space.grad(point, problem.batch())
    batch = problem.batch()
    # directions of one batch, of several batches, and with a part along the start (s = 2)
    for v in (gradient, gradient - 2 * problem.space.grad(point, batch), 2 * point + gradient):
        products = problem.flat(problem.space.hvp(point, batch, v))
        directions = problem.flat(v)
        for agent in range(AGENTS):
            own = problem.own(batch, agent)
            assert_close(products[agent], problem.base.hvp(flat[agent], own, directions[agent]))


def test_differences_of_gradients_approximate_the_product():
    problem = Problem(MODULES["tanh"]())
    point, _ = problem.moved()
    batch, v = problem.batch(), problem.space.grad(point, problem.batch())
    rough = problem.flat(double_difference(problem.space, point, batch, v))
    exact = problem.flat(problem.space.hvp(point, batch, v))
    torch.testing.assert_close(rough, exact, rtol=1e-5, atol=1e-7)


def test_outputs_are_those_of_the_module(problem):
    point, flat = problem.moved()
    places = torch.tensor([[6, 0, 3]] * AGENTS)
    outputs = problem.space.predict(point, places)
    for agent in range(AGENTS):
        right = problem.base.predict(flat[agent], problem.inputs[agent, places[agent]])
        assert_close(outputs[agent], right)


def test_the_norm_is_a_bound(problem):
    point, flat = problem.moved()
    gradient = problem.space.grad(point, problem.batch())
    for vector in (problem.start, point, gradient, point - 3 * gradient):
        bound, true = problem.space.norm(vector), problem.flat(vector).norm(dim=1, keepdim=True)
        assert bound.shape == (AGENTS, 1) and (bound >= true * (1 - 1e-12)).all()
    assert_close(problem.space.norm(problem.start), flat.new_full((AGENTS, 1), problem.w0.norm()))


@pytest.mark.parametrize("module", ["without bias", "late"])
def test_the_bound_is_within_the_root_of_the_rows_where_samples_are_orthogonal(module):
    problem = Problem(MODULES[module](), orthogonal=True)
    for size in (1, 4, SAMPLES):
        gradient = problem.space.grad(problem.start, problem.batch(size))
        bound = problem.space.norm(gradient).squeeze(1)
        true = problem.flat(gradient).norm(dim=1)
        assert (bound <= math.sqrt(size) * true * (1 + 1e-12)).all()


def random_vector(places=None):
    places = torch.randint(0, SAMPLES, (AGENTS, 4)) if places is None else places
    rows = torch.randn(*places.shape, 6, dtype=torch.float64)
    others = 6 * 4 + 4 + 4 * 3 + 3
    scale, tail = torch.randn(AGENTS, 1 + others, dtype=torch.float64).split([1, others], dim=1)
    return GramVector(scale, places, rows, tail)


def test_arithmetic_is_that_of_the_vectors_they_stand_for():
    problem = Problem(MODULES["tanh"]())
    a, b = random_vector(), random_vector()
    same = random_vector(a.places)
    factors = torch.rand(AGENTS, 1, dtype=torch.float64) + 0.5
    flat = problem.flat
    cases = [
        (a + b, flat(a) + flat(b)),
        (a - b, flat(a) - flat(b)),
        (a + same, flat(a) + flat(same)),
        (a - same, flat(a) - flat(same)),
        (2.5 * a, 2.5 * flat(a)),
        (a * -0.5, -0.5 * flat(a)),
        (a / 4, flat(a) / 4),
        (a * factors, flat(a) * factors),
        (a / factors, flat(a) / factors),
    ]
    for got, right in cases:
        assert_close(flat(got), right)
    assert (a - same).rows.shape == a.rows.shape  # of one batch: no more rows
    assert (a - b).rows.shape[1] == 8


def test_vectors_change_their_precision():
    vector = random_vector().to(torch.float32)
    assert vector.dtype == vector.rows.dtype == vector.others.dtype == torch.float32
    wide = vector.to(torch.float64)
    assert wide.dtype == wide.rows.dtype == torch.float64
    assert torch.equal(wide.rows.float(), vector.rows) and wide.places is vector.places


def test_gradients_are_directions_and_points_are_not():
    problem = Problem(MODULES["tanh"]())
    gradient = problem.space.grad(problem.start, problem.batch())
    assert gradient.is_direction and (3 * gradient - gradient / 2).is_direction
    assert not problem.start.is_direction and not (problem.start + gradient).is_direction


def test_the_double_objective_gives_double_gradients():
    problem = Problem(MODULES["tanh"](), torch.float32)
    point, _ = problem.moved()
    batch, double = problem.batch(), problem.space.double
    narrow, wide = problem.space.grad(point, batch), double.grad(point.to(torch.float64), batch)
    assert (narrow.dtype, wide.dtype, double.dtype) == (
        torch.float32,
        torch.float64,
        torch.float64,
    )
    torch.testing.assert_close(wide.rows.float(), narrow.rows, rtol=1e-4, atol=1e-6)
    assert not torch.equal(wide.rows.float().double(), wide.rows)


@pytest.mark.parametrize("bias", [True, False])
def test_the_matrix_is_filled_block_by_block(bias):
    layer = first_layer(Objective(nn.Linear(INPUTS, 3, bias=bias).double()), (INPUTS,))
    x = torch.randn(SAMPLES, INPUTS, dtype=torch.float64)
    right = x @ x.T + int(bias)
    for block in (1, 3, 7, 128):
        table = torch.full((9, 9), float("nan"), dtype=torch.float64)
        layer.fill_gram(table, x, block)
        assert_close(table[:SAMPLES, :SAMPLES], right)
        assert table[SAMPLES:].isnan().all() and table[:, SAMPLES:].isnan().all()


def test_the_first_layer_is_found_with_its_place():
    layer = first_layer(Objective(LateFirst()), (INPUTS,))
    assert (layer.start, layer.outputs, layer.inputs, layer.bias) == (24, 4, INPUTS, False)
    layer = first_layer(Objective(MODULES["relu"]()), (3, 3))
    assert (layer.start, layer.outputs, layer.bias) == (0, 6, True)
    assert layer.rest.size == 6 * 3 + 3
    assert first_layer(Objective(logistic((4,), 3)), (5,)) is None
    assert first_layer(Objective(nn.Sequential(nn.Conv1d(1, 2, 3))), (INPUTS,)) is None


def test_any_other_loss_goes_to_gram_space_too():
    def loss(outputs, targets):
        return outputs.square().mean() + F.cross_entropy(outputs, targets)

    problem = Problem(MODULES["tanh"](), loss=loss)
    point, flat = problem.moved()
    assert_close(problem.flat(point), flat)
