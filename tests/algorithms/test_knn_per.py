"""kNN-Per: FedAvg's model, mixed in probability with a brute-force search of nearest neighbours.

The proofs are functions of the class, so that wrong implementations can be shown to fail them.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nufed
from nufed import InputError, Objective, fedavg
from nufed.algorithms import AgentResult, Cost, KNNPer, Personal
from nufed.objective.objective import features_of
from nufed.simulation import DirectEngine, train
from support import agent_context, context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.2}


def features_by_hand(w, x):
    """What the last layer of `mlp` gets."""
    return torch.tanh(x.double() @ w[:35].reshape(7, 5).T + w[35:42])


def outputs_by_hand(w, x):
    return features_by_hand(w, x) @ w[42:63].reshape(3, 7).T + w[63:]


def shares_by_hand(z, stored, labels, k, scale=1.0, classes=3):
    """Every sample against every stored one, in Python's own numbers."""
    found = []
    for row in z.tolist():
        near = sorted(
            (math.dist(row, other), label)
            for other, label in zip(stored.tolist(), labels.tolist(), strict=True)
        )[:k]
        weights = [math.exp(-(d - near[0][0]) / scale) for d, _ in near]
        found.append(
            [
                sum(a for a, (_, label) in zip(weights, near, strict=True) if label == c)
                / sum(weights)
                for c in range(classes)
            ]
        )
    return torch.tensor(found, dtype=torch.float64)


def start(seed=2, agent=2):
    """An agent of a federation, a model that is nowhere 0, and samples that nobody trained on."""
    generator = torch.Generator().manual_seed(seed)
    data, objective = federation(), Objective(mlp())
    w = torch.randn(objective.size, generator=generator, dtype=torch.float64)
    x = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    own = agent_context(objective, data.batches(agent, 0, "evaluate"))
    return data, own, w, x


def training_part(data, agent=2):
    rows = data.split.train[agent]
    return data.samples.inputs[rows], data.samples.targets[rows]


def predictions(algorithm, own, w, x):
    personal = algorithm.personal_model(own, {"model": w}, None)
    return algorithm.predict(own.objective, personal.tensors, x)


# proofs


def check_probabilities_are_mixed(cls):
    data, own, w, x = start()
    inputs, labels = training_part(data)
    stored = features_by_hand(w, inputs)
    for weight, k, scale in ((0.4, 5, 1.0), (0.7, 3, 0.2), (0.5, 1, 1.0), (0.2, 18, 3.0)):
        algorithm = cls(knn_weight=weight, neighbours=k, distance_scale=scale, **SHARED)
        found = predictions(algorithm, own, w, x)
        knn = shares_by_hand(features_by_hand(w, x), stored, labels, k, scale)
        right = weight * knn + (1 - weight) * outputs_by_hand(w, x).softmax(1)
        assert torch.allclose(found.exp(), right, rtol=0, atol=1e-12)
        assert torch.allclose(found.exp().sum(1), torch.ones(11, dtype=w.dtype), atol=1e-12)
        y = torch.arange(11) % 3
        loss = -right.gather(1, y[:, None]).log().mean()
        assert torch.allclose(own.objective.loss(found, y), loss, rtol=1e-12)


def check_weight_0_is_the_global_model(cls):
    """Its log-probabilities to the bit, however large its outputs are."""
    _, own, w, x = start()
    for size in (1.0, 300.0):
        outputs = own.objective.predict(size * w, x)
        found = predictions(cls(knn_weight=0.0, **SHARED), own, size * w, x)
        assert torch.equal(found, outputs.log_softmax(1))
        assert torch.equal(found.argmax(1), outputs.argmax(1))


def check_weight_1_is_brute_force_neighbours(cls):
    """And every output is finite, also of classes that no neighbour has."""
    data, own, w, x = start()
    inputs, labels = training_part(data)
    for k in (1, 4):
        right = shares_by_hand(features_by_hand(w, x), features_by_hand(w, inputs), labels, k)
        found = predictions(cls(knn_weight=1.0, neighbours=k, **SHARED), own, w, x)
        assert torch.allclose(found.exp(), right, rtol=0, atol=1e-12) and (right == 0).any()
        assert torch.isfinite(found).all() and torch.equal(found.argmax(1), right.argmax(1))


def check_more_neighbours_than_samples_are_all_of_them(cls):
    data, own, w, x = start()
    inputs, labels = training_part(data)
    right = shares_by_hand(features_by_hand(w, x), features_by_hand(w, inputs), labels, 18)
    for k in (18, 19, 10**6):
        found = predictions(cls(knn_weight=1.0, neighbours=k, **SHARED), own, w, x)
        assert torch.allclose(found.exp(), right, rtol=0, atol=1e-12)


def check_far_neighbours_make_a_distribution(cls):
    """Where exp(−d) underflows, in both precisions, and of one sample that is stored itself."""
    labels = torch.tensor([0, 1, 2, 2])
    stored = torch.tensor([[1e5, 0.0], [0.0, 1e5], [1.0, 3e5], [1.0, 3e5 + 1]])
    for dtype in (torch.float32, torch.float64):
        objective = Objective(nn.Linear(2, 3).to(dtype))
        personal = {"model": objective.initial(), "features": stored.to(dtype), "labels": labels}
        x = torch.tensor([[0.0, 0.0], [0.0, 9e4], [1.0, 3e5]], dtype=dtype)
        algorithm = cls(knn_weight=1.0, neighbours=3, **SHARED)
        shares = algorithm.predict(objective, personal, x).exp().double()
        right = shares_by_hand(x.double(), stored.to(dtype).double(), labels, 3)
        assert torch.allclose(shares, right, rtol=0, atol=1e-6)


def check_the_global_model_is_fedavgs(cls):
    """To the bit."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    w = engine.objective.initial()
    both = [
        list(train(a, engine, w, rounds=4, participation=0.5))
        for a in (cls(**SHARED), fedavg(**SHARED))
    ]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_nothing_but_the_model_leaves_an_agent(cls):
    """Neither to the server nor into the states that are kept between rounds."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    w = engine.objective.initial()
    assert cls.receives == cls.sends == ("model",)
    results = engine.agent_updates(cls(**SHARED), {"model": w}, {2: {}, 4: {}}, context())
    for result in results.values():
        assert result.vectors.keys() == {"model"} and result.state == {}
        assert result.vectors["model"].shape == w.shape and result.cost == Cost(2)


def check_the_datastore_is_the_training_part(cls):
    """Made of no other sample: the agent's test part, and other agents, leave no trace in it."""
    data, own, w, _ = start()
    personal = cls(**SHARED).personal_model(own, {"model": w}, None)
    inputs, labels = training_part(data)
    assert personal.tensors.keys() == {"model", "features", "labels"} and personal.model is w
    assert personal.tensors["features"].shape == (18, 7)
    assert torch.allclose(personal.tensors["features"], features_by_hand(w, inputs), atol=1e-13)
    assert torch.equal(personal.tensors["labels"], labels) and personal.cost == Cost(0)
    assert "labels of the agent's training samples" in cls.notes.personal_data


def check_fine_tuning_makes_the_datastore_again(cls):
    data, own, w, x = start()
    algorithm = cls(knn_weight=0.6, neighbours=4, **SHARED)
    personal = algorithm.personal_model(own, {"model": w}, None).tensors
    found = list(algorithm.fine_tune(own, {"model": w}, personal, 2, scale=0.5))
    inputs, labels = training_part(data)
    batches, right = data.batches(2, 0, "evaluate").draw("adapt", 6, 2), w
    assert len(found) == 3 and found[0].keys() == found[2].keys()
    for tensors, batch in zip(found, [*batches, None], strict=True):
        assert torch.allclose(tensors["model"], right, rtol=0, atol=1e-13)
        knn = shares_by_hand(features_by_hand(right, x), features_by_hand(right, inputs), labels, 4)
        probabilities = 0.6 * knn + 0.4 * outputs_by_hand(right, x).softmax(1)
        outputs = algorithm.predict(own.objective, tensors, x)
        assert torch.allclose(outputs.exp(), probabilities, rtol=0, atol=1e-12)
        if batch is not None:
            right = right - 0.1 * own.objective.grad(right, batch)
    assert cls.notes.shown_steps == 0


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_knn_per(check):
    check(KNNPer)


# wrong implementations


class Mixing(KNNPer):
    """Its `mix` says what is made of kNN's shares and the model's outputs."""

    def predict(self, objective, personal, inputs):
        outputs = objective.predict(personal["model"], inputs)
        features = features_of(objective, personal["model"], inputs)
        stored, labels = personal["features"], personal["labels"]
        shares = self.neighbour_shares(features, stored, labels, outputs.shape[1])
        return self.mix(self.knn_weight, shares, outputs)


class MixesLogits(Mixing):
    """FL-bench: kNN's probabilities and the model's logits."""

    def mix(self, weight, shares, outputs):
        return weight * shares + (1 - weight) * outputs


class MixesLogarithms(Mixing):
    """A geometric mean instead of the arithmetic one."""

    def mix(self, weight, shares, outputs):
        return weight * shares.clamp(min=1e-30).log() + (1 - weight) * outputs.log_softmax(1)


class GivesProbabilities(Mixing):
    """Right probabilities, which cross-entropy then takes for logits."""

    def mix(self, weight, shares, outputs):
        return weight * shares + (1 - weight) * outputs.softmax(1)


class WeightsSwapped(Mixing):
    def mix(self, weight, shares, outputs):
        return ((1 - weight) * shares + weight * outputs.softmax(1)).clamp(min=1e-30).log()


class LogarithmOfZero(Mixing):
    def mix(self, weight, shares, outputs):
        return (weight * shares + (1 - weight) * outputs.softmax(1)).log()


class CoarseFloor(Mixing):
    """Small probabilities of the model are cut off."""

    def mix(self, weight, shares, outputs):
        return (weight * shares + (1 - weight) * outputs.softmax(1)).clamp(min=1e-9).log()


class SquaredDistances(KNNPer):
    """The authors' code, without its scale."""

    def neighbour_shares(self, features, stored, labels, classes):
        near, places = torch.cdist(features, stored).topk(
            min(self.neighbours, len(stored)), 1, False
        )
        weights = (-(near**2) / self.distance_scale).softmax(1)
        return (weights[:, :, None] * F.one_hot(labels, classes)[places]).sum(1)


class Weighing(KNNPer):
    """Its `weigh` makes weights of the distances of neighbours."""

    def neighbour_shares(self, features, stored, labels, classes):
        distances = torch.cdist(features, stored, compute_mode="donot_use_mm_for_euclid_dist")
        near, places = distances.topk(min(self.neighbours, len(stored)), 1, largest=False)
        weights = self.weigh(near / self.distance_scale)
        return (weights[:, :, None] * F.one_hot(labels, classes).to(features)[places]).sum(1)


class EqualVotes(Weighing):
    def weigh(self, near):
        return torch.full_like(near, 1 / near.shape[1])


class InverseDistances(Weighing):
    def weigh(self, near):
        return (1 / near.clamp(min=1e-12)) / (1 / near.clamp(min=1e-12)).sum(1, keepdim=True)


class NotNormalised(Weighing):
    def weigh(self, near):
        return (-near).exp()


class SumWithoutGuard(Weighing):
    """The authors' code: 0/0 where all weights underflow."""

    def weigh(self, near):
        return (-near).exp() / (-near).exp().sum(1, keepdim=True)


class SumWithASmallNumber(Weighing):
    """FL-bench: 0 for every class where all weights underflow."""

    def weigh(self, near):
        return (-near).exp() / ((-near).exp().sum(1, keepdim=True) + 1e-9)


class FarthestNeighbours(Weighing):
    def weigh(self, near):
        return near.softmax(1)


class AllNeighbours(KNNPer):
    def neighbour_shares(self, features, stored, labels, classes):
        weights = (-torch.cdist(features, stored) / self.distance_scale).softmax(1)
        return weights @ F.one_hot(labels, classes).to(features)


class WithoutScale(KNNPer):
    def neighbour_shares(self, features, stored, labels, classes):
        plain = KNNPer(neighbours=self.neighbours)
        return plain.neighbour_shares(features, stored, labels, classes)


class OneTooFew(KNNPer):
    def neighbour_shares(self, features, stored, labels, classes):
        fewer = KNNPer(neighbours=max(1, min(self.neighbours, len(stored) - 1)))
        return fewer.neighbour_shares(features, stored, labels, classes)


class InputsAsFeatures(KNNPer):
    def with_datastore(self, context, w):
        found, inputs = super().with_datastore(context, w), context.batches.whole().inputs
        return {**found, "features": inputs.double()}

    def predict(self, objective, personal, inputs):
        by_model = objective.predict(personal["model"], inputs).softmax(1)
        stored, labels = personal["features"], personal["labels"]
        shares = self.neighbour_shares(inputs.to(stored), stored, labels, by_model.shape[1])
        return (self.knn_weight * shares + (1 - self.knn_weight) * by_model).log()


class FeaturesBeforeTheActivation(KNNPer):
    """FL-bench: not what the last layer gets."""

    def with_datastore(self, context, w):
        found = super().with_datastore(context, w)
        return {**found, "features": found["features"].atanh()}


class DatastoreOfABatch(KNNPer):
    """FL-bench, whose capacity is compared with the number of batches."""

    def with_datastore(self, context, w):
        inputs, labels, _ = context.batches.draw("adapt", self.batch_size)[0]
        return {"model": w, "features": features_of(context.objective, w, inputs), "labels": labels}


class StaleDatastore(KNNPer):
    """The model is fine-tuned, and met with features of the old one."""

    fine_tune = nufed.algorithms.Algorithm.fine_tune


class FineTunesNothing(KNNPer):
    def fine_tune(self, context, received, personal, steps, scale=1.0):
        return iter([personal] * (steps + 1))


class TheDatastoreTravels(KNNPer):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return AgentResult({**result.vectors, "labels": torch.ones(3)}, result.state, result.cost)


class TheDatastoreIsKept(KNNPer):
    """Features of an old model, and training data in the states of agents."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        found = self.with_datastore(context, received["model"])
        return AgentResult(result.vectors, {"features": found["features"]}, result.cost)


class MixesWhileTraining(KNNPer):
    """Trains on something else than the plain loss."""

    def agent_update(self, context, received, state):
        w = self.descend(context, received["model"], lr=self.meta_lr * (1 - self.knn_weight))
        return AgentResult({"model": w}, state, Cost(2))


class SaysNothingOfTrainingData(KNNPer):
    notes = replace(KNNPer.notes, personal_data="")


class CountsWork(KNNPer):
    def personal_model(self, context, received, state):
        return Personal(super().personal_model(context, received, state).tensors, Cost(1))


MUTANTS = {
    MixesLogits: [check_probabilities_are_mixed, check_weight_0_is_the_global_model],
    MixesLogarithms: [check_probabilities_are_mixed],
    GivesProbabilities: [check_probabilities_are_mixed],
    WeightsSwapped: [check_probabilities_are_mixed, check_weight_0_is_the_global_model],
    LogarithmOfZero: [check_weight_1_is_brute_force_neighbours],
    CoarseFloor: [check_weight_0_is_the_global_model],
    SquaredDistances: [check_probabilities_are_mixed],
    EqualVotes: [check_probabilities_are_mixed],
    InverseDistances: [check_probabilities_are_mixed],
    NotNormalised: [check_probabilities_are_mixed, check_weight_1_is_brute_force_neighbours],
    SumWithoutGuard: [check_far_neighbours_make_a_distribution],
    SumWithASmallNumber: [check_far_neighbours_make_a_distribution],
    FarthestNeighbours: [check_probabilities_are_mixed],
    AllNeighbours: [check_probabilities_are_mixed],
    WithoutScale: [check_probabilities_are_mixed],
    OneTooFew: [check_more_neighbours_than_samples_are_all_of_them],
    InputsAsFeatures: [check_probabilities_are_mixed, check_the_datastore_is_the_training_part],
    FeaturesBeforeTheActivation: [check_the_datastore_is_the_training_part],
    DatastoreOfABatch: [check_probabilities_are_mixed, check_the_datastore_is_the_training_part],
    StaleDatastore: [check_fine_tuning_makes_the_datastore_again],
    FineTunesNothing: [check_fine_tuning_makes_the_datastore_again],
    TheDatastoreTravels: [check_nothing_but_the_model_leaves_an_agent],
    TheDatastoreIsKept: [check_nothing_but_the_model_leaves_an_agent],
    MixesWhileTraining: [check_the_global_model_is_fedavgs],
    SaysNothingOfTrainingData: [check_the_datastore_is_the_training_part],
    CountsWork: [check_the_datastore_is_the_training_part],
}


@pytest.mark.parametrize(
    ("mutant", "check"),
    [(mutant, check) for mutant, checks in MUTANTS.items() for check in checks],
    ids=lambda each: each.__name__,
)
def test_a_wrong_copy_is_rejected(mutant, check):
    with pytest.raises(AssertionError):
        check(mutant)


# what it needs


def test_what_it_needs_is_said_before_the_run_starts(tmp_path):
    config = {
        "data": {"agents": 3, "partition": "iid", "samples_per_agent": 20},
        "methods": {"knn": {"algorithm": "knn_per", "batch_size": 4}},
    }
    data = (torch.randn(60, 5), torch.randn(60, 1))
    with pytest.raises(InputError, match="knn_per needs classes"):
        nufed.run(config, model=nn.Linear(5, 1), data=data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_diverged_models_are_shown_so():
    """Not a number stays so, and is not hidden behind the neighbours."""
    _, own, w, x = start()
    personal = KNNPer(**SHARED).personal_model(own, {"model": w}, None).tensors
    broken = {**personal, "model": w * float("nan")}
    assert KNNPer(**SHARED).predict(own.objective, broken, x).isnan().all()
