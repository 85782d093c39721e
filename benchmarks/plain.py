"""The baseline: a round as in published Per-FedAvg code.

Copy the module for every agent, step the copy with torch.optim.SGD, call backward.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F

ALPHA, BETA, DELTA = 0.01, 0.001, 1e-3
RNG = np.random.default_rng(0)


class Plain:
    """A module, the samples of every agent, and the settings of a job."""

    def __init__(self, module, inputs, targets, train, test, batch_size, local_steps=4):
        self.module, self.inputs, self.targets = module, inputs, targets
        self.train, self.test = train, test
        self.batch_size, self.local_steps = batch_size, local_steps

    def batch(self, agent):
        rows = torch.from_numpy(RNG.choice(self.train[agent], self.batch_size, replace=False))
        return self.inputs[rows], self.targets[rows]

    def round(self, cohort, nu, curvature):
        """One round of (generalized) Per-FedAvg; ``curvature`` is first_order, exact or hf."""
        states = []
        for agent in cohort:
            model = copy.deepcopy(self.module)
            optimizer = torch.optim.SGD(model.parameters(), lr=BETA)
            for _ in range(self.local_steps):
                direction = self.meta_gradient(model, agent, nu, curvature)
                for parameter, d in zip(model.parameters(), direction, strict=True):
                    parameter.grad = d
                optimizer.step()
            states.append(model.state_dict())
        return {name: sum(s[name] for s in states) / len(states) for name in states[0]}

    def meta_gradient(self, model, agent, nu, curvature):
        adapted, iterates = copy.deepcopy(model), []
        optimizer = torch.optim.SGD(adapted.parameters(), lr=ALPHA)
        for _ in range(nu):
            if curvature != "first_order":
                iterates.append(copy.deepcopy(adapted))
            self.backward(adapted, optimizer, agent)
            optimizer.step()
        self.backward(adapted, optimizer, agent)
        d = [p.grad for p in adapted.parameters()]
        for before in reversed(iterates):
            inputs, targets = self.batch(agent)
            product = exact_product if curvature == "exact" else difference_product
            hd = product(before, inputs, targets, d)
            d = [v - ALPHA * h for v, h in zip(d, hd, strict=True)]
        return d

    def backward(self, model, optimizer, agent):
        inputs, targets = self.batch(agent)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()

    def evaluate(self, agents, steps=3):
        """Fine-tune every agent's copy and score it on the agent's test part after every step."""
        for agent in agents:
            model = copy.deepcopy(self.module)
            optimizer = torch.optim.SGD(model.parameters(), lr=ALPHA)
            inputs, targets = self.inputs[self.test[agent]], self.targets[self.test[agent]]
            for step in range(steps + 1):
                with torch.no_grad():
                    outputs = model(inputs)
                    F.cross_entropy(outputs, targets).item()
                    (outputs.argmax(dim=1) == targets).float().mean().item()
                if step < steps:
                    self.backward(model, optimizer, agent)
                    optimizer.step()


def exact_product(model, inputs, targets, v):
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(inputs), targets)
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(gradient, parameters, v)


def difference_product(model, inputs, targets, v):
    gradients = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, d in zip(moved.parameters(), v, strict=True):
                parameter.add_(d, alpha=sign * DELTA)
        F.cross_entropy(moved(inputs), targets).backward()
        gradients.append([p.grad for p in moved.parameters()])
    return [(a - b) / (2 * DELTA) for a, b in zip(*gradients, strict=True)]
