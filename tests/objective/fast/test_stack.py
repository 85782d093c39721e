"""A stack of vectors gives what its rows give one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Batch, Objective
from nufed.lab.config.problem import squared_error
from nufed.objective.fast.stack import stacked_losses, stacked_outputs
from support import cnn, mlp, tied

AGENTS, SAMPLES = 3, 4


class Attending(nn.Module):
    """Attention over the five inputs, with LayerNorm, and a buffer that it only reads."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(1, 4), nn.LayerNorm(4)
        self.mix, self.head = nn.Linear(4, 12), nn.Linear(20, 3)
        self.register_buffer("places", torch.linspace(0, 1, 5).view(5, 1))

    def forward(self, x):
        h = self.norm(self.embed(x.unsqueeze(-1)) + self.places)
        q, k, v = self.mix(h).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
        return self.head((h + weights @ v).flatten(1))


class Fused(Attending):
    def forward(self, x):
        h = self.norm(self.embed(x.unsqueeze(-1)) + self.places)
        q, k, v = (part.unsqueeze(1) for part in self.mix(h).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return self.head((h + mixed).flatten(1))


def frozen():
    module = mlp()
    module[0].weight.requires_grad_(False)
    return module


def hooked():
    module = mlp()
    module[0].register_forward_hook(lambda layer, inputs, outputs: outputs**2)
    module[2].register_forward_pre_hook(lambda layer, inputs: (3 * inputs[0],))
    return module


MODULES = {
    "mlp": mlp,
    "linear": lambda: nn.Linear(5, 3),
    "relu without bias": lambda: nn.Sequential(
        nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)
    ),
    "other activations": lambda: nn.Sequential(
        nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4), nn.Softplus(), nn.Linear(4, 3)
    ),
    "sequential with a layer of its own": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "tied": tied,
    "cnn": cnn,
    "attention": Attending,
    "fused attention": Fused,
    "frozen": frozen,
    "hooked": hooked,
}


def weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=outputs.new_tensor([1.0, 2.0, 3.0]))


def scaled(outputs, targets):
    return 3 * outputs.square().mean() + F.cross_entropy(outputs, targets)


LOSSES = {
    "cross_entropy": F.cross_entropy,
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted": weighted,
    "own": scaled,
}


def problem(module, loss=F.cross_entropy, targets=None):
    objective = Objective(module().double(), loss)
    generator = torch.Generator().manual_seed(2)

    def randn(*shape):
        return torch.randn(AGENTS, *shape, generator=generator, dtype=torch.float64)

    w = objective.initial() + 0.3 * randn(objective.size)
    if targets is None:
        targets = torch.randint(0, 3, (AGENTS, SAMPLES), generator=generator)
    return objective, w, randn(objective.size), Batch(randn(SAMPLES, 5), targets)


def rows(batch):
    return [Batch(x, y) for x, y in zip(batch.inputs, batch.targets, strict=True)]


def assert_rows_equal(objective, w, v, batch):
    stacked = {
        "value": objective.value(w, batch),
        "grad": objective.grad(w, batch),
        "hvp": objective.hvp(w, batch, v),
        "predict": objective.predict(w, batch.inputs),
        "norm": objective.norm(w),
    }
    for agent, own in enumerate(rows(batch)):
        alone = {
            "value": objective.value(w[agent], own),
            "grad": objective.grad(w[agent], own),
            "hvp": objective.hvp(w[agent], own, v[agent]),
            "predict": objective.predict(w[agent], own.inputs),
            "norm": objective.norm(w[agent]).reshape(1),
        }
        for name, right in alone.items():
            torch.testing.assert_close(
                stacked[name][agent], right, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: n + m
            )
    assert not any(x.requires_grad for x in stacked.values())


@pytest.mark.parametrize("module", MODULES)
def test_stacks_give_what_their_rows_give(module):
    assert_rows_equal(*problem(MODULES[module]))


@pytest.mark.parametrize("module", ["mlp", "attention"])
@pytest.mark.parametrize("loss", LOSSES)
def test_stacks_with_other_losses(loss, module):
    assert_rows_equal(*problem(MODULES[module], LOSSES[loss]))


def test_stacks_of_regressions():
    targets = torch.randn(AGENTS, SAMPLES, dtype=torch.float64)
    net = lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))  # noqa: E731
    assert_rows_equal(*problem(net, squared_error, targets))


def test_a_stack_of_losses_without_curvature():
    """A loss that is linear in w has zero products, also in a stack."""
    objective, w, v, batch = problem(
        lambda: nn.Linear(5, 3), lambda outputs, targets: outputs.sum()
    )
    assert objective.hvp(w, batch, v).abs().max() == 0
    product, change = objective.joint.hvp(w, batch, v, torch.ones_like(batch.inputs))
    right = torch.ones(SAMPLES, 5, dtype=torch.float64).sum(0).expand(3, 5)
    for agent in range(AGENTS):
        torch.testing.assert_close(product[agent, :15].view(3, 5), right)
        by_inputs = v[agent, :15].view(3, 5).sum(0).expand(SAMPLES, 5)
        torch.testing.assert_close(change[agent], by_inputs)


@pytest.mark.parametrize("module", ["mlp", "other activations", "attention"])
def test_derivatives_by_the_inputs(module):
    objective, w, v, batch = problem(MODULES[module])
    change = torch.randn(batch.inputs.shape, dtype=torch.float64)
    _, by_inputs = objective.joint.grad(w, batch, by_inputs=True)
    product, mixed = objective.joint.hvp(w, batch, v, change)
    for agent, own in enumerate(rows(batch)):
        leaves = [w[agent].clone().requires_grad_(), own.inputs.clone().requires_grad_()]
        loss = objective.forward(leaves[0], (leaves[1], own.targets))
        gradient = torch.autograd.grad(loss, leaves, create_graph=True)
        right = torch.autograd.grad(gradient, leaves, [v[agent], change[agent]])
        for got, expected in (
            (by_inputs[agent], gradient[1].detach()),
            (product[agent], right[0]),
            (mixed[agent], right[1]),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_images_and_bytes_of_labels_keep_their_form():
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).double()
    objective = Objective(module)
    x = torch.randn(AGENTS, SAMPLES, 2, 3)  # float32: cast to the objective's dtype
    batch = Batch(x, torch.randint(0, 3, (AGENTS, SAMPLES)))
    w = torch.randn(AGENTS, objective.size, dtype=torch.float64)
    assert_rows_equal(objective, w, torch.randn_like(w), batch)


@pytest.mark.parametrize("named", [False, True], ids=["tuple", "mapping"])
def test_modules_of_several_inputs(named):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x, shift):
            return self.layer(x * shift)

    objective = Objective(Two().double())
    x, shift = torch.randn(2, AGENTS, SAMPLES, 5, dtype=torch.float64)
    w = torch.randn(AGENTS, objective.size, dtype=torch.float64)
    pack = (lambda a, b: {"shift": b, "x": a}) if named else (lambda a, b: (a, b))
    y = torch.randint(0, 3, (AGENTS, SAMPLES))
    gradients = objective.grad(w, (pack(x, shift), y))
    for agent in range(AGENTS):
        alone = objective.grad(w[agent], (pack(x[agent], shift[agent]), y[agent]))
        torch.testing.assert_close(gradients[agent], alone)


def test_random_layers_are_refused_in_a_stack():
    objective, w, _, batch = problem(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    )
    with pytest.raises(RuntimeError, match="randomness"):
        objective.grad(w, batch._replace(seed=1))


def test_outputs_and_losses_by_themselves():
    module = mlp()
    p = {n: torch.stack([x.detach(), 2 * x.detach()]) for n, x in module.named_parameters()}
    x = torch.randn(2, SAMPLES, 5, dtype=torch.float64)
    outputs = stacked_outputs(module, p, (x,), {})
    torch.testing.assert_close(outputs[0], module(x[0]).detach())
    y = torch.randint(0, 3, (2, SAMPLES))
    losses = stacked_losses(F.cross_entropy, outputs, y)
    assert losses.shape == (2,)
    torch.testing.assert_close(losses[1], F.cross_entropy(outputs[1], y[1]))
