"""FedL2P: its first phase is FedAvg, its hypergradient is right; wrong implementations."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from nufed import Batch, Objective, fedavg
from nufed.algorithms import FedL2P
from nufed.algorithms.fedl2p import MetaNets
from nufed.algorithms.protocol import AgentResult, Algorithm
from nufed.algorithms.server_optimizer import AvgM
from nufed.meta.fine_tuning import per_coordinate, trajectory
from nufed.server import initial_server, to_send
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp, quadratic_loss

SHARED = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.2}
TENSORS = (35, 7, 21, 3)  # of the mlp
LEARNING = {"adapt_steps": 2, "net_lr": 0.1, "base_lr": 0.1, **SHARED}


def history(algorithm, engine, rounds=5):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def constant(nets, rates, mixing=()):
    """λ of meta-nets that say the same of all data: output weights are 0, the biases are said."""
    lam = torch.zeros(sum(s.numel() for s in map(torch.empty, nets.shapes.values())))
    parts = nets.unflatten(lam := lam.double())
    parts["lr.2.bias"].fill_(1.0)
    parts["rates"].copy_(torch.as_tensor(rates, dtype=torch.float64))
    if len(mixing):
        parts["bn.2.bias"].copy_(torch.as_tensor(mixing, dtype=torch.float64))
    return lam


# the first phase


def check_phases(kind):
    """FedAvg to the bit and at its cost, with a server optimiser too; then w keeps its bits."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    for optimizer in ({}, {"server_optimizer": AvgM()}):
        rounds = history(kind(pretrain_rounds=3, **LEARNING, **optimizer), engine)
        right = history(fedavg(**SHARED, **optimizer), engine)
        for k, (one, other) in enumerate(zip(rounds, right, strict=True)):
            if k <= 3:
                assert torch.equal(one.server["model"], other.server["model"])
                assert one.cost == other.cost
                assert torch.equal(one.server["meta_net"], rounds[0].server["meta_net"])
                assert torch.equal(one.server["rates"], rounds[0].server["rates"])
            else:
                assert torch.equal(one.server["model"], rounds[3].server["model"])
                for name in ("meta_net", "rates"):
                    assert not torch.equal(one.server[name], rounds[k - 1].server[name])


def test_the_first_phase_is_fedavg_and_the_second_keeps_its_model():
    check_phases(FedL2P)


def test_what_travels_and_what_it_costs():
    engine, algorithm = DirectEngine(Objective(mlp()), federation(), 5), FedL2P(1, 3, **SHARED)
    first, second = history(algorithm, engine, 2)[1:]
    assert algorithm.sent_in(1) == ("model",) and set(algorithm.sent_in(2)) == {"meta_net", "rates"}
    assert (first.cost.gradients, first.cost.hvps) == (3 * 2, 0)
    assert (second.cost.gradients, second.cost.hvps) == (3 * 2 * (3 + 2), 3 * 2 * 3)


def check_server(kind):
    """λ and η at the server are the means of what the agents of the cohort send."""
    engine, algorithm = DirectEngine(Objective(mlp()), federation(), 5), kind(0, **LEARNING)
    before, after = history(algorithm, engine, 1)
    received = to_send(algorithm, before.server)
    sent = []
    for agent in after.cohort:
        own = agent_context(engine.objective, engine.federation.batches(agent, 5, "train", 1))
        sent.append(algorithm.agent_update(own, received, {}).vectors)
    for name in ("meta_net", "rates"):
        right = sum(vectors[name] for vectors in sent) / len(sent)
        assert torch.allclose(after.server[name], right, rtol=0, atol=1e-14)
    assert not torch.equal(sent[0]["rates"], sent[1]["rates"])  # every agent has its own


def test_the_server_averages_meta_nets():
    check_server(FedL2P)


# what an agent uses


def check_constant(kind):
    """A constant meta-net is FedAvg with fine-tuning by that α per tensor; ``scale`` multiplies."""
    data, objective = federation(), Objective(mlp())
    algorithm, rates = kind(**SHARED), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    lam = constant(algorithm.nets(objective), rates)
    received = {"model": objective.initial(), "meta_net": lam, "rates": rates}
    alpha = torch.cat(
        [torch.full((n,), float(r)) for n, r in zip(TENSORS, rates, strict=True)]
    ).double()
    for agent, scale in ((2, 1.0), (4, 0.25)):
        own = agent_context(objective, data.batches(agent, 0, "evaluate"))
        personal = algorithm.personal_model(own, received, None)
        found = list(algorithm.fine_tune(own, received, personal.tensors, 3, scale))
        plain = fedavg(**{**SHARED, "adapt_lr": alpha})
        right = list(plain.fine_tune(own, received, {"model": received["model"]}, 3, scale))
        w = received["model"]
        for i, batch in enumerate([*own.batches.draw("adapt", 6, 3), None]):
            assert torch.allclose(found[i]["model"], right[i]["model"], rtol=0, atol=1e-14)
            assert torch.allclose(found[i]["model"], w, rtol=0, atol=1e-13)
            w = w if batch is None else w - scale * alpha * objective.grad(w, batch)


def test_a_constant_meta_net_is_fedavg_with_fine_tuning():
    check_constant(FedL2P)


def by_hand(module, x):
    """Mean and standard deviation of the inputs of both layers of an mlp."""
    hidden = torch.tanh(F.linear(x, module[0].weight, module[0].bias))
    return torch.stack([s for v in (x, hidden) for s in (v.mean(), (v.var() + 1e-5).sqrt())])


def check_rates_by_hand(kind):
    """η = η̃⊙clamp(LRNet(statistics of the agent's data under w)), the net written out."""
    module, data = mlp(), federation()
    objective, algorithm = Objective(module), kind(**{**SHARED, "batch_size": 18})
    nets = algorithm.nets(objective)
    generator = torch.Generator().manual_seed(3)
    lam = nets.initial(objective.initial(), 0.2)
    lam = lam + 0.1 * torch.randn(lam.shape, generator=generator).double()
    p = nets.unflatten(lam)
    received = {"model": objective.initial(), "meta_net": lam, "rates": torch.ones(4).double()}
    agents = []
    for agent in (1, 3):
        own = agent_context(objective, data.batches(agent, 0, "evaluate"))
        x = by_hand(module, own.batches.whole().inputs.double()).detach()
        for i in range(3):
            x = p[f"lr.{i}.weight"] @ x + p[f"lr.{i}.bias"]
            x = torch.relu(x) if i < 2 else x.clamp(0, 1000)
        eta = torch.cat(
            [torch.full((n,), float(r)) for n, r in zip(TENSORS, p["rates"] * x, strict=True)]
        )
        personal = algorithm.personal_model(own, received, None).tensors
        assert torch.equal(personal["model"], received["model"])
        *_, last = algorithm.fine_tune(own, received, personal, 2)
        w = received["model"]
        for batch in own.batches.draw("adapt", 18, 2):
            w = w - eta.double() * objective.grad(w, batch)
        assert torch.allclose(last["model"], w, rtol=0, atol=1e-8)
        agents.append(eta)
    assert not torch.allclose(agents[0], agents[1], rtol=1e-3)


def test_step_sizes_are_the_meta_nets_of_the_agents_statistics():
    check_rates_by_hand(FedL2P)


def test_clamps_hold_and_let_gradients_through():
    objective = Objective(mlp())
    nets = MetaNets(objective, 5, most=2.0)
    lam, w = constant(nets, [0.1, -0.1, 0.2, 0.2]), objective.initial()
    nets.unflatten(lam)["lr.2.bias"].copy_(torch.tensor([-1.0, 1.0, 3.0, 1.5]))
    profile = nets.profile(w, torch.randn(8, 5))
    rates, mixing = nets.strategy(lam, profile)
    assert torch.allclose(rates, torch.tensor([0.0, 0.0, 0.4, 0.3]).double())
    assert mixing.numel() == 0
    *_, chain = nets.traced(lam, profile)
    through = nets.unflatten(chain(torch.ones(4).double(), mixing))
    assert torch.allclose(through["lr.2.bias"], torch.tensor([0.1, 0.0, 0.2, 0.2]).double())
    assert torch.allclose(through["rates"], torch.tensor([0.0, 1.0, 2.0, 1.5]).double())


def check_split(kind):
    """What L_V is made of is never trained on, in no step of a round."""
    data, seen, held = federation(), set(), set()
    objective = Objective(mlp())

    class Watching(kind):
        def hypergradient(self, objective, nets, w, lam, profile, inner, outer):
            seen.update(float(x[0]) for batch in inner for x in batch.inputs)
            held.update(float(x[0]) for x in outer.inputs)
            assert outer.seed is None and len(inner) == self.adapt_steps + 1
            return super().hypergradient(objective, nets, w, lam, profile, inner, outer)

    algorithm = Watching(0, **{**LEARNING, "local_steps": 20})
    received = to_send(algorithm, initial_server(algorithm, objective, objective.initial()))
    own = agent_context(objective, data.batches(1, 0, "train", 1))
    algorithm.agent_update(own, received, {})
    everything = {float(x[0]) for x in own.batches.whole().inputs}
    assert len(held) == round(0.2 * 18) and seen == everything - held


def test_validation_samples_are_held_out():
    check_split(FedL2P)


def check_steps_of_lambda(kind):
    """λ ← λ − (ζ, or base_lr for η̃)·clamp(hypergradient), on the statistics of L_T's samples."""
    settings = {**LEARNING, "net_lr": 0.3, "base_lr": 0.05, "clamp": 1e-3}
    objective, own = (
        Objective(mlp()),
        agent_context(Objective(mlp()), federation().batches(1, 0, "train", 1)),
    )
    algorithm, right = kind(0, **settings), FedL2P(0, **settings)
    received = to_send(right, initial_server(right, objective, objective.initial()))
    w, lam, nets = received["model"], received["meta_net"], right.nets(objective)
    sizes = {name: tensor.numel() for name, tensor in nets.unflatten(lam).items()}
    lr = torch.cat([w.new_full((n,), {"rates": 0.05}.get(k, 0.3)) for k, n in sizes.items()])
    train, validation = right.split(own)
    profile, clamped = nets.profile(w, own.batches.take(train).inputs), 0
    for t in range(2):
        rng = own.batches.stream("fedl2p", t)
        inner = [right.pick(own, train, rng, True) for _ in range(3)]
        outer = right.pick(own, validation, rng, False)
        d = right.hypergradient(objective, nets, w, lam, profile, inner, outer)
        clamped += int((d.abs() > 1e-3).sum())
        lam = lam - lr * d.clamp(-1e-3, 1e-3)
    found = algorithm.agent_update(own, received, {}).vectors
    assert clamped and not torch.equal(lam, received["meta_net"])
    assert torch.allclose(found["meta_net"], lam, rtol=0, atol=1e-12)
    assert torch.allclose(found["rates"], nets.strategy(lam, profile)[0], rtol=0, atol=1e-12)


def test_steps_of_lambda():
    check_steps_of_lambda(FedL2P)


# the hypergradient by step sizes


class Blocks(nn.Module):
    """A point in two tensors; its output is itself and the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
        self.second = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, inputs):
        return inputs, torch.cat([self.first, self.second])


def bowl(seed, shift):
    """½(w − b)ᵀA(w − b) with eigenvalues in [0.5, 2.5], as A, b and a batch."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    a = q @ torch.diag(torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)) @ q.T
    b = shift + torch.randn(3, generator=generator, dtype=torch.float64)
    return a, b, Batch(torch.cat([a.flatten(), b])[None], torch.zeros(1))


A, B, TRAIN = bowl(1, 0.0)
C, D, OUTER = bowl(2, 0.3)
ETA = torch.tensor([0.3, 0.5], dtype=torch.float64)
SIZES = (2, 1)


def by_eta(kind, steps, terms, eta=ETA):
    """dL_V/dη̃ of the algorithm after ``steps`` steps on the quadratics, with LRNet ≡ 1."""
    objective = Objective(Blocks(), quadratic_loss)
    algorithm = kind(adapt_steps=steps, neumann_steps=terms, **SHARED)
    nets, w = algorithm.nets(objective), objective.initial()
    lam, profile = constant(nets, eta), nets.profile(w, TRAIN.inputs)
    inner = [TRAIN] * (steps + 1)
    found = algorithm.hypergradient(objective, nets, w, lam, profile, inner, OUTER)
    parts = nets.unflatten(found)
    assert torch.allclose(parts["lr.2.bias"], eta * parts["rates"], rtol=0, atol=1e-12)
    return parts["rates"]


def unrolled(steps):
    """The same by autograd through all steps."""
    eta = ETA.clone().requires_grad_()
    full, w = torch.stack([eta[0], eta[0], eta[1]]), Objective(Blocks()).initial()
    for _ in range(steps):
        w = w - full * (A @ (w - B))
    (gradient,) = torch.autograd.grad(0.5 * (w - D) @ C @ (w - D), eta)
    return gradient


def check_neumann(kind):
    """With few terms and with many: −Σ_j (u⊙g), u from dense matrices."""
    eye, full = torch.eye(3, dtype=torch.float64), torch.diag(torch.stack([*ETA[:1], *ETA]))
    for steps in (1, 2, 5):
        w = Objective(Blocks()).initial()
        for _ in range(steps):
            w = w - full @ A @ (w - B)
        v, g = C @ (w - D), A @ (w - B)
        for terms in (0, 1, 3, 200):
            u = sum(torch.linalg.matrix_power(eye - A @ full, q) @ v for q in range(terms + 1))
            if terms == 200:  # the implicit function theorem itself
                u = torch.linalg.solve(A @ full, v)
            right = torch.stack([-(u * g)[:2].sum(), -(u * g)[2]])
            assert right.abs().min() > 1e-3 or steps == 5
            assert torch.allclose(by_eta(kind, steps, terms), right, rtol=0, atol=1e-10)


def test_the_hypergradient_by_step_sizes_against_dense_matrices():
    check_neumann(FedL2P)


def check_convergence(kind):
    """Against autograd through all steps: the sign from the start, the distance as steps grow.

    At a minimum of L_T no step size matters, and both are 0.
    """
    gaps = []
    for steps in (1, 2, 4, 8, 16, 32, 64):
        exact, found = unrolled(steps), by_eta(kind, steps, 60)
        gaps.append(float((found - exact).norm()))
        print(f"{steps:3d} steps: unrolled {exact.tolist()}, implicit {found.tolist()}")
        if steps <= 16:
            assert F.cosine_similarity(found, exact, dim=0) > 0.7
    assert all(after < before for before, after in pairwise(gaps[2:])), gaps
    assert gaps[2] < gaps[0] and gaps[-1] < 1e-5 and by_eta(kind, 160, 60).norm() < 1e-8


def test_its_distance_to_unrolled_autograd_falls_with_the_number_of_steps():
    check_convergence(FedL2P)


def test_a_frozen_layer_gets_a_finite_hypergradient():
    found = by_eta(FedL2P, 3, 50, torch.tensor([0.0, 0.5]).double())
    assert torch.isfinite(found).all() and found.abs().min() > 0


# the hypergradient by shares of statistics


def scaled(seed=0):
    """BatchNorm and a fixed product: least squares in scale and shift."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)).double()
    module[1].weight.requires_grad_(False)
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([0.7, 1.4, -1.1]))
        module[0].running_mean.copy_(torch.tensor([0.2, -0.1, 0.4]))
        module[0].running_var.copy_(torch.tensor([1.5, 0.8, 1.1]))
    return module


def regression(seed, n=40):
    generator = torch.Generator().manual_seed(seed)
    x = 1.3 * torch.randn(n, 3, generator=generator, dtype=torch.float64) + 0.5
    return Batch(x, torch.randn(n, 3, generator=generator, dtype=torch.float64) + x[:, :1])


def by_beta(kind, module, steps, terms, data, outer, beta, rates):
    """dL_V/dβ of the algorithm, with constant meta-nets."""
    objective = Objective(module, F.mse_loss, running_stats="tracked")
    algorithm = kind(adapt_steps=steps, neumann_steps=terms, **SHARED)
    nets, w = algorithm.nets(objective), objective.initial()
    lam, profile = constant(nets, rates, beta), nets.profile(w, data.inputs)
    inner = [data] * (steps + 1)
    found = algorithm.hypergradient(objective, nets, w, lam, profile, inner, outer)
    return nets.unflatten(found)["bn.2.bias"]


def design(module, batch, beta, own):
    """The matrix of which γ and b are coefficients, with statistics mixed by β."""
    norm, (mean, variance) = module[0], own
    mu = (1 - beta) * norm.running_mean + beta * mean
    r = ((1 - beta) * norm.running_var + beta * variance + norm.eps).sqrt()
    scale = torch.einsum("nj,ij->nij", (batch.inputs - mu) / r, module[1].weight)
    return torch.cat([scale, module[1].weight.expand(len(scale), 3, 3)], dim=2).flatten(0, 1)


def check_mixing(kind):
    """At convergence: autograd through the closed-form minimum of L_T, to 1e-8.

    With LRNet's 0 for the scale γ: where γ and b are both trained they make up for any statistics,
    and at a minimum of L_T no β matters, as no step size does.
    """
    module, data, outer = scaled(), regression(1), regression(2)
    own = data.inputs.mean(dim=0), data.inputs.var(dim=0)
    for trained, steps in ((slice(3, 6), (2, 8, 32, 100)), (slice(0, 6), (4, 16, 64, 160))):
        beta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        x, z = design(module, data, beta, own), design(module, outer, beta, own)
        frozen = torch.cat([module[0].weight, module[0].bias]).detach().clone()
        frozen[trained] = 0
        y = data.targets.flatten() - x @ frozen
        x, z, fixed = x[:, trained], z[:, trained], z @ frozen
        best = torch.linalg.solve(x.T @ x, x.T @ y)
        loss = ((z @ best + fixed - outer.targets.flatten()) ** 2).mean()
        (right,) = torch.autograd.grad(loss, beta)
        rate = 0.9 / float(torch.linalg.eigvalsh(2 * x.T @ x / len(x)).detach()[-1])
        rates = [0.0 if trained.start else rate, rate, 0.0, 0.0]
        gaps = [
            float((by_beta(kind, module, k, k, data, outer, [0.3], rates) - right).abs())
            for k in steps
        ]
        print(f"{float(right)}, distance after {steps} steps: {gaps}")
        assert (right.abs() > 0.01) == (trained.start == 3)
        assert all(after < before for before, after in pairwise(gaps)) and gaps[-1] < 1e-8


def test_the_hypergradient_by_shares_against_the_closed_form():
    check_mixing(FedL2P)


def deep():
    """A network with two BatchNorm layers, smooth."""
    torch.manual_seed(4)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2)
    module = nn.Sequential(*layers, nn.Linear(2, 3)).double()
    with torch.no_grad():
        for norm in (module[1], module[4]):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_()
    return module


def forward(p, statistics, x):
    """The outputs of the deep network, normalised by these statistics."""
    norm = iter(statistics)
    for i in (0, 3):
        mean, variance = next(norm)
        x = F.linear(x, p[f"{i}.weight"], p[f"{i}.bias"])
        x = (x - mean) / (variance + 1e-5).sqrt() * p[f"{i + 1}.weight"] + p[f"{i + 1}.bias"]
        x = torch.tanh(x) if i == 0 else x
    return F.linear(x, p["5.weight"], p["5.bias"])


def check_mixing_in_a_network(kind):
    """Two layers, few steps and few terms: the formula by autograd on a network written out."""
    module, data, outer, rate, beta = deep(), regression(5), regression(6), 0.05, [0.25, 0.7]
    p = {n: q.detach() for n, q in module.named_parameters()}
    names, sizes = list(p), [q.numel() for q in p.values()]
    seen = F.linear(data.inputs, p["0.weight"], p["0.bias"])
    before = [(n.running_mean.clone(), n.running_var.clone()) for n in (module[1], module[4])]
    module.eval()
    with torch.no_grad():
        both = seen, module[:4](data.inputs)
    own = [(x.mean(dim=0), x.var(dim=0)) for x in both]

    def loss(flat, shares, batch):
        parts = dict(zip(names, torch.split(flat, sizes), strict=True))
        parts = {n: part.view(p[n].shape) for n, part in parts.items()}
        mixed = [
            tuple((1 - share) * s + share * t for s, t in zip(*pair, strict=True))
            for share, pair in zip(shares, zip(before, own, strict=True), strict=True)
        ]
        return F.mse_loss(forward(parts, mixed, batch.inputs), batch.targets)

    gradient = torch.func.grad(loss, argnums=0)
    theta, shares = (
        torch.cat([q.flatten() for q in p.values()]),
        torch.tensor(beta, dtype=torch.float64),
    )
    for _ in range(2):
        theta = theta - rate * gradient(theta, shares, data)
    hessian = torch.func.jacrev(gradient)(theta, shares, data)
    v = gradient(theta, shares, outer)
    u = sum(
        torch.linalg.matrix_power(torch.eye(len(v)).double() - rate * hessian, q) @ v
        for q in range(4)
    )
    crossed = torch.func.jacrev(gradient, argnums=1)(theta, shares, data)
    right = torch.func.grad(loss, argnums=1)(theta, shares, outer) - rate * u @ crossed
    found = by_beta(kind, module, 2, 3, data, outer, beta, [rate] * 14)
    assert torch.allclose(found, right, rtol=0, atol=1e-10)
    assert right.abs().min() > 1e-3


def test_the_hypergradient_by_shares_in_a_network():
    check_mixing_in_a_network(FedL2P)


def batch_norm_problem():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    objective = Objective(module, running_stats="tracked")
    return module, objective, DirectEngine(objective, federation(), 5)


def check_statistics(kind):
    """The personal model has (1 − β)s + β·s_i, which fine-tuning uses and leaves alone."""
    _, objective, engine = batch_norm_problem()
    algorithm = kind(**SHARED)
    w = history(algorithm, engine, 3)[-1].server["model"]
    nets = algorithm.nets(objective)
    received = {"model": w, "meta_net": constant(nets, [0.1] * 8, [0.3]), "rates": None}
    own = agent_context(objective, engine.federation.batches(2, 0, "evaluate"))
    x = objective.module(w)[0](own.batches.whole().inputs.double()).detach()
    personal = algorithm.personal_model(own, received, None).model
    named = dict(objective.module(personal).named_buffers())
    before = dict(objective.module(w).named_buffers())
    mean = 0.7 * before["1.running_mean"] + 0.3 * x.mean(dim=0)
    variance = 0.7 * before["1.running_var"] + 0.3 * x.var(dim=0)
    assert torch.allclose(named["1.running_mean"], mean, rtol=0, atol=1e-12)
    assert torch.allclose(named["1.running_var"], variance, rtol=0, atol=1e-12)
    right, size = personal, len(objective.initial()) - 8
    for batch in own.batches.draw("adapt", 6, 2):
        right = right - 0.1 * objective.grad(right, Batch(batch.inputs, batch.targets))
    *_, last = algorithm.fine_tune(own, received, {"model": personal}, 2)
    assert torch.allclose(last["model"], right, rtol=0, atol=1e-12)
    assert torch.equal(last["model"][size:], personal[size:])


def test_statistics_are_mixed_and_held():
    check_statistics(FedL2P)


def test_divergences_are_symmetric_kl_between_normals():
    _, objective, engine = batch_norm_problem()
    nets = FedL2P().nets(objective)
    x = engine.federation.batches(1, 0, "evaluate").whole().inputs
    profile = nets.profile(objective.initial(), x)
    hidden = objective.module(objective.initial())[0](x.double()).detach()
    own = Normal(hidden.mean(dim=0), (hidden.var(dim=0) + 1e-5).sqrt())
    start = Normal(torch.zeros(4).double(), torch.full((4,), 1 + 1e-5).double().sqrt())
    right = (kl_divergence(own, start) + kl_divergence(start, own)).mean() / 2
    assert torch.allclose(profile.divergences, right[None], rtol=1e-6)


def test_both_nets_are_learned_where_there_are_batch_norm_layers():
    _, objective, engine = batch_norm_problem()
    rounds = history(FedL2P(1, **LEARNING), engine, 4)
    nets = FedL2P(**LEARNING).nets(objective)
    first, last = (nets.unflatten(rounds[k].server["meta_net"]) for k in (1, 4))
    assert all(not torch.equal(first[n], last[n]) for n in ("lr.2.weight", "rates", "bn.2.weight"))
    assert rounds[-1].cost.hvps == 3 * 2 * 4  # one more, of β


def test_layers_that_are_not_called_themselves_and_tied_ones_have_a_profile():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0].mean(dim=1) * self.scale)

    objective = Objective(Odd())
    nets = FedL2P().nets(objective)
    profile = nets.profile(objective.initial(), torch.randn(6, 2, 4))
    assert profile.features.shape == (2 * len(nets.layers),)
    assert torch.isfinite(profile.features).all()


def test_a_bundle_ships_the_model_with_the_mean_step_sizes():
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    algorithm = FedL2P(1, **LEARNING)
    server = history(algorithm, engine, 3)[-1].server
    shipped = algorithm.shipped(engine.objective, to_send(algorithm, server))
    assert torch.equal(shipped.model, server["model"])
    assert torch.equal(shipped.adapt_lr, per_coordinate(server["rates"], engine.objective.sizes))


def test_learning_lowers_the_loss_after_fine_tuning_from_a_step_size_far_too_small():
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    algorithm = FedL2P(2, **{**LEARNING, "adapt_lr": 0.01}, clamp=0.0)
    rounds = history(algorithm, engine, 12)
    assert rounds[-1].server["rates"].mean() > 2 * rounds[2].server["rates"].mean()


# wrong implementations


class ModelMovesOn(FedL2P):
    """The server optimiser's momentum moves w while λ is learned."""

    def server_update(self, context, server, updates):
        after = super().server_update(context, server, updates)
        return {**after, "model": after["model"].clone()}


class TrainsBoth(FedL2P):
    """w is trained along with λ."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        if context.round <= self.pretrain_rounds:
            return result
        model = self.descend(context, received["model"])
        return AgentResult({**result.vectors, "model": model}, state, result.cost)

    def sent_in(self, round):
        return self.sends if round > self.pretrain_rounds else ("model",)


class OneRoundMore(FedL2P):
    """λ is learned a round too early."""

    def agent_update(self, context, received, state):
        own = replace(self, pretrain_rounds=self.pretrain_rounds - 1)
        return FedL2P.agent_update(own, context, received, state)

    def sent_in(self, round):
        return super().sent_in(round + 1)


class KeepsFirst(FedL2P):
    """The server takes one agent's λ."""

    def server_update(self, context, server, updates):
        return super().server_update(context, server, updates[:1])


class IgnoresScale(FedL2P):
    def fine_tune(self, context, received, personal, steps, scale=1.0):
        return super().fine_tune(context, received, personal, steps)


class MeanRate(FedL2P):
    """One step size for all layers."""

    def start(self, context, received):
        eta, w = super().start(context, received)
        return torch.full_like(eta, float(eta.mean())), w


class SharedRates(FedL2P):
    """Everybody uses the mean step sizes of the server."""

    def start(self, context, received):
        return self.rate(context.objective, received), super().start(context, received)[1]


class Fixed(FedL2P):
    """The step size of the configuration, whatever was learned."""

    def fine_tune(self, context, received, personal, steps, scale=1.0):
        batches = context.batches.draw("adapt", self.batch_size, steps)
        rate = scale * self.adapt_lr
        models = trajectory(context.objective, personal["model"], batches, rate)
        return ({"model": w} for w in models)


class OfOneBatch(FedL2P):
    """Statistics of other data than the agent's."""

    def start(self, context, received):
        nets, w = self.nets(context.objective), received["model"]
        (batch,) = context.batches.draw("adapt", 6, 1)
        rates, _ = nets.strategy(received["meta_net"], nets.profile(w, batch.inputs))
        return per_coordinate(rates, nets.objective.sizes), w


class Nets(MetaNets):
    """Statistics of outputs instead of inputs: those of the next layer."""

    def profile(self, w, inputs):
        found = super().profile(w, inputs)
        return replace(found, features=found.features.roll(-2))


class OfOutputs(FedL2P):
    def nets(self, objective):
        return Nets(objective.base, self.net_width, self.most_rate)


class VarianceNets(MetaNets):
    def profile(self, w, inputs):
        found = super().profile(w, inputs)
        features = found.features.clone()
        features[1::2] **= 2
        return replace(found, features=features)


class OfVariances(FedL2P):
    """Variances instead of standard deviations."""

    def nets(self, objective):
        return VarianceNets(objective.base, self.net_width, self.most_rate)


class TrainsOnAll(FedL2P):
    """L_V on samples of L_T."""

    def split(self, context):
        return (np.arange(len(context.batches.targets())),) * 2


def changed(**changes):
    """A copy whose agents train with other settings, given as functions of the algorithm."""

    class Changed(FedL2P):
        def agent_update(self, context, received, state):
            new = {name: value(self) for name, value in changes.items()}
            return FedL2P.agent_update(replace(self, **new), context, received, state)

    return Changed


class ProfileOfFewer(FedL2P):
    """Statistics of fewer samples than L_T has."""

    def nets(self, objective):
        own = self

        class Nets(MetaNets):
            def profile(self, w, inputs):
                return super().profile(w, inputs[: round(own.hold_out * len(inputs))])

        return Nets(objective.base, self.net_width, self.most_rate)


class NoFirstOrder(FedL2P):
    """Through the last step only: no Neumann series."""

    def neumann(self, hvp, v, eta):
        return v


class WrongOrder(FedL2P):
    """(I − diag(η)H)^q in place of its transpose."""

    def neumann(self, hvp, v, eta):
        u = v
        for _ in range(self.neumann_steps):
            v = v - eta * hvp(v)
            u = u + v
        return u


class OneTermLess(FedL2P):
    def neumann(self, hvp, v, eta):
        less = replace(self, neumann_steps=max(0, self.neumann_steps - 1))
        return FedL2P.neumann(less, hvp, v, eta)


class UnitSeries(FedL2P):
    """Σ(I − H)^q: a series that ignores the step sizes."""

    def neumann(self, hvp, v, eta):
        return super().neumann(hvp, v, torch.full_like(eta, 0.3))


class AuthorsSign(FedL2P):
    """∂²L_T/∂θ∂η through θ(η) of the last step, as in the authors' code: the sign is turned."""

    def neumann(self, hvp, v, eta):
        return -super().neumann(hvp, v, eta)


class AuthorsWhole(FedL2P):
    """The authors' −pᵀH·∂θ/∂η with p = Σ(I − ψH)^q v and ψ = 0.1, without the factor ψ."""

    def neumann(self, hvp, v, eta):
        p = super().neumann(hvp, v, torch.full_like(eta, 0.1))
        return -hvp(p)


class MixingNets(MetaNets):
    """by_mixing with its parts changed."""

    def by_mixing(self, start, w, profile, g, rest, z):
        return super().by_mixing(start, w, profile, *self.changed(g, rest, z))


def mixing_mutant(change):
    class Changed(MixingNets):
        changed = staticmethod(change)

    class Mutant(FedL2P):
        def nets(self, objective):
            return Changed(objective.base, self.net_width, self.most_rate)

    return Mutant


class NoDirectTerm(FedL2P):
    """Only the implicit term, −zᵀ∂²L_T/∂θ∂β."""

    def hypergradient(self, objective, nets, w, lam, profile, inner, outer):
        whole = FedL2P.hypergradient(self, objective, nets, w, lam, profile, inner, outer)
        rates, mixing, chain = nets.traced(lam, profile)
        theta = nets.mixed(w, profile, mixing)
        eta = per_coordinate(rates, nets.objective.sizes)
        *_, theta = trajectory(objective, theta, inner[:-1], eta)
        v = objective.grad(theta, outer)
        zero = torch.zeros_like(v)
        direct = nets.by_mixing(w, theta, profile, zero, v, zero)
        return whole - chain(torch.zeros_like(rates), direct)


class MissingFactor(FedL2P):
    """H⁻¹ ≈ Σ(I − ηH)^q without the factor η, which is 0.05 here."""

    def hypergradient(self, objective, nets, w, lam, profile, inner, outer):
        direct = NoDirectTerm.hypergradient(self, objective, nets, w, lam, profile, inner, outer)
        whole = super().hypergradient(objective, nets, w, lam, profile, inner, outer)
        return whole + 19 * direct


class TrainsInBatches(FedL2P):
    """Fine-tuning normalises by the batch, so that the mixed statistics are of no use."""

    def fine_tune(self, context, received, personal, steps, scale=1.0):
        return Algorithm.fine_tune(self, context, received, personal, steps, scale)

    def rate(self, objective, received):
        return 0.1


class SwappedShares(FedL2P):
    """β of the global statistics."""

    def nets(self, objective):
        class Swapped(MetaNets):
            def mixed(self, w, profile, mixing):
                return super().mixed(w, profile, 1 - mixing)

        return Swapped(objective.base, self.net_width, self.most_rate)


MUTANTS = [
    (check_phases, ModelMovesOn),
    (check_phases, TrainsBoth),
    (check_phases, OneRoundMore),
    (check_server, KeepsFirst),
    (check_constant, IgnoresScale),
    (check_constant, MeanRate),
    (check_constant, Fixed),
    (check_rates_by_hand, SharedRates),
    (check_rates_by_hand, Fixed),
    (check_rates_by_hand, OfOneBatch),
    (check_rates_by_hand, OfOutputs),
    (check_rates_by_hand, OfVariances),
    (check_split, TrainsOnAll),
    (check_steps_of_lambda, changed(clamp=lambda own: 0.0)),
    (check_steps_of_lambda, changed(net_lr=lambda own: 3 * own.net_lr)),
    (
        check_steps_of_lambda,
        changed(net_lr=lambda own: own.base_lr, base_lr=lambda own: own.net_lr),
    ),
    (check_steps_of_lambda, ProfileOfFewer),
    (check_neumann, NoFirstOrder),
    (check_neumann, WrongOrder),
    (check_neumann, OneTermLess),
    (check_neumann, UnitSeries),
    (check_neumann, AuthorsSign),
    (check_neumann, AuthorsWhole),
    (check_convergence, AuthorsSign),
    (check_convergence, AuthorsWhole),
    (check_mixing, NoDirectTerm),
    (check_mixing, MissingFactor),
    (check_mixing, AuthorsSign),
    (check_mixing, SwappedShares),
    (check_mixing_in_a_network, mixing_mutant(lambda g, rest, z: (0 * g, rest, z))),
    (check_mixing_in_a_network, mixing_mutant(lambda g, rest, z: (g, rest, 0 * z))),
    (check_mixing_in_a_network, mixing_mutant(lambda g, rest, z: (g, -rest, z))),
    (check_mixing_in_a_network, NoDirectTerm),
    (check_mixing_in_a_network, MissingFactor),
    (check_mixing_in_a_network, AuthorsSign),
    (check_statistics, TrainsInBatches),
    (check_statistics, SwappedShares),
]


@pytest.mark.parametrize("check, mutant", MUTANTS)
def test_a_wrong_copy_is_rejected(check, mutant):
    with pytest.raises(AssertionError):
        check(mutant)
