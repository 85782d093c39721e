"""A lower bound for the direct method: its matrix products and nothing else, one process per core.

Same shapes, into preallocated memory; no gathering of samples, no other arithmetic, no overhead.
"""

from itertools import pairwise

import torch

from nufed.simulation import Workers


class Floor:
    """The products of a fully connected network with these widths."""

    def __init__(self, widths, batch_size, test_size, local_steps, workers):
        self.workers_count = workers
        self.local_steps = local_steps
        layers = list(pairwise(widths))
        self.batch = [self.layer(batch_size, *layer) for layer in layers]
        self.test = [self.layer(test_size, *layer) for layer in layers]
        self.workers = Workers(workers, lambda work, notify: self.run(*work))

    @staticmethod
    def layer(rows, inputs, outputs):
        x, w, d = torch.rand(rows, inputs), torch.rand(outputs, inputs), torch.rand(rows, outputs)
        return (
            x,
            w,
            d,
            torch.empty(rows, outputs),
            torch.empty(outputs, inputs),
            torch.empty_like(x),
        )

    def run(self, agents, gradients, hvps, tests):
        for _ in range(agents):
            for _ in range(gradients):
                self.gradient()
            for _ in range(hvps):
                self.gradient()
                self.gradient()  # the derivatives of the forward and of the backward pass
            for _ in range(tests):
                for x, w, _, y, _, _ in self.test:
                    torch.mm(x, w.T, out=y)

    def gradient(self):
        for i, (x, w, d, y, by_w, by_x) in enumerate(self.batch):
            torch.mm(x, w.T, out=y)
            torch.mm(d.T, x, out=by_w)
            if i:  # the derivative with respect to the samples is not needed
                torch.mm(d, w, out=by_x)

    def round(self, cohort, nu, curvature):
        steps, products = self.local_steps, nu * self.local_steps
        gradients = steps * (nu + 1) + (2 * products if curvature == "hf" else 0)
        hvps = products if curvature == "exact" else 0
        self.spread(cohort, gradients, hvps, 0)

    def evaluate(self, agents, steps=3):
        self.spread(agents, steps, 0, steps + 1)

    def spread(self, agents, *work):
        share = -(-len(agents) // self.workers_count)
        sizes = [share] * (len(agents) // share) + [len(agents) % share] * bool(len(agents) % share)
        self.workers.map([(size, *work) for size in sizes], lambda task, last: "the floor")
