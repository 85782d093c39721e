"""JAX: every round is one compiled function, a scan over local steps inside a scan (or vmap) over
agents. Only the rows of batches are drawn outside of it.
"""

import os
from functools import partial
from itertools import pairwise

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from problem import EVALUATION, EVALUATION_STEPS, LOCAL_STEPS, METHODS, load

ALPHA = BETA = 0.01
DELTA = 1e-3  # of a Hessian-free difference


def forward(w, x):
    for weight, bias in w[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = w[-1]
    return x @ weight + bias


def loss(w, x, y):
    scores = jax.nn.log_softmax(forward(w, x))
    return -jnp.take_along_axis(scores, y[:, None], axis=1).mean()


gradient = jax.grad(loss)


def step(w, d, lr):
    return jax.tree.map(lambda a, b: a - lr * b, w, d)


def exact(w, batch, v):
    return jax.jvp(lambda q: gradient(q, *batch), (w,), (v,))[1]


def difference(w, batch, v):
    ahead, behind = (gradient(step(w, v, lr), *batch) for lr in (-DELTA, DELTA))
    return jax.tree.map(lambda a, b: (a - b) / (2 * DELTA), ahead, behind)


def meta_gradient(w, batches, nu, curvature):
    iterates = []
    for batch in batches[:nu]:
        iterates.append(w)
        w = step(w, gradient(w, *batch), ALPHA)
    d = gradient(w, *batches[nu])
    product = {"exact": exact, "hf": difference}.get(curvature)
    for place in reversed(range(nu)) if product else ():
        d = step(d, product(iterates[place], batches[nu + 1 + place], d), ALPHA)
    return d


def over_agents(how, one, rows):
    return jax.vmap(one)(rows) if how == "vmap" else lax.map(one, rows)


@partial(jax.jit, static_argnames=("nu", "curvature", "how"))
def round_of(w, inputs, targets, rows, nu, curvature, how):
    """The mean of the agents' models; ``rows`` is (agents, steps, batches, samples)."""

    def local_step(p, own):
        batches = [(inputs[b], targets[b]) for b in own]
        return step(p, meta_gradient(p, batches, nu, curvature), BETA), None

    each = over_agents(how, lambda own: lax.scan(local_step, w, own)[0], rows)
    return jax.tree.map(lambda a: a.mean(0), each)


@partial(jax.jit, static_argnames=("how",))
def evaluate(w, inputs, targets, rows, test, how):
    """Loss and accuracy of every agent after each fine-tuning step."""

    def one(own):
        batches, scored = own
        x, y = inputs[scored], targets[scored]

        def score(p):
            return loss(p, x, y), (forward(p, x).argmax(1) == y).mean()

        def tune(p, b):
            p = step(p, gradient(p, inputs[b], targets[b]), ALPHA)
            return p, score(p)

        return score(w), lax.scan(tune, w, batches)[1]

    return over_agents(how, one, (rows, test))


def serve_jax(folder, sizes, serve, how):
    data, rng = load(folder), np.random.default_rng(0)
    inputs = jnp.asarray(data.samples.inputs.numpy())
    targets = jnp.asarray(data.samples.targets.numpy(), dtype=jnp.int32)
    train = [np.asarray(data.split.train[agent]) for agent in range(sizes.agents)]
    test = jnp.asarray(np.stack([data.split.test[a] for a in range(sizes.agents)]), jnp.int32)
    widths = (sizes.inputs, 80, 60, 10)
    w = [
        (jnp.asarray(rng.normal(0, a**-0.5, (a, b)), jnp.float32), jnp.zeros(b))
        for a, b in pairwise(widths)
    ]

    def draw(agent, number):
        return [rng.choice(train[agent], sizes.batch, replace=False) for _ in range(number)]

    def one_round(nu, curvature):
        number = nu + 1 + (nu if curvature != "first_order" else 0)
        rows = [[draw(a, number) for _ in range(LOCAL_STEPS)] for a in range(sizes.cohort)]
        rows = np.asarray(rows, np.int32)
        jax.block_until_ready(round_of(w, inputs, targets, rows, nu, curvature, how))

    def one_evaluation():
        rows = np.asarray([draw(a, EVALUATION_STEPS) for a in range(sizes.agents)], np.int32)
        jax.block_until_ready(evaluate(w, inputs, targets, rows, test, how))

    jobs = {name: partial(one_round, *job) for name, job in METHODS.items()}
    serve(jobs | {EVALUATION: one_evaluation})


jax_scan = partial(serve_jax, how="scan")
jax_vmap = partial(serve_jax, how="vmap")
