"""The yardstick: a round as a careful person writes it in plain PyTorch.

The module's own parameters are stepped in place under ``no_grad``, with gradients of
``torch.autograd.grad``: no optimizer object, no copy of a module after set-up, and each batch is
gathered with one index. The loops of the field's other methods are in methods.py.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F

DELTA = 1e-3  # of a Hessian-free difference


class Samples:
    """The agents' samples, as batches drawn by one generator; ``train`` has each agent's rows."""

    def __init__(self, inputs, targets, train, batch_size):
        self.inputs, self.targets, self.train = inputs, targets, train
        self.batch_size, self.rng = batch_size, np.random.default_rng(0)

    def take(self, rows):
        index = torch.from_numpy(rows)
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def draw(self, agent, purpose="outer", number=1, step=0):
        """Independent batches; what they are for does not matter here."""
        rows, size = self.train[agent], self.batch_size
        return [self.take(self.rng.choice(rows, size, replace=False)) for _ in range(number)]

    def epoch(self, agent, share):
        """A share of the agent's samples in random order, as batches."""
        rows = self.rng.permutation(self.train[agent])
        rows = rows[: int(np.ceil(share * len(rows)))]
        ends = range(self.batch_size, len(rows), self.batch_size)
        return [self.take(piece) for piece in np.split(rows, ends)]

    def halves(self, agent, held):
        """The agent's rows in two disjoint parts, the second with a share ``held`` of them."""
        rows = self.rng.permutation(self.train[agent])
        number = max(1, round(held * len(rows)))
        return rows[number:], rows[:number]

    def picks(self, agent, step, halves, number):
        """``number`` batches of the first half and one of the second."""
        chosen = [halves[0]] * number + [halves[1]]
        sizes = [min(self.batch_size, len(rows)) for rows in chosen]
        pairs = zip(chosen, sizes, strict=True)
        return [self.take(self.rng.choice(rows, size, replace=False)) for rows, size in pairs]


class Loop:
    """FedAvg: local SGD in place, and the mean. Other methods are subclasses.

    Args:
        module: the network; parameters are stepped in copies of it, made here once.
        samples: the agents' batches, as :class:`Samples`.
        settings: an algorithm of nufed, whose settings are used and nothing else of it.
    """

    loss = staticmethod(F.cross_entropy)

    def __init__(self, module, samples, settings):
        self.samples, self.settings = samples, settings
        self.model, self.parameters = trainable(module)
        self.sent = self.parameters  # what an agent's training leaves for the server
        self.w = values(self.sent)  # what the server holds
        self.states, self.gradients, self.products = {}, 0, 0

    @torch.no_grad()
    def round(self, cohort):
        total = [torch.zeros_like(w) for w in self.w]
        for agent in cohort:
            self.train(agent)
            torch._foreach_add_(total, self.sent)
        torch._foreach_div_(total, len(cohort))
        self.server(total)

    def train(self, agent):
        """One agent's round, from ``self.w`` to ``self.sent``."""
        torch._foreach_copy_(self.sent, self.w)
        self.descend(agent)

    def server(self, mean):
        self.w = mean

    def descend(self, agent):
        """Local steps of ``self.parameters``."""
        for batch in self.batches(agent):
            step(
                self.parameters,
                self.gradient(self.model, self.parameters, batch),
                self.settings.meta_lr,
            )

    def batches(self, agent, purpose="outer", steps=None):
        for t in range(self.settings.local_steps if steps is None else steps):
            yield from self.samples.draw(agent, purpose, step=t)

    @torch.enable_grad()
    def gradient(self, model, parameters, batch):
        self.gradients += 1
        inputs, targets = batch
        return torch.autograd.grad(self.loss(model(inputs), targets), parameters)

    @torch.no_grad()
    def evaluate(self, test, steps=3):
        """Fine-tune the global model for every agent and score it on its samples after each step.

        ``test`` has the rows of each agent's test samples.
        """
        for agent, rows in test.items():
            torch._foreach_copy_(self.parameters, self.w)
            inputs, targets = self.samples.take(rows)
            (*batches,) = self.samples.draw(agent, "adapt", steps)
            for batch in [None, *batches]:
                if batch is not None:
                    g = self.gradient(self.model, self.parameters, batch)
                    step(self.parameters, g, self.settings.adapt_lr)
                outputs = self.model(inputs)
                self.loss(outputs, targets).item()
                (outputs.argmax(dim=1) == targets).float().mean().item()


class Meta(Loop):
    """gMeta: ν fine-tuning steps, the gradient there, and back through them.

    ``chain`` has one copy of the module per iterate w₀ … w_ν, into which steps are written.
    """

    def __init__(self, module, samples, settings):
        super().__init__(module, samples, settings)
        self.nu, self.curvature = settings.adapt_steps, type(settings.curvature).__name__
        self.chain = [(self.model, self.parameters)]

    def iterate(self, place):
        while len(self.chain) <= place:
            self.chain.append(trainable(self.model))
        return self.chain[place]

    def descend(self, agent):
        for t in range(self.settings.local_steps):
            step(self.parameters, self.meta_gradient(agent, t), self.settings.meta_lr)

    def meta_gradient(self, agent, t):
        alpha, nu, first_order = self.settings.adapt_lr, self.nu, self.curvature == "FirstOrder"
        place = 0
        for batch in self.samples.draw(agent, "adapt", nu, t):
            model, w = self.iterate(place)
            place = 1 if first_order else place + 1  # without products one copy will do
            step_into(self.iterate(place)[1], w, self.gradient(model, w, batch), alpha)
        (outer,) = self.samples.draw(agent, "outer", step=t)
        d = self.gradient(*self.iterate(place), outer)
        if not first_order:
            product = self.exact if self.curvature == "Exact" else self.difference
            batches = self.samples.draw(agent, "curvature", nu, t)
            for number in reversed(range(nu)):
                torch._foreach_sub_(
                    d, product(*self.chain[number], batches[number], d), alpha=alpha
                )
        return d

    @torch.enable_grad()
    def exact(self, model, parameters, batch, v):
        self.products += 1
        inputs, targets = batch
        loss = self.loss(model(inputs), targets)
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(gradient, parameters, v)

    def difference(self, model, w, batch, v):
        model, beside = self.iterate(self.nu)  # w_ν is no longer needed
        step_into(beside, w, v, -DELTA)
        ahead = self.gradient(model, beside, batch)
        step_into(beside, w, v, DELTA)
        torch._foreach_sub_(ahead, self.gradient(model, beside, batch))
        torch._foreach_div_(ahead, 2 * DELTA)
        return ahead


def trainable(module):
    """A copy of a module in training mode, and its parameters."""
    module = copy.deepcopy(module).train()
    return module, list(module.parameters())


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def step(w, gradient, lr):
    """w ← w − lr·gradient."""
    torch._foreach_sub_(w, gradient, alpha=lr)


def step_into(after, w, gradient, lr):
    """after ← w − lr·gradient."""
    for to, p, g in zip(after, w, gradient, strict=True):
        torch.sub(p, g, alpha=lr, out=to)
