"""The field's methods as plain PyTorch loops, each a subclass of plain.Loop.

What each computes is said in the module of the same name in ``nufed.algorithms``; here it is
written without anything of nufed, so that it can serve as a yardstick of speed and as a check.
"""

import torch
import torch.nn.functional as F
from plain import Loop, Meta, step, step_into, trainable, values
from torch import nn


class Reptile(Loop):
    def server(self, mean):
        torch._foreach_lerp_(self.w, mean, self.settings.server_lr)


class FedProx(Loop):
    def descend(self, agent):
        for batch in self.batches(agent):
            g = self.gradient(self.model, self.parameters, batch)
            proximal_step(self.parameters, g, self.w, self.settings.meta_lr, self.settings.weight)


class Scaffold(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.control = [torch.zeros_like(w) for w in self.w]
        self.change = values(self.control)  # the sum of the cohort's changes of c_i

    def train(self, agent):
        own = self.states.setdefault(agent, [torch.zeros_like(w) for w in self.w])
        shift = torch._foreach_sub(self.control, own)
        torch._foreach_copy_(self.parameters, self.w)
        for batch in self.batches(agent):
            g = self.gradient(self.model, self.parameters, batch)
            torch._foreach_add_(g, shift)
            step(self.parameters, g, self.settings.meta_lr)
        change = torch._foreach_sub(self.w, self.parameters)
        torch._foreach_div_(change, self.settings.local_steps * self.settings.meta_lr)
        torch._foreach_sub_(change, self.control)
        torch._foreach_add_(own, change)
        torch._foreach_add_(self.change, change)

    def server(self, mean):
        torch._foreach_lerp_(self.w, mean, self.settings.server_lr)
        torch._foreach_add_(self.control, self.change, alpha=1 / len(self.samples.train))
        torch._foreach_zero_(self.change)


class FedDyn(Loop):
    """All agents take part in every round."""

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.h = [torch.zeros_like(w) for w in self.w]

    def train(self, agent):
        s = self.settings
        own = self.states.setdefault(agent, [torch.zeros_like(w) for w in self.w])
        torch._foreach_copy_(self.parameters, self.w)
        for batch in self.batches(agent):
            g = self.gradient(self.model, self.parameters, batch)
            torch._foreach_sub_(g, own)
            proximal_step(self.parameters, g, self.w, s.meta_lr, s.weight)
        torch._foreach_sub_(own, torch._foreach_sub(self.parameters, self.w), alpha=s.weight)

    def server(self, mean):
        weight = self.settings.weight
        torch._foreach_sub_(self.h, torch._foreach_sub(mean, self.w), alpha=weight)
        self.w = torch._foreach_sub(mean, self.h, alpha=1 / weight)


class MOON(Loop):
    """The module is a Sequential whose last layer is linear, as in the next two."""

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.received, self.previous = trainable(module), trainable(module)

    def train(self, agent):
        s, v = self.settings, self.states.get(agent)
        torch._foreach_copy_(self.parameters, self.w)
        if v is None:
            self.descend(agent)
        else:
            torch._foreach_copy_(self.received[1], self.w)
            torch._foreach_copy_(self.previous[1], v)
            for inputs, targets in self.batches(agent):
                others = [model[:-1](inputs) for model, _ in (self.previous, self.received)]
                with torch.enable_grad():
                    self.gradients += 1
                    z = self.model[:-1](inputs)
                    s_v, s_w = (F.cosine_similarity(z, other) for other in others)
                    contrast = F.softplus((s_v - s_w) / s.temperature).mean()
                    loss = self.loss(self.model[-1](z), targets) + s.weight * contrast
                    g = torch.autograd.grad(loss, self.parameters)
                step(self.parameters, g, s.meta_lr)
        self.states[agent] = values(self.parameters)


class FedDBE(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.consensus, self.means = None, []

    def train(self, agent):
        s, m = self.settings, None
        (b,) = self.states.get(agent) or [self.w[-1].new_zeros(self.model[-1].in_features)]
        torch._foreach_copy_(self.parameters, self.w)
        for inputs, targets in self.batches(agent):
            with torch.enable_grad():
                self.gradients += 1
                z = self.model[:-1](inputs)
                loss = self.loss(self.model[-1](z + b.requires_grad_()), targets)
                m = z.mean(0) if m is None else m + s.mean_momentum * (z.mean(0) - m)
                if self.consensus is not None:
                    loss = loss + s.weight / 2 * (m - self.consensus).square().mean()
                *g, by_b = torch.autograd.grad(loss, [*self.parameters, b])
            step(self.parameters, g, s.meta_lr)
            b, m = b.detach() - s.meta_lr * by_b * (self.consensus is not None), m.detach()
        self.states[agent] = [b]
        self.means.append(m)

    def server(self, mean):
        self.w = mean
        if self.consensus is None:
            self.consensus = torch.stack(self.means).mean(dim=0)


class FedProto(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        head = self.model[-1]
        shapes = (head.out_features, head.in_features), (head.out_features,)
        self.first, self.sent = values(self.parameters), [head.weight.new_zeros(x) for x in shapes]
        self.w = values(self.sent)

    def train(self, agent):
        s, (weighted, shares) = self.settings, self.w
        prototypes = weighted / torch.where(shares > 0, shares, 1)[:, None]
        torch._foreach_copy_(self.parameters, self.states.get(agent, self.first))
        for inputs, targets in self.batches(agent):
            with torch.enable_grad():
                self.gradients += 1
                z = self.model[:-1](inputs)
                far = (z - prototypes[targets]).square().mean(dim=1) * (shares > 0)[targets]
                loss = self.loss(self.model[-1](z), targets) + s.weight * far.mean()
                g = torch.autograd.grad(loss, self.parameters)
            step(self.parameters, g, s.meta_lr)
        self.states[agent] = values(self.parameters)
        inputs, targets = self.samples.take(self.samples.train[agent])
        of_class = F.one_hot(targets, len(shares)).to(shares) / len(targets)
        self.sent[0].copy_(of_class.T @ self.model[:-1](inputs))
        self.sent[1].copy_(of_class.sum(dim=0))

    def server(self, mean):
        met = mean[1] > 0
        torch._foreach_copy_(
            self.w, [torch.where(met[:, None], mean[0], self.w[0]), mean[1].where(met, self.w[1])]
        )


class FedOpt(Loop):
    """FedAvgM, FedAdagrad, FedAdam and FedYogi."""

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.optimizer = settings.server_optimizer
        start = getattr(self.optimizer, "optimizer_tau", 0) ** 2
        self.m = [torch.zeros_like(w) for w in self.w]
        self.v = [torch.full_like(w, start) for w in self.w]

    def server(self, mean):
        s, kind = self.optimizer, type(self.optimizer).__name__
        beta, lr = s.optimizer_momentum, s.optimizer_lr
        torch._foreach_sub_(mean, self.w)
        delta = mean
        torch._foreach_mul_(self.m, beta)
        torch._foreach_add_(self.m, delta, alpha=1 if kind == "AvgM" else 1 - beta)
        if kind == "AvgM":
            torch._foreach_add_(self.w, self.m, alpha=lr)
            return
        for w, m, v, d in zip(self.w, self.m, self.v, delta, strict=True):
            if kind == "Adagrad":
                v.addcmul_(d, d)
            elif kind == "Adam":
                v.mul_(s.optimizer_beta2).addcmul_(d, d, value=1 - s.optimizer_beta2)
            else:
                squares = d.square_()
                v.addcmul_(squares, torch.sign(v - squares), value=s.optimizer_beta2 - 1)
            w.addcdiv_(m, v.sqrt().add_(s.optimizer_tau), value=lr)


class Ditto(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.own, self.v = trainable(module)
        self.first = values(self.v)

    def train(self, agent):
        super().train(agent)
        s = self.settings
        torch._foreach_copy_(self.v, self.states.get(agent, self.first))
        for batch in self.batches(agent, "personal", s.personal_steps):
            g = self.gradient(self.own, self.v, batch)
            proximal_step(self.v, g, self.w, s.personal_lr, s.weight)
        self.states[agent] = values(self.v)


class PFedMe(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.inner, self.theta = trainable(module)

    def train(self, agent):
        s = self.settings
        torch._foreach_copy_(self.parameters, self.w)
        for batch in self.batches(agent):
            torch._foreach_copy_(self.theta, self.parameters)
            for _ in range(s.inner_steps):
                g = self.gradient(self.inner, self.theta, batch)
                proximal_step(self.theta, g, self.parameters, s.inner_lr, s.weight)
            torch._foreach_lerp_(self.parameters, self.theta, s.meta_lr * s.weight)
        self.states[agent] = values(self.theta)

    def server(self, mean):
        torch._foreach_lerp_(self.w, mean, self.settings.server_lr)


class APFL(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.mixture, self.mixed = trainable(module)
        self.first = values(self.mixed)

    def train(self, agent):
        lr, w = self.settings.meta_lr, self.parameters
        v, alpha = self.states.get(agent) or (values(self.first), self.settings.mixing)
        torch._foreach_copy_(w, self.w)
        learned = None
        for batch in self.batches(agent):
            for to, p, q in zip(self.mixed, w, v, strict=True):
                torch.lerp(p, q, alpha, out=to)
            g = self.gradient(self.mixture, self.mixed, batch)
            if learned is None:
                by_alpha = sum(torch.sum(d * (q - p)) for d, p, q in zip(g, w, v, strict=True))
                learned = min(1.0, max(0.0, alpha - self.settings.mixing_lr * float(by_alpha)))
            step(v, g, lr * alpha)
            step(w, self.gradient(self.model, w, batch), lr)
            alpha = learned
        self.states[agent] = v, alpha


class PrivatePart(Loop):
    """FedPer: the head, or what else ``private`` says, stays with the agent."""

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.private, self.sent = self.divide()
        self.w, self.first = values(self.sent), values(self.private)

    def divide(self):
        return self.parameters[-2:], self.parameters[:-2]

    def train(self, agent):
        torch._foreach_copy_(self.sent, self.w)
        torch._foreach_copy_(self.private, self.states.get(agent, self.first))
        self.descend(agent)
        self.states[agent] = values(self.private)


class LGFedAvg(PrivatePart):
    def divide(self):
        return self.parameters[:-2], self.parameters[-2:]


class FedBN(PrivatePart):
    def divide(self):
        norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm1d)]
        private = [t for m in norms for t in (m.weight, m.bias, m.running_mean, m.running_var)]
        own = {id(tensor) for tensor in private}
        return private, [p for p in self.parameters if id(p) not in own]


class FedRep(PrivatePart):
    def descend(self, agent):
        s = self.settings
        batches = list(self.batches(agent, steps=max(s.head_steps, s.local_steps)))
        loops = (self.private, s.head_steps), (self.sent, s.local_steps)
        for part, steps in loops:
            for batch in batches[:steps]:
                step(part, self.gradient(self.model, part, batch), s.meta_lr)


class FedBABU(Loop):
    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.parameters = self.sent = self.parameters[:-2]
        self.w = values(self.sent)


class FedALA(Loop):
    def train(self, agent):
        s, place = self.settings, -2 * self.settings.layers  # a weight and a bias per layer
        theta, weights, rounds = self.states.get(agent) or (self.w, None, 0)
        upper, received = self.parameters[place:], self.w[place:]
        torch._foreach_copy_(self.parameters, self.w)
        if rounds:
            own = theta[place:]
            apart = torch._foreach_sub(received, own)
            weights = weights or [torch.ones_like(x) for x in own]
            batches = self.samples.epoch(agent, s.share)
            mix(upper, own, apart, weights)
            for _ in range(s.first_passes if rounds == 1 else 1):
                before = values(weights)
                for batch in batches:
                    g = self.gradient(self.model, upper, batch)
                    torch._foreach_addcmul_(weights, g, apart, -s.weights_lr)
                    torch._foreach_clamp_min_(weights, 0)
                    torch._foreach_clamp_max_(weights, 1)
                    mix(upper, own, apart, weights)
                change = max((a - b).abs().max() for a, b in zip(weights, before, strict=True))
                if change <= s.tolerance:
                    break
        self.descend(agent)
        self.states[agent] = values(self.parameters), weights, rounds + 1


class FedRoD(Loop):
    """The module is a Sequential whose last layer is linear."""

    def train(self, agent):
        s = self.settings
        body, head = self.model[:-1], self.model[-1]
        counts = torch.bincount(
            self.samples.targets[self.samples.train[agent]], minlength=head.out_features
        )
        smallest = torch.finfo(self.w[0].dtype).tiny
        shift = (counts.to(self.w[0].dtype) ** s.balance).clamp(min=smallest).log()
        phi = self.states.get(agent)
        if phi is None:
            phi = [torch.zeros_like(p).requires_grad_() for p in head.parameters()]
        torch._foreach_copy_(self.parameters, self.w)
        for inputs, targets in self.batches(agent):
            with torch.enable_grad():
                self.gradients += 2
                z = body(inputs)
                outputs = head(z)
                g = torch.autograd.grad(self.loss(outputs + shift, targets), self.parameters)
                personal = outputs.detach() + F.linear(z.detach(), *phi)
                by_phi = torch.autograd.grad(self.loss(personal, targets), phi)
            step(self.parameters, g, s.meta_lr)
            step(phi, by_phi, s.personal_lr)
        self.states[agent] = phi


class ANIL(Meta):
    """gMeta that fine-tunes the head alone: gradients and products are taken of the head only."""

    def iterate(self, place):
        model, parameters = super().iterate(place)
        for own, shared in zip(parameters[:-2], self.parameters[:-2], strict=True):
            own.data = shared.data  # all iterates have the same body
        return model, parameters

    def meta_gradient(self, agent, t):
        alpha, nu = self.settings.adapt_lr, self.nu
        for place, batch in enumerate(self.samples.draw(agent, "adapt", nu, t)):
            (model, w), (_, after) = self.iterate(place), self.iterate(place + 1)
            step_into(after[-2:], w[-2:], self.gradient(model, w[-2:], batch), alpha)
        (outer,) = self.samples.draw(agent, "outer", step=t)
        d = self.gradient(*self.iterate(nu), outer)
        batches = self.samples.draw(agent, "curvature", nu, t)
        for place in reversed(range(nu)):
            torch._foreach_sub_(
                d, self.of_head(*self.chain[place], batches[place], d[-2:]), alpha=alpha
            )
        return d

    @torch.enable_grad()
    def of_head(self, model, parameters, batch, v):
        """The Hessian's columns of the head, times v."""
        self.products += 1
        inputs, targets = batch
        loss = self.loss(model(inputs), targets)
        gradient = torch.autograd.grad(loss, parameters[-2:], create_graph=True)
        return torch.autograd.grad(gradient, parameters, v)


def proximal_step(y, g, centre, lr, weight):
    """y ← y − lr·(g + weight·(y − centre))."""
    torch._foreach_lerp_(y, centre, lr * weight)
    step(y, g, lr)


def mix(upper, own, apart, weights):
    """θ̂ = θ + (w − θ)⊙W."""
    torch._foreach_copy_(upper, own)
    torch._foreach_addcmul_(upper, apart, weights)
