"""What is trained of a model; frozen parameters are one shared copy."""

import copy

import pytest
import torch
from torch import nn

from nufed import InputError, Objective
from nufed.models.trainable import base_digest, share_base, train_only
from support import batches, mlp


def trained(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("head", ["2.weight", "2.bias"]),
        ("*.bias", ["0.bias", "2.bias"]),
        ("0.weight, head", ["0.weight", "2.weight", "2.bias"]),
        ("last:2", ["0.weight", "0.bias", "2.weight", "2.bias"]),
    ],
)
def test_a_part_is_named_as_parts_of_an_objective(part, names):
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    train_only(module, part)
    assert trained(module) == names
    assert Objective(module).size == sum(dict(module.named_parameters())[n].numel() for n in names)


def test_an_unknown_part_is_named_with_the_parameters():
    with pytest.raises(InputError, match=r"'nothing\*'.*0\.weight"):
        train_only(mlp(), "nothing*")


def test_objectives_share_frozen_parameters_and_no_others():
    module = mlp()
    whole = Objective(module)
    train_only(module, "head")
    one, two = Objective(module), Objective(module)
    for name, parameter in module.named_parameters():
        held = {dict(o._module.named_parameters())[name].data_ptr() for o in (one, two)}
        assert (held == {parameter.data_ptr()}) == (not parameter.requires_grad), name
    (batch,) = batches(1)
    assert torch.equal(
        one.grad(one.initial(), batch), whole.grad(whole.initial(), batch, whole.part("head"))
    )


def test_models_with_equal_frozen_parameters_hold_them_once():
    one = mlp()
    two, other = copy.deepcopy(one), copy.deepcopy(one)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    for module in (one, two, other):
        train_only(module, "head")
        share_base(one, module)
    assert two[0].weight.data_ptr() == one[0].weight.data_ptr()
    assert other[0].weight.data_ptr() != one[0].weight.data_ptr()
    assert two[2].weight.data_ptr() != one[2].weight.data_ptr()


def test_the_digest_is_of_the_frozen_parameters_alone():
    module = mlp()
    assert base_digest(module) == ""
    train_only(module, "head")
    digest = base_digest(module)
    with torch.no_grad():
        module[2].weight[0, 0] += 1
    assert base_digest(module) == digest
    with torch.no_grad():
        module[0].weight[0, 0] += 1
    assert base_digest(module) != digest
