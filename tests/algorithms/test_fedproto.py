"""FedProto: λ = 0 is FedPer with everything private, prototypes by hand, and no model travels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nufed
from nufed import Federation, InputError, Objective
from nufed.algorithms import Cost, FedPer, FedProto
from nufed.algorithms.aggregation import Mean
from nufed.algorithms.protocol import AgentUpdate
from nufed.data import as_samples, make_split
from nufed.server import initial_server, to_send
from nufed.simulation import DirectEngine, train
from support import agent_context, context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}


def skewed():
    """Six agents with two of three classes each, unequal amounts of both and of samples."""
    rng, rows, labels = np.random.default_rng(2), [], []
    for agent, count in enumerate((12, 16, 24, 12, 20, 16)):
        first = rng.integers(3, count - 3)
        labels += [agent % 3] * first + [(agent + 1) % 3] * (count - first)
        rows.append(np.arange(len(labels) - count, len(labels)))
    x = torch.from_numpy(rng.normal(size=(len(labels), 5)).astype(np.float32))
    split = make_split(rows, 0, validation=0.0, test=0.25)
    return Federation(as_samples((x, torch.tensor(labels))), split)


def engine_of(data):
    return DirectEngine(Objective(mlp()), data, 5)


def history(algorithm, engine, rounds=4, participation=0.5):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=participation))


def random_like(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def features_by_hand(w, x):
    """What the last layer of `mlp` gets."""
    return torch.tanh(x.double() @ w[:35].reshape(7, 5).T + w[35:42])


def gradient_by_hand(y, batch, prototypes, weight):
    """Of f + λ·(1/B)·Σ‖z − C̄‖²/7 over samples whose class is in ``prototypes``."""
    y = y.detach().requires_grad_()
    z = features_by_hand(y, batch.inputs)
    loss = F.cross_entropy(z @ y[42:63].reshape(3, 7).T + y[63:], batch.targets)
    for row, label in zip(z, batch.targets.tolist(), strict=True):
        if label in prototypes:
            loss = loss + weight * ((row - prototypes[label]) ** 2).sum() / 7 / len(z)
    return torch.autograd.grad(loss, y)[0]


def prototypes_by_hand(y, batch):
    """The mean feature vector and the number of samples of every class that is there."""
    z, labels = features_by_hand(y, batch.inputs), batch.targets
    classes = sorted(set(labels.tolist()))
    return {c: (z[labels == c].mean(0), int((labels == c).sum())) for c in classes}


def sent_by_hand(prototypes):
    """{class: mean} as the server's vectors."""
    weighted, shares = torch.zeros(3, 7, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for label, mean in prototypes.items():
        weighted[label], shares[label] = 0.3 * mean, 0.3
    return {"weighted": weighted.flatten(), "shares": shares}


def check_without_the_term_it_is_fedper_with_everything_private(cls):
    """λ = 0, to the bit, also for newcomers."""
    engine = engine_of(federation())
    proto, alone = cls(weight=0.0, **SHARED), FedPer(private="all", **SHARED)
    rounds, right = (history(algorithm, engine) for algorithm in (proto, alone))
    for agent in engine.federation.split.agents:
        one, other = rounds[-1].states.get(agent), right[-1].states.get(agent)
        assert (one is None) == (other is None)
        own = agent_context(engine.objective, engine.federation.batches(agent, 5, "evaluate"))
        models = [
            algorithm.personal_model(own, to_send(algorithm, last[-1].server), state)
            for algorithm, last, state in ((proto, rounds, one), (alone, right, other))
        ]
        assert torch.equal(models[0].model, models[1].model) and models[0].cost == models[1].cost
        assert one is None or torch.equal(one["personal"], other["private"])


def check_rounds_are_the_formula(cls):
    """Models and prototypes against a loop, where every agent lacks a class."""
    for averaging, participation in (("uniform", 0.34), ("samples", 0.34), ("uniform", 0.17)):
        engine = engine_of(skewed())
        algorithm = cls(weight=2.0, aggregation=Mean(averaging), **SHARED)
        rounds, models, known = history(algorithm, engine, 5, participation), {}, {}
        partial = 0
        for progress in rounds[1:]:
            sums, weights = {}, {}
            for agent in progress.cohort:
                y = models.get(agent, engine.objective.initial())
                source = engine.federation.batches(agent, 5, "train", progress.round)
                for t in range(3):
                    (batch,) = source.draw("outer", 6, step=t)
                    y = y - 0.1 * gradient_by_hand(y, batch, known, 2.0)
                models[agent] = y
                for label, (mean, count) in prototypes_by_hand(y, source.whole()).items():
                    weight = count if averaging == "samples" else count / source.samples
                    sums[label] = sums.get(label, 0) + weight * mean
                    weights[label] = weights.get(label, 0) + weight
            known = known | {label: sums[label] / weights[label] for label in sums}
            partial += len(sums) < len(known)
            shares = progress.server["shares"]
            found = progress.server["weighted"].view(3, 7)
            assert {label for label in range(3) if shares[label] > 0} == set(known)
            for label, right in known.items():
                mean = found[label] / shares[label]
                torch.testing.assert_close(mean, right, rtol=0, atol=1e-11)
        for agent, y in models.items():
            found = rounds[-1].states.get(agent)["personal"]
            torch.testing.assert_close(found, y, rtol=0, atol=1e-11)
        assert partial  # a round in which no agent has one of the known classes


def check_prototypes_are_means_over_classes(cls):
    """Of the trained model over the whole training part; a class that lacks is no prototype."""
    data, objective = skewed(), Objective(mlp())
    own = agent_context(objective, data.batches(0, 0, "train", 1))
    start = {"personal": random_like(66, 1)}
    result = cls(**SHARED).agent_update(own, sent_by_hand({}), start)
    part = own.batches.whole()
    means = prototypes_by_hand(result.state["personal"], part)
    assert set(means) == {0, 1}
    for label, (mean, count) in means.items():
        share = count / len(part.targets)
        assert float(result.vectors["shares"][label]) == pytest.approx(share, rel=1e-12)
        found = result.vectors["weighted"].view(3, 7)[label]
        torch.testing.assert_close(found, share * mean, rtol=0, atol=1e-13)
    assert not result.vectors["shares"][2] and not result.vectors["weighted"].view(3, 7)[2].any()


def check_the_server_knows_classes_by_their_shares(cls):
    """By weights p_ic, whatever agents lack; a class that nobody has keeps its prototype."""
    old = {label: random_like(7, label) for label in (1, 2)}
    first, second, third = (random_like(7, seed) for seed in (3, 4, 5))
    zero = torch.zeros(7, dtype=torch.float64)

    def update(agent, shares, rows):
        shares = torch.tensor(shares, dtype=torch.float64)
        weighted = (shares[:, None] * torch.stack(rows)).flatten()
        return AgentUpdate(agent, 1, 9, {"weighted": weighted, "shares": shares})

    updates = [update(0, [0.25, 0.75, 0], [first, second, zero]), update(1, [1, 0, 0], [third] * 3)]
    after = cls(**SHARED).server_update(context(), sent_by_hand(old), updates)
    found = after["weighted"].view(3, 7) / after["shares"][:, None]
    for row, right in zip(found, ((0.25 * first + third) / 1.25, second, old[2]), strict=True):
        torch.testing.assert_close(row, right, rtol=0, atol=1e-13)


def check_no_model_vector_travels(cls):
    """Up and down go classes × features and classes numbers, whatever the model's body is."""
    for width in (7, 40):
        body = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh())
        objective, algorithm = Objective(nn.Sequential(*body, nn.Linear(4, 3))), cls(**SHARED)
        server = initial_server(algorithm, objective, objective.initial())
        shapes = {"weighted": (12,), "shares": (3,)}
        assert {name: tuple(v.shape) for name, v in server.items()} == shapes
        received = to_send(algorithm, server)
        own = agent_context(objective, federation().batches(2, 0, "train", 1))
        result = algorithm.agent_update(own, received, algorithm.agent_init(objective, received))
        assert {name: tuple(v.shape) for name, v in result.vectors.items()} == shapes
        assert set(result.state) == {"personal"} and result.cost == Cost(3)
        assert algorithm.global_model(objective, received) is None
        assert algorithm.shipped(objective, received) is None


def check_the_nearest_prototype_predicts(cls):
    """Among known classes; the head predicts by default."""
    data, objective = federation(), Objective(mlp())
    own = agent_context(objective, data.batches(2, 0, "evaluate"))
    y, x = random_like(66, 1), own.batches.whole().inputs
    rows = {0: random_like(7, 2), 2: random_like(7, 3)}
    received, state = sent_by_hand(rows), {"personal": y}
    nearest = cls(prediction="prototypes", **SHARED)
    personal = nearest.personal_model(own, received, state).tensors
    outputs = nearest.predict(objective, personal, x)
    for z, row in zip(features_by_hand(y, x), outputs, strict=True):
        right = [-float(((z - rows[label]) ** 2).sum()) for label in (0, 2)]
        assert row[[0, 2]].tolist() == pytest.approx(right, rel=1e-9)
        assert int(row.argmax()) in (0, 2) and bool(row.isfinite().all())
    plain = cls(**SHARED)
    personal = plain.personal_model(own, received, state)
    assert torch.equal(plain.predict(objective, personal.tensors, x), objective.predict(y, x))
    assert set(personal.tensors) == {"model"} and personal.cost == Cost()


CHECKS = (
    check_without_the_term_it_is_fedper_with_everything_private,
    check_rounds_are_the_formula,
    check_prototypes_are_means_over_classes,
    check_the_server_knows_classes_by_their_shares,
    check_no_model_vector_travels,
    check_the_nearest_prototype_predicts,
)
FEDPER, ROUNDS, MEANS, SERVER, TRAVEL, NEAREST = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedProto)


def test_targets_that_are_no_classes_are_refused():
    objective = Objective(nn.Linear(5, 1), nn.functional.mse_loss)
    rng = np.random.default_rng(0)
    x, y = (torch.from_numpy(rng.normal(size=(24, n)).astype(np.float32)) for n in (5, 1))
    split = make_split([np.arange(24)], 0, validation=0.0, test=0.25)
    data = Federation(as_samples((x, y)), split)
    own = agent_context(objective, data.batches(0, 0, "train", 1))
    received = FedProto(**SHARED).server_init(objective, objective.initial())
    with pytest.raises(InputError, match="fedproto needs classes"):
        FedProto(**SHARED).agent_update(own, received, {"personal": objective.initial()})


def test_there_is_no_bundle_for_newcomers(tmp_path):
    """The refusal names the command that writes an agent's own model."""
    tables = {
        "rounds": 1,
        "baselines": [],
        "data": {"agents": 3, "samples_per_agent": 24},
        "methods": {"fedproto": {"batch_size": 6}},
    }
    nufed.run(tables, out=tmp_path / "run", figures=False)
    with pytest.raises(InputError, match="--method fedproto --agent N"):
        nufed.make_bundle(nufed.load_run(tmp_path / "run"), "fedproto")


# wrong implementations


class AbsentClassesAreZero(FedProto):
    """A class that an agent lacks counts as a prototype at 0: the plain mean over agents."""

    def local_prototypes(self, context, y, classes):
        sent = super().local_prototypes(context, y, classes)
        shares = sent["shares"].clamp_min(1e-300)[:, None]
        means = (sent["weighted"].view(classes, -1) / shares).flatten()
        return {"weighted": means, "shares": torch.ones_like(sent["shares"])}


class FeaturesOfTheStart(FedProto):
    """Prototypes of the model before its local steps."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        classes = len(received["shares"])
        sent = self.local_prototypes(context, state["personal"], classes)
        return replace(result, vectors=sent)


class ForgetsClasses(FedProto):
    """A class without agents in the cohort has no prototype any more."""

    def server_update(self, context, server, updates):
        return {n: self.aggregate(context, updates, n, server[n]) for n in self.sends}


class DividesTwice(FedProto):
    """Divided by the number of agents once more, as equation (6) can be read."""

    def server_update(self, context, server, updates):
        after = super().server_update(context, server, updates)
        return {**after, "weighted": after["weighted"] / len(updates)}


class SumOverFeatures(FedProto):
    def train(self, context, received, y, purpose="outer"):
        other = replace(self, weight=7 * self.weight)
        return super(SumOverFeatures, other).train(context, received, y, purpose)


class TermIsAlwaysZero(FedProto):
    """No prototype is found, as it was in FL-bench."""

    def train(self, context, received, y, purpose="outer"):
        return super().train(context, sent_by_hand({}), y, purpose)


class UnknownClassesPullToZero(FedProto):
    """A class without a global prototype is pulled to 0."""

    def train(self, context, received, y, purpose="outer"):
        known = bool((received["shares"] > 0).any())
        shares = received["shares"].clamp_min(1e-9 * known)
        return super().train(context, {**received, "shares": shares}, y, purpose)


class SendsTheModel(FedProto):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return replace(result, vectors={**result.vectors, "model": result.state["personal"]})


class StartsAnew(FedProto):
    """The agent's model starts from the initial one in every round."""

    def agent_update(self, context, received, state):
        start = self.agent_init(context.objective, received)
        return super().agent_update(context, received, start)


class UnknownClassesPredict(FedProto):
    """A class without a prototype is predicted as if its prototype were 0."""

    def predict(self, objective, personal, inputs):
        if self.prediction == "prototypes":
            personal = {**personal, "shares": personal["shares"].clamp_min(1e-9)}
        return super().predict(objective, personal, inputs)


MUTANTS = {
    AbsentClassesAreZero: (ROUNDS, MEANS),
    FeaturesOfTheStart: (ROUNDS, MEANS),
    ForgetsClasses: (ROUNDS, SERVER),
    DividesTwice: (ROUNDS, SERVER),
    SumOverFeatures: (ROUNDS,),
    TermIsAlwaysZero: (ROUNDS,),
    UnknownClassesPullToZero: (ROUNDS,),
    SendsTheModel: (TRAVEL,),
    StartsAnew: (FEDPER, ROUNDS),
    UnknownClassesPredict: (NEAREST,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
