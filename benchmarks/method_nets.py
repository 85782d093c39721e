"""FedL2P and ScaleFL as plain PyTorch loops: the methods that have networks of their own."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from plain import Loop, step, trainable, values
from torch import nn


class FedL2P(Loop):
    """The phase in which meta-nets are learned; the module is a Sequential without norm layers.

    ``w`` holds the meta-net λ and the mean of step sizes; the model stays as it is.
    """

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.start, (self.adapted, self.theta) = values(self.parameters), trainable(module)
        self.linear = [layer for layer in self.model if isinstance(layer, nn.Linear)]
        width, tensors = settings.net_width, len(self.parameters)
        self.net = nn.Sequential(
            nn.Linear(2 * len(self.linear), width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, tensors),
        ).to(self.start[0].dtype)  # fmt: skip
        self.scale = torch.full((tensors,), settings.adapt_lr, dtype=self.start[0].dtype)
        self.lam = [*self.net.parameters(), self.scale.requires_grad_()]
        self.sent = [*self.lam, torch.empty_like(self.scale)]
        self.w = values(self.sent)

    def train(self, agent):
        s = self.settings
        torch._foreach_copy_(self.sent, self.w)
        halves = self.samples.halves(agent, s.hold_out)
        features = self.features(self.samples.take(halves[0])[0])
        for t in range(s.local_steps):
            *inner, outer = self.samples.picks(agent, t, halves, s.adapt_steps + 1)
            with torch.enable_grad():
                eta = self.rates(features)
            rates = eta.tolist()
            torch._foreach_copy_(self.theta, self.start)
            for batch in inner[:-1]:
                g = self.gradient(self.adapted, self.theta, batch)
                for p, d, rate in zip(self.theta, g, rates, strict=True):
                    p.sub_(d, alpha=rate)
            by_eta = self.by_rates(inner[-1], outer, rates)
            by_lam = torch.autograd.grad(eta, self.lam, by_eta)
            torch._foreach_clamp_min_(by_lam, -s.clamp)
            torch._foreach_clamp_max_(by_lam, s.clamp)
            step(self.lam[:-1], by_lam[:-1], s.net_lr)
            step(self.lam[-1:], by_lam[-1:], s.base_lr)
        self.sent[-1].copy_(self.rates(features))

    @torch.enable_grad()
    def by_rates(self, batch, outer, rates):
        """The derivative by step sizes; one graph of the gradient serves all products."""
        v = list(self.gradient(self.adapted, self.theta, outer))
        self.gradients += 1
        loss = self.loss(self.adapted(batch[0]), batch[1])
        g = torch.autograd.grad(loss, self.theta, create_graph=True)
        with torch.no_grad():
            u = values(v)
            for _ in range(self.settings.neumann_steps):
                self.products += 1
                moved = torch._foreach_mul(v, rates)
                torch._foreach_sub_(v, torch.autograd.grad(g, self.theta, moved, retain_graph=True))
                torch._foreach_add_(u, v)
            return -torch.stack([torch.sum(a * b) for a, b in zip(u, g, strict=True)])

    def rates(self, features):
        return clamped(self.net(features), self.settings.most_rate) * clamped(self.scale, math.inf)

    def features(self, x):
        """Mean and standard deviation of the inputs of every linear layer."""
        found = []
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                found += [x.mean(), (x.var() + 1e-5).sqrt()]
            x = layer(x)
        return torch.stack(found)


class ScaleFL(Loop):
    """The module has linear ``stages`` with ReLUs, and ``exits``; agents train narrow ones."""

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        stages = linear[: len(linear) // 2]
        outputs, inputs = linear[-1].out_features, stages[0].in_features
        levels = settings.levels
        self.level_of, depths = levels.of, levels.depths_of(len(stages))
        self.networks, names = [], list(Exits(inputs, [1] * len(stages), outputs).state_dict())
        for share, depth in zip(levels.widths, depths, strict=True):
            hidden = [math.ceil(share * stage.out_features) for stage in stages[:depth]]
            network = Exits(inputs, hidden, outputs).to(self.w[0].dtype)
            held = [
                (names.index(name), tuple(slice(n) for n in p.shape), p)
                for name, p in network.named_parameters()
            ]
            self.networks.append((network, held))

    @torch.no_grad()
    def round(self, cohort):
        total, count = ([torch.zeros_like(w) for w in self.w] for _ in range(2))
        for agent in cohort:
            level = self.level_of(agent)
            network, held = self.networks[level]
            for place, part, p in held:
                p.copy_(self.w[place][part])
            parameters = [p for _, _, p in held]
            for batch in self.batches(agent):
                step(parameters, self.gradient(network, parameters, batch), self.settings.meta_lr)
            for place, part, p in held:
                total[place][part] += p
                count[place][part] += 1
        for w, sums, number in zip(self.w, total, count, strict=True):
            torch.where(number > 0, sums / number, w, out=w)

    def loss(self, outputs, targets):
        s, (*earlier, last) = self.settings, outputs
        total = len(outputs) + s.exit_weight * sum(range(len(outputs)))
        value = len(outputs) * F.cross_entropy(last, targets)
        if earlier:
            teacher = F.log_softmax(last.detach() / s.temperature, dim=1)
        for j, z in enumerate(earlier, 1):
            student = F.log_softmax(z / s.temperature, dim=1)
            apart = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
            value = value + j * s.exit_weight * F.cross_entropy(z, targets)
            value = value + j * s.distill_weight * s.temperature**2 * apart
        return value / total


class Exits(nn.Module):
    """Linear stages with ReLUs and a linear exit after each; gives the outputs of all exits."""

    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise([inputs, *hidden]))
        self.exits = nn.ModuleList(nn.Linear(width, outputs) for width in hidden)

    def forward(self, x):
        found = []
        for stage, leave in zip(self.stages, self.exits, strict=True):
            x = F.relu(stage(x))
            found.append(leave(x))
        return found


def clamped(x, most):
    """x within [0, most], with the derivative of x itself."""
    return x + (x.clamp(0, most) - x).detach()
