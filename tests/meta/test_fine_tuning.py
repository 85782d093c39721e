import pytest
import torch

from nufed import InputError, Objective, adapt, trajectory
from support import batches, mlp


def test_adapting_equals_sgd_on_the_module():
    module = mlp()
    objective = Objective(module)
    w = objective.initial()
    own = batches(3)
    adapted = adapt(objective, w, own, lr=0.3)

    optimiser = torch.optim.SGD(module.parameters(), lr=0.3)
    for batch in own:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
        optimiser.step()
    right = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(adapted, right, rtol=1e-13, atol=1e-15)
    assert torch.equal(w, objective.initial())


def test_the_trajectory_starts_with_w_and_ends_with_the_adapted_model():
    objective = Objective(mlp())
    w = objective.initial()
    own = batches(3)
    models = list(trajectory(objective, w, own, 0.1))
    assert len(models) == 4 and models[0] is w
    assert torch.equal(models[-1], adapt(objective, w, own, 0.1))
    assert torch.equal(adapt(objective, w, [], 0.1), w)


def test_rates_per_coordinate():
    objective = Objective(mlp())
    w = objective.initial()
    (batch,) = batches(1)
    rates = torch.rand_like(w)
    expected = w - rates * objective.grad(w, batch)
    assert torch.equal(adapt(objective, w, [batch], rates), expected)
    with pytest.raises(InputError, match=r"\(2,\) of torch.float32.*tensor like w"):
        adapt(objective, w, [batch], torch.ones(2))
