"""A lower bound for the direct method: its products and convolutions alone, one process per core.

Same shapes; matrix products into preallocated memory; no gathering of samples, no other arithmetic
(activations, pooling, normalisation, loss, steps), no overhead.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

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


class ConvolutionFloor:
    """The convolutions and products of a module with :class:`~torch.nn.Conv2d` and linear layers.

    Args:
        module, inputs: the layers' shapes are those of a pass of these inputs.
        memory_format: of images and kernels.
    """

    def __init__(self, module, inputs, local_steps, memory_format=torch.contiguous_format):
        self.local_steps, self.layers = local_steps, []
        calls = []
        kinds = (nn.Conv2d, nn.Linear)
        hooks = [
            layer.register_forward_hook(lambda layer, given, y: calls.append((layer, given[0], y)))
            for layer in module.modules()
            if isinstance(layer, kinds)
        ]
        with torch.no_grad():
            module(inputs)
        for hook in hooks:
            hook.remove()
        for layer, x, y in calls:
            tensors = [x, layer.weight.detach(), torch.randn_like(y)]
            if isinstance(layer, nn.Conv2d):
                tensors = [t.contiguous(memory_format=memory_format) for t in tensors]
                self.layers.append(Convolution(*tensors, layer.stride, layer.padding))
            else:
                self.layers.append(Product(*tensors))

    @torch.no_grad()
    def round(self, cohort, nu, curvature):
        products = nu * self.local_steps if curvature == "exact" else 0
        for _ in cohort:
            for _ in range(self.local_steps * (nu + 1)):
                self.gradient()
            for _ in range(products):
                self.hessian_product()

    def gradient(self):
        for place, layer in enumerate(self.layers):
            layer.forward()
            layer.backward(inputs=place > 0, weights=True)

    def hessian_product(self):
        """The forward pass, the derivative by inputs, and the directional derivatives of both."""
        for place, layer in enumerate(self.layers):
            layer.forward()  # of x by w
            layer.forward()  # of x by the direction
            layer.backward(inputs=place > 0, weights=True)
            if place:  # the direction of the samples is 0, and nothing is needed by them
                layer.forward()
                layer.backward(inputs=True, weights=True)
                layer.backward(inputs=True, weights=False)


class Convolution:
    """A convolution of x with w, and its derivatives from d, that of its outputs."""

    def __init__(self, x, w, d, stride, padding):
        self.x, self.w, self.d, self.stride, self.padding = x, w, d, stride, padding

    def forward(self):
        F.conv2d(self.x, self.w, None, self.stride, self.padding)

    def backward(self, inputs, weights):
        shape = self.stride, self.padding, (1, 1), False, (0, 0), 1
        wanted = [inputs, weights, False]
        torch.ops.aten.convolution_backward(self.d, self.x, self.w, None, *shape, wanted)


class Product:
    """The same of a linear layer."""

    def __init__(self, x, w, d):
        self.x, self.w, self.d = x, w, d
        self.y, self.by_x, self.by_w = (torch.empty_like(t) for t in (d, x, w))

    def forward(self):
        torch.mm(self.x, self.w.T, out=self.y)

    def backward(self, inputs, weights):
        if weights:
            torch.mm(self.d.T, self.x, out=self.by_w)
        if inputs:
            torch.mm(self.d, self.w, out=self.by_x)
