"""Exits and sub-networks: against networks that are built narrow, and what is refused."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Batch, InputError, Objective
from nufed.algorithms.scalefl import exit_number, first_exits, first_levels, narrowed
from nufed.models import MultiExit, multi_exit
from nufed.objective.parts import Part
from support import tied

HALF = [Fraction("0.55"), Fraction(1)]


def convolutions(first=5, second=3, third=100):
    """Convolutions, a residual block, and exits on flattened channels of 2 × 2 pixels."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Conv2d(first, second, 3, padding=1) for _ in range(2))

        def forward(self, x):
            return F.softplus(self.a(x) + self.b(x))

    stages = [
        nn.Sequential(nn.Conv2d(2, first, 3, padding=1), nn.BatchNorm2d(first), nn.Softplus()),
        Block(),
        nn.Sequential(nn.Flatten(), nn.Linear(second * 4, third), nn.Softplus()),
    ]
    exits = [
        nn.Sequential(nn.Flatten(), nn.Linear(first * 4, 3)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(second, 3)),
        nn.Linear(third, 3),
    ]
    return MultiExit(stages, exits).double()


def batch(seed=1):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 2, 2, 2, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(0, 3, (8,), generator=generator), seed)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("running_stats", ["frozen", "tracked"])
def test_a_masked_network_is_the_narrow_one(depth, running_stats):
    """Outputs and gradients; 0.55 of 5, 3, 100 units are 3, 2, 55 (in floats 0.55·100 > 55)."""
    torch.manual_seed(0)
    objective = Objective(convolutions(), running_stats=running_stats)
    narrow = Objective(convolutions(3, 2, 55), running_stats=running_stats)
    w = torch.randn(objective.size, dtype=torch.float64).exp()
    held = first_levels(objective, HALF, [depth, 3]) <= 0

    def loss(outputs, targets):
        return sum(F.cross_entropy(own, targets) for own in outputs)

    # the same numbers in the narrow network, tensor by tensor
    shapes = {n: p.shape for n, p in convolutions().named_parameters()}
    own_shapes = {n: p.shape for n, p in convolutions(3, 2, 55).named_parameters()}
    if running_stats == "tracked":
        for name in ("running_mean", "running_var"):
            shapes[f"stages.0.1.{name}"], own_shapes[f"stages.0.1.{name}"] = (5,), (3,)
    parts, places, start = [], [], 0
    numbers = torch.arange(objective.size)
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        whole = numbers[start : start + size].view(tuple(shape))
        cut = whole[tuple(slice(k) for k in own_shapes[name])]
        parts.append(w[cut].flatten())
        if int(name.split(".")[1]) < depth:
            places.append(cut.flatten())
        start += size
    assert start == objective.size
    right = torch.zeros_like(held)
    right[torch.cat(places)] = True
    assert torch.equal(held, right)
    v = torch.cat(parts)
    wide, slim = (first_exits(each, depth, loss) for each in (objective, narrow))
    masked = torch.where(held, w, 0)
    for seed in (None, 3):  # evaluation and training mode
        found, expected = wide.grad(masked, batch(seed)), slim.grad(v, batch(seed))
        flat = found[torch.cat(places)]
        sizes = [torch.Size(shape).numel() for shape in own_shapes.values()]
        grads = zip(own_shapes, torch.split(expected, sizes), strict=True)
        kept = torch.cat([g for name, g in grads if int(name.split(".")[1]) < depth])
        torch.testing.assert_close(flat, kept, rtol=1e-10, atol=1e-12)
    x = batch().inputs
    torch.testing.assert_close(wide.predict(masked, x), slim.predict(v, x), rtol=1e-10, atol=1e-12)
    assert wide.predict(masked, x).shape == (depth, 8, 3)


def test_all_exits_end_with_the_answer_of_the_module():
    objective = Objective(multi_exit((5,), 3, (7, 6)))
    w, x = objective.initial(), torch.randn(4, 5)
    both, first = (first_exits(objective, depth).predict(w, x) for depth in (2, 1))
    assert torch.equal(both[-1], objective.predict(w, x)) and torch.equal(both[:1], first)
    assert exit_number(objective) == 2 and exit_number(Objective(nn.Linear(2, 1))) == 1
    double = first_exits(objective.double, 2)
    assert double.predict(w.double(), x).dtype == torch.float64
    assert torch.equal(objective.initial(), w)


def test_dropout_and_evaluation_mode_do_not_mix():
    """The objectives of several depths each keep their own mode."""
    stages = [nn.Sequential(nn.Linear(5, 30), nn.Dropout(0.5)), nn.Linear(30, 4)]
    objective = Objective(MultiExit(stages, [nn.Linear(30, 3), nn.Linear(4, 3)]))
    w, x, y = objective.initial(), torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    exits = first_exits(objective, 2, lambda z, y: F.cross_entropy(z[-1], y))
    for seed in (4, None, 4, 9, None):
        expected = objective.value(w, Batch(x, y, seed))
        assert torch.equal(exits.value(w, Batch(x, y, seed)), expected)
        objective.predict(w, x)
    assert exits.value(w, Batch(x, y, 4)) != exits.value(w, Batch(x, y))


def test_statistics_of_early_exits_are_tracked():
    stages = [nn.Linear(5, 4), nn.Linear(4, 4)]
    exits = [nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), nn.Linear(4, 3)]
    objective = Objective(MultiExit(stages, exits), running_stats="tracked")
    w = objective.initial()
    samples = Batch(torch.randn(6, 5), torch.zeros(6, dtype=torch.long), 1)
    place = objective.part("exits.0.0.running_mean")
    assert not place.take(objective.track(w, samples)).any()  # the last exit does not use it
    assert place.take(first_exits(objective, 2).track(w, samples)).all()


def test_the_first_layer_keeps_its_inputs_and_the_last_its_outputs():
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    objective = Objective(module)
    levels = first_levels(objective, [Fraction(1, 2), Fraction(1)], [1, 1])
    weights, bias, out, offset = torch.split(levels, [30, 6, 24, 4])
    assert weights.view(6, 5).tolist() == [[0] * 5] * 3 + [[1] * 5] * 3
    assert bias.tolist() == [0] * 3 + [1] * 3
    assert out.view(4, 6).tolist() == [[0, 0, 0, 1, 1, 1]] * 4 and not offset.any()
    assert not first_levels(objective, [Fraction(1)] * 2, [1, 1]).any()


class Outside(MultiExit):
    def __init__(self):
        super().__init__([nn.Linear(5, 4)], [nn.Linear(4, 3)])
        self.scale = nn.Linear(5, 5)


@pytest.mark.parametrize(
    "module, says",
    [
        (tied(), "the model has tied weights"),
        (nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), "1 is a LayerNorm"),
        (nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 3, 1)), "layer 0 is a Conv1d"),
        (nn.LSTM(5, 3), "layer that is the model itself is a LSTM"),
        (Outside(), "parameters of scale are in none of its stages and exits"),
        (MultiExit([nn.Linear(5, 4)], [nn.Linear(4, 3), nn.Linear(4, 3)]), "1 stages and 2 exits"),
    ],
)
def test_what_can_not_be_narrowed_is_refused_in_one_sentence(module, says):
    with pytest.raises(InputError, match=says) as error:
        first_levels(Objective(module), HALF, [1, 1])
    assert "\n" not in str(error.value)


def test_a_level_of_capacity_is_the_network_with_zeros_elsewhere():
    torch.manual_seed(0)
    objective = Objective(multi_exit((6,), 4, hidden=(5, 3)).double())
    w = objective.initial()
    batch = torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 4

    def loss(outputs, targets):
        return sum(F.cross_entropy(each, targets) for each in outputs)

    widths, depths = (Fraction(1, 2), Fraction(3, 4), Fraction(1)), (1, 2, 2)
    for level, depth in enumerate(depths):
        own = narrowed(objective, widths[level], depth, loss)
        part = Part.where(first_levels(objective, widths, depths) <= level)
        right = part.take(first_exits(objective, depth, loss).grad(part.only(w), batch))
        assert part.size == own.size and (part.size < len(w) or level == 2)
        torch.testing.assert_close(own.grad(part.take(w), batch), right, rtol=1e-12, atol=1e-15)
