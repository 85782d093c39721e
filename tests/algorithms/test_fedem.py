"""FedEM: Bayes' rule, a round and predictions by hand, likelihoods that never fall, mutants."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Objective, fedavg
from nufed.algorithms import AgentResult, Cost, FedEM
from nufed.algorithms.fedem import responsibilities, weighted
from nufed.data import Federation, as_samples
from nufed.data.split import make_split
from nufed.objective import Batch
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp, relative_error

PLAIN = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.2}
PI = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)


def started(cls=FedEM, module=mlp, **settings):
    """An algorithm, an objective, and the server's models."""
    algorithm, objective = cls(**PLAIN, **settings), Objective(module())
    return algorithm, objective, algorithm.server_init(objective, objective.initial())


def probabilities(objective, w, x, y):
    """p_m(y|x), by the module itself."""
    return objective.module(w)(x).softmax(dim=1)[torch.arange(len(y)), y].detach()


def by_bayes(objective, models, pi, x, y):
    joint = torch.stack(
        [p * probabilities(objective, w, x, y) for p, w in zip(pi, models, strict=True)]
    )
    return joint / joint.sum(dim=0)


def test_with_one_component_it_is_fedavg_to_rounding():
    objective, data = Objective(mlp()), federation()
    trained = []
    for algorithm in (fedavg(**PLAIN), FedEM(models=1, **PLAIN)):
        engine = DirectEngine(objective, data, seed=3)
        *_, last = train(algorithm, engine, objective.initial(), rounds=4, participation=0.5)
        trained.append(next(iter(last.server.values())))
    assert relative_error(*trained) < 1e-12


def test_responsibilities_are_those_of_bayes_rule():
    algorithm, objective, server = started()
    models, samples = algorithm.split(server["models"]), federation().batches(1, 0, "train").whole()
    x, y = samples.inputs.double(), samples.targets
    found = responsibilities(objective, models, PI, samples)
    torch.testing.assert_close(found, by_bayes(objective, models, PI, x, y))
    numbers = Objective(nn.Linear(5, 1).double(), F.mse_loss)  # p_m is N(h(x), 1/2)
    models = [torch.randn(6, dtype=torch.float64) for _ in range(3)]
    target = torch.randn(len(x), 1, dtype=torch.float64)
    means = torch.stack([numbers.predict(w, x)[:, 0] for w in models])
    density = torch.distributions.Normal(means, 0.5**0.5).log_prob(target[:, 0]).exp()
    joint = PI.unsqueeze(1) * density
    found = responsibilities(numbers, models, PI, Batch(x, target))
    torch.testing.assert_close(found, joint / joint.sum(dim=0))


def check_a_round_by_hand(cls):
    algorithm, objective, server = started(cls)
    models = algorithm.split(server["models"])
    own = agent_context(objective, federation().batches(1, 0, "train", 1))
    result = algorithm.agent_update(own, server, {"mixture": PI})
    after = list(models)
    for t in range(2):
        (batch,) = own.batches.draw("outer", 6, step=t)
        x, y = batch.inputs.double(), batch.targets
        q = by_bayes(objective, models, PI, x, y)  # of the received components and weights
        for m, w in enumerate(after):
            leaf = w.clone().requires_grad_()
            losses = torch.stack(
                [objective.forward(leaf, Batch(x[i : i + 1], y[i : i + 1])) for i in range(6)]
            )
            (gradient,) = torch.autograd.grad((q[m] * losses).sum() / 6, leaf)
            after[m] = w - 0.1 * gradient
    assert relative_error(result.vectors["models"], torch.cat(after)) < 1e-12
    every = own.batches.whole()
    q = by_bayes(objective, models, PI, every.inputs.double(), every.targets)
    torch.testing.assert_close(result.state["mixture"], q.mean(dim=1))
    assert result.cost == Cost(3 * 2)


def test_a_round_by_hand():
    check_a_round_by_hand(FedEM)


def mixed_regressions(agents=4, samples=20):
    """Agents whose samples follow one of two lines, in shares that differ between agents."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(agents * samples, 2))
    share = np.repeat(np.linspace(0.1, 0.9, agents), samples)
    line = (rng.random(len(x)) < share).astype(int)
    truth = np.array([[1.5, -1.0], [-1.0, 2.0]])
    y = (x * truth[line]).sum(axis=1, keepdims=True) + 0.3 * rng.normal(size=(len(x), 1))
    rows = np.split(np.arange(len(x)), agents)
    split = make_split(rows, 0, validation=0.0, test=0.25, unseen_agents=0)
    return Federation(as_samples((torch.from_numpy(x), torch.from_numpy(y))), split), truth


def check_the_likelihood_never_falls(cls):
    """Full batches, full participation, one step with η = 1/L: generalised EM."""
    data, truth = mixed_regressions()
    torch.manual_seed(0)
    objective = Objective(nn.Linear(2, 1, bias=False).double(), F.mse_loss)
    n = len(data.split.train[0])
    parts = [data.samples.inputs[rows] for rows in data.split.train]
    # of the loss of all samples; q is at most 1
    smoothness = max(2 * float(torch.linalg.matrix_norm(x, 2)) ** 2 / n for x in parts)
    algorithm = cls(models=2, meta_lr=1 / smoothness, local_steps=1, batch_size=n)
    engine = DirectEngine(objective, data, seed=0)
    values = []
    for progress in train(algorithm, engine, objective.initial(), rounds=60, participation=1.0):
        models, value = algorithm.split(progress.server["models"]), 0.0
        for agent, rows in enumerate(data.split.train):
            x, y = data.samples.inputs[rows], data.samples.targets[rows]
            pi = (progress.states.get(agent) or {"mixture": torch.full((2,), 0.5)})["mixture"]
            p = torch.stack([torch.exp(-((x @ w - y[:, 0]) ** 2)) for w in models])
            value += float((pi.double() @ p).log().sum())
        values.append(value)
    gains = np.diff(values)
    assert gains.min() > -1e-9 and values[-1] > values[0] + 10
    found = np.sort(torch.stack(models).numpy(), axis=0)
    assert np.abs(found - np.sort(truth, axis=0)).max() < 0.3


def test_the_likelihood_never_falls():
    check_the_likelihood_never_falls(FedEM)


def check_personal_models(cls):
    algorithm, objective, server = started(cls)
    models = algorithm.split(server["models"])
    own = agent_context(objective, federation().batches(2, 0, "evaluate"))
    every = own.batches.whole()
    x, y = every.inputs.double(), every.targets
    known = algorithm.personal_model(own, server, {"mixture": PI})
    right = sum(p * objective.module(w)(x).softmax(dim=1) for p, w in zip(PI, models, strict=True))
    found = algorithm.predict(objective, known.tensors, x)
    torch.testing.assert_close(found, right.log().detach())
    # fine-tuning is gradient descent on the loss of these predictions
    leaf = server["models"].clone().requires_grad_()
    (batch,) = own.batches.draw("adapt", 6, 1)
    p = [
        torch.func.functional_call(
            objective.module(w), names(objective, each), batch.inputs.double()
        )
        for w, each in zip(models, leaf.view(3, -1), strict=True)
    ]
    mixed = sum(share * each.softmax(dim=1) for share, each in zip(PI, p, strict=True))
    (gradient,) = torch.autograd.grad(F.nll_loss(mixed.log(), batch.targets), leaf)
    x = every.inputs.double()
    _, tuned = algorithm.fine_tune(own, server, known.tensors, 1, scale=0.5)
    assert relative_error(tuned["models"], server["models"] - 0.5 * 0.2 * gradient) < 1e-12
    # a newcomer's weights maximise the likelihood of its training samples
    new = algorithm.personal_model(own, server, None).tensors["mixture"]
    pi = torch.full((3,), 1 / 3, dtype=torch.float64)
    for _ in range(10):
        pi = by_bayes(objective, models, pi, x, y).mean(dim=1)
    torch.testing.assert_close(new, pi)
    assert abs(float(new.sum()) - 1) < 1e-12 and float(new.max() - new.min()) > 0.01


def names(objective, w):
    parameters = dict(objective.module(w.detach()).named_parameters())
    parts = w.split([p.numel() for p in parameters.values()])
    return {n: part.view(p.shape) for part, (n, p) in zip(parts, parameters.items(), strict=True)}


def test_personal_models_mix_probabilities_and_newcomers_find_their_weights():
    check_personal_models(FedEM)


def test_predictions_of_numbers_are_means():
    algorithm = FedEM(**PLAIN)
    objective = Objective(nn.Linear(2, 1).double(), F.mse_loss)
    server = algorithm.server_init(objective, objective.initial())
    data, _ = mixed_regressions()
    own = agent_context(objective, data.batches(0, 0, "evaluate"))
    personal = algorithm.personal_model(own, server, {"mixture": PI})
    x = own.batches.whole().inputs
    outputs = [objective.predict(w, x) for w in algorithm.split(server["models"])]
    right = sum(p * each for p, each in zip(PI, outputs, strict=True))
    torch.testing.assert_close(algorithm.predict(objective, personal.tensors, x), right)


# wrong implementations


def with_q(change):
    """FedEM with other responsibilities: ``change`` of the right ones, the losses and π."""

    class Changed(FedEM):
        def agent_update(self, context, received, state):
            objective, pi = context.objective.base, state["mixture"]
            start = self.split(received["models"])
            models = list(start)
            for batch in self.local_batches(context):
                q = change(objective, start, models, pi, batch)
                models = [
                    w - self.meta_lr * weighted(objective, share).grad(w, batch)
                    for w, share in zip(models, q, strict=True)
                ]
            every = change(objective, start, models, pi, context.batches.whole())
            cost = Cost(self.models * self.steps_per_round(context))
            return AgentResult({"models": torch.cat(models)}, {"mixture": every.mean(dim=1)}, cost)

    return Changed


def without_prior(objective, start, models, pi, batch):
    return responsibilities(objective, start, torch.ones_like(pi) / len(pi), batch)


def of_moving_components(objective, start, models, pi, batch):
    return responsibilities(objective, models, pi, batch)


def hard(objective, start, models, pi, batch):
    q = responsibilities(objective, start, pi, batch)
    return (q == q.amax(dim=0)).to(q)


def normalised(objective, start, models, pi, batch):
    q = responsibilities(objective, start, pi, batch)
    return q / q.mean(dim=1, keepdim=True)


def turned(objective, start, models, pi, batch):
    """Large where the loss is large."""
    q = responsibilities(objective, start, pi, batch)
    return (1 - q) / (len(q) - 1)


class MeanOfLogits(FedEM):
    def predict(self, objective, personal, inputs):
        outputs = [objective.predict(w, inputs) for w in self.split(personal["models"])]
        return sum(p * z for p, z in zip(personal["mixture"], outputs, strict=True))


class EqualWeightsOfNewcomers(FedEM):
    def personal_model(self, context, received, state):
        return super().personal_model(
            context, received, state or self.agent_init(context.objective, received)
        )


class MixtureOfTheLastBatch(FedEM):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        *_, batch = self.local_batches(context)
        start = self.split(received["models"])
        q = responsibilities(context.objective.base, start, state["mixture"], batch)
        return AgentResult(result.vectors, {"mixture": q.mean(dim=1)}, result.cost)


MUTANTS = [
    *[
        (check_a_round_by_hand, with_q(change))
        for change in (without_prior, of_moving_components, hard, normalised, turned)
    ],
    (check_a_round_by_hand, MixtureOfTheLastBatch),
    (check_the_likelihood_never_falls, with_q(turned)),
    (check_personal_models, MeanOfLogits),
    (check_personal_models, EqualWeightsOfNewcomers),
]


def test_the_loop_that_wrong_implementations_change_is_right():
    check_a_round_by_hand(
        with_q(
            lambda objective, start, models, pi, batch: responsibilities(
                objective, start, pi, batch
            )
        )
    )


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_a_wrong_copy_is_rejected(check, mutant):
    with pytest.raises(AssertionError):
        check(mutant)
