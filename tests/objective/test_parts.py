"""Parts of a model are the right coordinates of the flat vector."""

import pytest
import torch
from torch import nn

from nufed import InputError, Objective
from nufed.algorithms.partial import divide
from nufed.models import cnn_groupnorm as image_cnn
from nufed.objective.parts import Part
from support import cnn, mlp, tied


def named_vector(module):
    """Every coordinate of the flat vector, by the parameter it belongs to."""
    objective = Objective(module)
    vector = torch.arange(objective.size, dtype=torch.float64)
    filled = objective.module(vector)
    return objective, vector, dict(filled.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("make", [mlp, cnn, tied, lambda: image_cnn((8, 8), 3).double()])
def test_head_and_body_divide_the_model(make):
    objective, vector, parameters = named_vector(make())
    head, body = objective.part("head"), objective.part("body")
    layer = list(parameters)[-1].rpartition(".")[0]
    own = [p.flatten() for n, p in parameters.items() if n.rpartition(".")[0] == layer]
    assert torch.equal(head.take(vector), torch.cat(own))
    both = torch.cat([body.take(vector), head.take(vector)]).sort().values
    assert torch.equal(both, vector) and head.size + body.size == objective.size


def test_a_pattern_takes_whole_parameters_and_may_be_scattered():
    objective, vector, parameters = named_vector(mlp())
    biases = objective.part("*.bias")
    assert isinstance(biases.index, torch.Tensor) and biases.size == 7 + 3
    own = torch.cat([parameters["0.bias"], parameters["2.bias"]])
    assert torch.equal(biases.take(vector), own)
    assert isinstance(objective.part("2.*").index, slice)


def test_tied_parameters_are_taken_once():
    objective, vector, parameters = named_vector(tied())
    part = objective.part("inner.*.weight")
    assert torch.equal(part.take(vector), parameters["inner.encode.weight"].flatten())


def test_put_changes_the_part_only_also_row_by_row():
    objective = Objective(mlp())
    part = objective.part("*.bias")
    w = torch.randn(4, objective.size, dtype=torch.float64)
    changed = part.put(w, torch.zeros(4, part.size, dtype=torch.float64))
    assert not part.take(changed).any() and not torch.equal(changed, w)
    assert torch.equal(part.put(changed, part.take(w)), w)


def test_a_model_of_one_layer_has_no_body():
    objective = Objective(nn.Linear(5, 3))
    assert objective.part("head").size == objective.size
    assert objective.part("body").size == objective.part("norm").size == 0
    with pytest.raises(InputError, match=r"part = 'conv\*': no parameter.*weight, bias"):
        objective.part("conv*")


def test_the_last_layers_count_layers_not_tensors():
    objective, vector, parameters = named_vector(cnn())
    names = list(parameters)  # 1.weight, 1.bias, 2.weight, 2.bias, 5.weight, 5.bias
    for number, first in ((0, 6), (1, 4), (2, 2), (3, 0), (9, 0)):
        own = [parameters[n].flatten() for n in names[first:]]
        part = objective.part(f"last:{number}")
        assert torch.equal(part.take(vector), torch.cat([vector[:0], *own]))
    with pytest.raises(InputError, match="part = 'last:x': no parameter"):
        objective.part("last:x")


def test_several_parts_and_the_rest():
    objective, vector, _ = named_vector(cnn())
    part, rest = divide(objective, "head, norm, 5.bias")
    both = [objective.part(name) for name in ("norm", "head")]
    assert torch.equal(part.take(vector), torch.cat([each.take(vector) for each in both]))
    assert torch.equal(torch.cat([part.take(vector), rest.take(vector)]).sort().values, vector)
    assert torch.equal(part.only(vector), rest.put(vector, torch.zeros(rest.size).double()))
    for name, sizes in (("all", (objective.size, 0)), ("none", (0, objective.size))):
        assert tuple(each.size for each in divide(objective, name)) == sizes
        assert all(isinstance(each.index, slice) for each in divide(objective, name))


@pytest.mark.parametrize("few", [0, 512])
def test_a_part_of_several_slices_is_copied_slice_by_slice_or_by_index(few, monkeypatch):
    monkeypatch.setattr("nufed.objective.parts.FEW_BLOCKS", few)
    mask = torch.tensor([True, True, False, True, False, False, True])
    part, w = Part.where(mask), torch.arange(14.0).view(2, 7)
    assert torch.equal(part.take(w), w[:, mask])
    filled = part.put(w, -part.take(w))
    assert torch.equal(filled, torch.where(mask, -w, w))
    assert torch.equal(part.keep(w), w[:, mask])
    assert Part.where(torch.zeros(3, dtype=torch.bool)).size == 0


@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1], [0]])
def test_long_pieces_are_views_and_the_rest_is_one_part(mask, monkeypatch):
    monkeypatch.setattr("nufed.objective.parts.LONG", 3)
    mask = torch.tensor(mask) == 1
    part, w = Part.where(mask), torch.arange(1.0, len(mask) + 1)
    found = torch.zeros_like(w)
    for piece in part.pieces:
        piece.fill(found, piece.take(w))
    assert torch.equal(found, torch.where(mask, w, 0))
    assert sum(piece.size for piece in part.pieces) == part.size
    assert [piece.contiguous for piece in part.pieces][:-1] == [True] * (len(part.pieces) - 1)
    assert len(part.pieces) == (3 if len(mask) > 4 else 1)
