"""FedRoD: the shared model under the balanced loss, the personal head beside it, and nothing else.

The proofs are functions of the class, so that wrong implementations can be shown to fail them.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nufed
from nufed import Federation, InputError, Objective, fedavg
from nufed.algorithms import AgentResult, Cost, FedRoD, Personal
from nufed.algorithms.local_optimizer import SGD
from nufed.data import Samples, make_split
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}
COUNTS = [9, 0, 3]  # training samples of the agent of `uneven` by class


def uneven():
    """One agent with 9, 0 and 3 training samples of three classes."""
    rng = np.random.default_rng(1)
    y = np.repeat([0, 2], [12, 4])
    rows = np.arange(16)
    x = torch.from_numpy(rng.normal(size=(16, 5)))
    for seed in range(100):
        split = make_split([rows], seed, validation=0.0, test=0.25)
        data = Federation(Samples(x, torch.from_numpy(y), ("a", "b", "c")), split)
        found = torch.bincount(data.samples.targets[split.train[0]], minlength=3)
        if found.tolist() == COUNTS:
            return data
    raise AssertionError


def tensors_of(w):
    """The layers of `mlp` in a flat vector: W1, b1, W2, b2."""
    parts = torch.split(w, [35, 7, 21, 3])
    shapes = ((7, 5), (7,), (3, 7), (3,))
    return [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]


def features_by_hand(w, x):
    w1, b1, *_ = tensors_of(w)
    return torch.tanh(x.double() @ w1.T + b1)


def generic_by_hand(w, x):
    *_, w2, b2 = tensors_of(w)
    return features_by_hand(w, x) @ w2.T + b2


def personal_by_hand(phi, z):
    return z @ phi[:21].reshape(3, 7).T + phi[21:]


def balanced_by_hand(g, y, counts, power):
    """−log(N_y^γ·exp(g_y) / Σ N_c^γ·exp(g_c)) over the classes that the agent has."""
    held = [c for c, n in enumerate(counts) if n]
    total = sum(counts[c] ** power * torch.exp(g[:, c]) for c in held)
    own = torch.tensor([float(counts[c]) ** power for c in y.tolist()], dtype=g.dtype)
    return -(own * torch.exp(g.gather(1, y[:, None])[:, 0]) / total).log().mean()


def start(seed=2):
    """An objective, a model and a personal head that are nowhere 0."""
    generator = torch.Generator().manual_seed(seed)
    objective = Objective(mlp())
    w = 0.5 * torch.randn(objective.size, generator=generator, dtype=torch.float64)
    return objective, w, 0.3 * torch.randn(24, generator=generator, dtype=torch.float64)


# proofs


def check_a_round_against_autograd(cls):
    """w and φ after a round, by formulas written out on the layers, with and without momentum."""
    data, (objective, w, phi) = uneven(), start()
    for power, momentum in ((1.0, 0.0), (0.5, 0.6)):
        own = agent_context(objective, data.batches(0, 0, "train", 1))
        algorithm = cls(balance=power, personal_lr=0.3, optimizer=SGD(momentum=momentum), **SHARED)
        result = algorithm.agent_update(own, {"model": w}, {"personal_head": phi})
        v, p, moved = w, phi, [torch.zeros_like(w), torch.zeros_like(phi)]
        for t in range(3):
            ((x, y, _),) = data.batches(0, 0, "train", 1).draw("outer", 6, step=t)
            v, p = v.detach().requires_grad_(), p.detach().requires_grad_()
            loss = balanced_by_hand(generic_by_hand(v, x), y, COUNTS, power)
            (by_v,) = torch.autograd.grad(loss, v)
            logits = generic_by_hand(v, x).detach()
            logits = logits + personal_by_hand(p, features_by_hand(v, x).detach())
            own_loss = (logits.logsumexp(1) - logits.gather(1, y[:, None])[:, 0]).mean()
            (by_p,) = torch.autograd.grad(own_loss, p)
            moved = [momentum * m + g for m, g in zip(moved, (by_v, by_p), strict=True)]
            v, p = v - 0.1 * moved[0], p - 0.3 * moved[1]
        assert result.vectors.keys() == {"model"} and result.state.keys() == {"personal_head"}
        assert torch.allclose(result.vectors["model"], v, rtol=0, atol=1e-12)
        assert torch.allclose(result.state["personal_head"], p, rtol=0, atol=1e-12)
        assert result.cost == Cost(6)


def check_equal_counts_are_the_plain_loss(cls):
    objective, w, _ = start()
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 1, 1])
    for power in (1.0, 0.3):
        balanced = cls(balance=power).balanced(objective, torch.tensor([7, 7, 7]))
        right = F.cross_entropy(generic_by_hand(w, x), y)
        assert torch.allclose(balanced.value(w, (x, y)), right, rtol=1e-12)
        assert torch.allclose(balanced.grad(w, (x, y)), objective.grad(w, (x, y)), atol=1e-12)


def check_unequal_counts_by_hand(cls):
    """Logits log 2, log 3, 0 with 1, 2 and 5 samples: odds 2 : 6 : 5, the last class has 5/13."""
    layer = nn.Linear(3, 3, bias=False).double()
    objective = Objective(layer)
    w = torch.eye(3, dtype=torch.float64).flatten()
    x = torch.tensor([[math.log(2), math.log(3), 0.0]], dtype=torch.float64)
    for power, right in ((1.0, 5 / 13), (2.0, 25 / (2 + 12 + 25)), (0.0, 1 / 6)):
        balanced = cls(balance=power).balanced(objective, torch.tensor([1, 2, 5]))
        value = balanced.value(w, (x, torch.tensor([2])))
        assert float(value) == pytest.approx(-math.log(right), rel=1e-12)


def check_without_balance_the_model_is_fedavgs(cls):
    """γ = 0, to the bit, whatever the personal heads do, with agents that lack classes."""
    data = federation(samples=12)
    engine = DirectEngine(Objective(mlp()), data, 5)
    w = engine.objective.initial()
    both = [
        list(train(a, engine, w, rounds=4, participation=0.5))
        for a in (cls(balance=0.0, personal_lr=0.5, **SHARED), fedavg(**SHARED))
    ]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(both[0][0].server["model"], both[0][-1].server["model"])


def check_the_personal_loss_leaves_the_shared_model_alone(cls):
    """Its gradient there is exactly 0: w keeps its bits whatever φ is and however fast it moves."""
    data, (objective, w, phi) = uneven(), start()
    sent = []
    for head, lr in ((phi, 0.3), (0 * phi, 0.3), (5 * phi, 0.0), (phi, 4.0)):
        own = agent_context(objective, data.batches(0, 0, "train", 1))
        algorithm = cls(personal_lr=lr, **SHARED)
        result = algorithm.agent_update(own, {"model": w}, {"personal_head": head})
        sent.append(result.vectors["model"])
    assert all(torch.equal(sent[0], other) for other in sent[1:])


def check_predictions_are_sums_of_logits(cls):
    """φ = 0 gives the global logits to the bit, another φ generic plus personal logits."""
    objective, w, phi = start()
    x = torch.randn(9, 5, dtype=torch.float64)
    algorithm = cls(**SHARED)
    zero = algorithm.predict(objective, {"model": w, "personal_head": 0 * phi}, x)
    assert torch.equal(zero, objective.predict(w, x))
    found = algorithm.predict(objective, {"model": w, "personal_head": phi}, x)
    right = generic_by_hand(w, x) + personal_by_hand(phi, features_by_hand(w, x))
    assert torch.allclose(found, right, rtol=0, atol=1e-13)


def check_a_class_that_is_lacking(cls):
    """Loss and gradient stay finite, even on a sample of that class, and its row keeps its bits."""
    data = uneven()
    for dtype in (torch.float32, torch.float64):
        for size in (1.0, 300.0):
            objective = Objective(mlp(dtype))
            w = size * objective.initial()
            x, y = torch.randn(4, 5, dtype=dtype), torch.tensor([0, 1, 2, 1])
            for power, times in ((1.0, 1), (0.2, 1), (0.0, 1), (40.0, 900)):
                counts = times * torch.tensor(COUNTS)  # to the power of 40 beyond float32
                balanced = cls(balance=power).balanced(objective, counts)
                assert torch.isfinite(balanced.value(w, (x, y)))
                assert torch.isfinite(balanced.grad(w, (x, y))).all()
        own = agent_context(objective, data.batches(0, 0, "train", 1))
        w, received = objective.initial(), {"model": objective.initial()}
        state = cls(**SHARED).agent_init(objective, received)
        after = cls(**SHARED).agent_update(own, received, state).vectors["model"]
        for now, before in zip(tensors_of(after)[2:], tensors_of(w)[2:], strict=True):
            assert torch.equal(now[1], before[1]) and not torch.equal(now[0], before[0])


def check_personal_models(cls):
    """φ starts at 0; the personal model is the received w with the kept φ; newcomers train φ."""
    data, (objective, w, phi) = uneven(), start()
    algorithm = cls(personal_lr=0.3, **SHARED)
    own = agent_context(objective, data.batches(0, 0, "evaluate"))
    assert not algorithm.agent_init(objective, {"model": w})["personal_head"].any()
    known = algorithm.personal_model(own, {"model": w}, {"personal_head": phi})
    assert known.tensors.keys() == {"model", "personal_head"} and known.cost == Cost(0)
    assert torch.equal(known.model, w) and torch.equal(known.tensors["personal_head"], phi)
    assert torch.equal(algorithm.global_model(objective, {"model": w}), w)
    new = algorithm.personal_model(own, {"model": w}, None)
    batches = [data.batches(0, 0, "evaluate").draw("personal", 6, step=t)[0] for t in range(3)]
    right = head_by_hand(w, torch.zeros_like(phi), batches, 0.3)[-1]
    assert torch.equal(new.model, w) and new.cost == Cost(3)
    assert torch.allclose(new.tensors["personal_head"], right, rtol=0, atol=1e-13)


def check_fine_tuning_moves_the_personal_head_alone(cls):
    data, (objective, w, phi) = uneven(), start()
    own = agent_context(objective, data.batches(0, 0, "evaluate"))
    personal = {"model": w, "personal_head": phi}
    batches = data.batches(0, 0, "evaluate").draw("adapt", 6, 2)
    rates = torch.linspace(0.1, 0.3, objective.size, dtype=torch.float64)
    for rate, step in ((0.2, 0.1), (rates, 0.5 * rates[-24:])):
        algorithm = cls(**{**SHARED, "adapt_lr": rate})
        found = list(algorithm.fine_tune(own, {"model": w}, personal, 2, scale=0.5))
        assert len(found) == 3 and all(torch.equal(each["model"], w) for each in found)
        right = head_by_hand(w, phi, batches, step)
        for each, head in zip(found, right, strict=True):
            assert torch.allclose(each["personal_head"], head, rtol=0, atol=1e-13)


def head_by_hand(w, phi, batches, lr):
    """φ after 0, 1, … plain steps with w held fixed: ∂ℓ/∂φ = (softmax − one-hot)ᵀ(z, 1)/n."""
    found = [phi]
    for x, y, _ in batches:
        z = features_by_hand(w, x)
        d = (generic_by_hand(w, x) + personal_by_hand(phi, z)).softmax(1) - F.one_hot(y, 3)
        phi = phi - lr * torch.cat([(d.T @ z).flatten(), d.sum(0)]) / len(y)
        found.append(phi)
    return found


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fedrod(check):
    check(FedRoD)


# wrong implementations


class GradientIntoTheBody(FedRoD):
    """FL-bench: the two losses are added, and nothing is detached."""

    def agent_update(self, context, received, state):
        objective, w, phi = context.objective, received["model"], state["personal_head"]
        head, balanced = (
            objective.part("head"),
            self.balanced(objective, self.class_counts(context)),
        )
        for batch in self.local_batches(context):
            d = objective.grad(head.put(w, head.take(w) + phi), batch)
            w, phi = (
                w - self.meta_lr * (balanced.grad(w, batch) + head.put(d, 0 * phi)),
                phi - self.personal_lr * head.take(d),
            )
        return AgentResult({"model": w}, {"personal_head": phi}, Cost(6))


class GradientIntoTheGenericHead(FedRoD):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        head = context.objective.part("head")
        change = result.state["personal_head"] - state["personal_head"]
        sent = head.put(result.vectors["model"], head.take(result.vectors["model"]) + change)
        return AgentResult({"model": sent}, result.state, result.cost)


class PersonalHeadAlone(FedRoD):
    """FL-bench: φ is trained on its own logits."""

    def personal_gradient(self, objective, w, phi, batch, features=None):
        head = objective.part("head")
        return head.take(objective.grad(head.put(w, phi), batch))


class PredictsWithThePersonalHeadAlone(FedRoD):
    def predict(self, objective, personal, inputs):
        w = objective.part("head").put(personal["model"], personal["personal_head"])
        return objective.predict(w, inputs)


class PredictsWithTheGenericHeadAlone(FedRoD):
    def predict(self, objective, personal, inputs):
        return objective.predict(personal["model"], inputs)


class PersonalHeadNeverMoves(FedRoD):
    """FedTED: its optimiser does not hold φ."""

    def personal_gradient(self, objective, w, phi, batch, features=None):
        return torch.zeros_like(phi)


class PersonalHeadUnderTheBalancedLoss(FedRoD):
    def agent_update(self, context, received, state):
        balanced = self.balanced(context.objective, self.class_counts(context))
        own = agent_context(balanced, context.batches)
        return super().agent_update(own, received, state)


class PersonalAfterTheStep(FedRoD):
    """φ sees the shared model after its step of this batch."""

    def agent_update(self, context, received, state):
        objective, w, phi = context.objective, received["model"], state["personal_head"]
        balanced = self.balanced(objective, self.class_counts(context))
        step, other = self.start_steps(context), self.start_steps(context, self.personal_lr)
        for batch in self.local_batches(context):
            w = step(w, balanced.grad(w, batch))
            phi = other(phi, self.personal_gradient(objective, w, phi, batch))
        return AgentResult({"model": w}, {"personal_head": phi}, Cost(6))


class PlainLoss(FedRoD):
    def balanced(self, objective, counts):
        return objective


class Shifted(FedRoD):
    """A balanced loss with a shift of logits by `shift`."""

    def balanced(self, objective, counts):
        return objective.variant(loss=lambda g, y: objective.loss(g + self.shift(counts.to(g)), y))


class WrongSign(Shifted):
    def shift(self, counts):
        return -self.balance * counts.clamp(min=1e-30).log()


class CountsInsteadOfLogarithms(Shifted):
    def shift(self, counts):
        return counts**self.balance


class LogarithmOfZero(Shifted):
    def shift(self, counts):
        return (counts**self.balance).log()


class LackingClassCountsAsOne(Shifted):
    def shift(self, counts):
        return self.balance * counts.clamp(min=1).log()


class SmallNumberToThePower(Shifted):
    """For γ < 1 the stand-in of 0 is no longer small."""

    def shift(self, counts):
        return self.balance * counts.clamp(min=1e-8).log()


class WithoutThePower(Shifted):
    def shift(self, counts):
        return counts.clamp(min=torch.finfo(counts.dtype).tiny).log()


class InverseFrequencies(FedRoD):
    """FedTED: samples weighted by 1/N_y instead of the balanced softmax."""

    def balanced(self, objective, counts):
        weights = 1 / counts.clamp(min=1).double()
        return objective.variant(
            loss=lambda g, y: F.cross_entropy(g, y, weight=weights.to(g), reduction="sum") / len(y)
        )


class Exponentials(FedRoD):
    """FLGo: exponentials before the quotient."""

    def balanced(self, objective, counts):
        def loss(g, y):
            weighted = counts.to(g) ** self.balance * g.exp()
            return -(weighted.gather(1, y[:, None])[:, 0] / weighted.sum(1)).log().mean()

        return objective.variant(loss=loss)


class CountsOfABatch(FedRoD):
    def class_counts(self, context):
        return torch.bincount(context.batches.draw("outer", 6)[0].targets, minlength=3)


class CountsWithoutTheLastBatch(FedRoD):
    """PFLlib: the loader drops what does not fill a batch."""

    def class_counts(self, context):
        targets = context.batches.whole().targets
        return torch.bincount(targets[: len(targets) // 5 * 5], minlength=3)


class StartsAsTheGenericHead(FedRoD):
    """PFLlib and FL-bench: φ starts as a copy of ψ."""

    def agent_init(self, objective, received):
        return {"personal_head": objective.part("head").take(received["model"])}


class ForgetsTheHead(FedRoD):
    def agent_update(self, context, received, state):
        return super().agent_update(context, received, self.agent_init(context.objective, received))


class NewcomerDoesNotTrain(FedRoD):
    def personal_model(self, context, received, state):
        own = state or self.agent_init(context.objective, received)
        return Personal({"model": received["model"], **own})


class NewcomerForFree(FedRoD):
    def personal_model(self, context, received, state):
        return Personal(super().personal_model(context, received, state).tensors)


class FineTunesTheModel(FedRoD):
    fine_tune = nufed.algorithms.Algorithm.fine_tune


class TheHeadTravels(FedRoD):
    sends = ("model", "personal_head")

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return AgentResult({**result.vectors, **result.state}, result.state, result.cost)


MUTANTS = {
    GradientIntoTheBody: [check_the_personal_loss_leaves_the_shared_model_alone],
    GradientIntoTheGenericHead: [check_the_personal_loss_leaves_the_shared_model_alone],
    PersonalHeadAlone: [check_a_round_against_autograd],
    PredictsWithThePersonalHeadAlone: [check_predictions_are_sums_of_logits],
    PredictsWithTheGenericHeadAlone: [check_predictions_are_sums_of_logits],
    PersonalHeadNeverMoves: [check_a_round_against_autograd, check_personal_models],
    PersonalHeadUnderTheBalancedLoss: [check_a_round_against_autograd],
    PersonalAfterTheStep: [check_a_round_against_autograd],
    PlainLoss: [check_a_round_against_autograd, check_unequal_counts_by_hand],
    WrongSign: [check_a_round_against_autograd, check_unequal_counts_by_hand],
    CountsInsteadOfLogarithms: [check_a_round_against_autograd, check_unequal_counts_by_hand],
    LogarithmOfZero: [check_a_class_that_is_lacking],
    LackingClassCountsAsOne: [check_a_round_against_autograd, check_a_class_that_is_lacking],
    SmallNumberToThePower: [check_a_round_against_autograd],
    WithoutThePower: [check_unequal_counts_by_hand, check_without_balance_the_model_is_fedavgs],
    InverseFrequencies: [
        check_equal_counts_are_the_plain_loss,
        check_unequal_counts_by_hand,
        check_a_round_against_autograd,
    ],
    Exponentials: [check_a_class_that_is_lacking],
    CountsOfABatch: [check_a_round_against_autograd],
    CountsWithoutTheLastBatch: [check_a_round_against_autograd],
    StartsAsTheGenericHead: [check_personal_models],
    ForgetsTheHead: [check_a_round_against_autograd],
    NewcomerDoesNotTrain: [check_personal_models],
    NewcomerForFree: [check_personal_models],
    FineTunesTheModel: [check_fine_tuning_moves_the_personal_head_alone],
    TheHeadTravels: [check_a_round_against_autograd],
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


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.head.weight = self.encode.weight

    def forward(self, x):
        return self.head(torch.tanh(self.encode(x)))


@pytest.mark.parametrize(
    ("module", "classes", "words"),
    [
        (nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)), 3, "ends in LayerNorm: change the model"),
        (TiedHead(), 5, "with weights of its own"),
        (nn.Linear(5, 1), 0, "fedrod needs classes"),
    ],
)
def test_what_it_needs_is_said_before_the_run_starts(tmp_path, module, classes, words):
    x = torch.randn(60, 5)
    y = torch.randint(0, classes, (60,)) if classes else torch.randn(60, 1)
    config = {
        "data": {"agents": 3, "partition": "iid", "samples_per_agent": 20},
        "methods": {"rod": {"algorithm": "fedrod", "batch_size": 4}},
    }
    with pytest.raises(InputError, match=words):
        nufed.run(config, model=module, data=(x, y), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_epochs_and_dropout():
    """Both gradients of a step meet the same dropout masks, and epochs set the number of steps."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    objective, data = Objective(net), uneven()
    algorithm = FedRoD(**{**SHARED, "local_epochs": 2, "batch_size": 5})
    own = nufed.algorithms.AgentContext(1, 1, 1, objective, data.batches(0, 0, "train", 1), 12)
    received = {"model": objective.initial()}
    result = algorithm.agent_update(own, received, algorithm.agent_init(objective, received))
    assert result.cost == Cost(2 * 2 * 3) and torch.isfinite(result.vectors["model"]).all()
    assert algorithm.personal_model(own, received, None).cost == Cost(6)
    seen = []

    class Seeds(Objective):
        def _grad(self, w, batch, wanted):
            seen.append(batch.seed)
            return super()._grad(w, batch, wanted)

    algorithm = FedRoD(**SHARED)
    own = agent_context(Seeds(net), data.batches(0, 0, "train", 1))
    algorithm.agent_update(own, received, algorithm.agent_init(own.objective, received))
    assert len(seen) == 6 and len(set(seen)) == 3


@pytest.mark.parametrize(
    "last, loss, message",
    [
        (nn.LogSoftmax(1), nn.functional.nll_loss, "changes them: remove what follows"),
        (nn.Softplus(), nn.functional.cross_entropy, "changes them: remove what follows"),
        (nn.Identity(), nn.functional.nll_loss, "does not .as for log-probabilities"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(last, loss, message):
    """The balanced loss would be the plain one: log N_c has no effect on log-probabilities."""
    objective = Objective(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), last), loss)
    received = {"model": objective.initial()}
    own = agent_context(objective, uneven().batches(0, 0, "train", 1))
    algorithm = FedRoD(**SHARED)
    with pytest.raises(InputError, match=message):
        algorithm.agent_update(own, received, algorithm.agent_init(objective, received))


def test_losses_of_logits_are_taken():
    smooth = partial(nn.functional.cross_entropy, label_smoothing=0.1)
    for loss in (nn.functional.cross_entropy, smooth):
        objective = Objective(nn.Sequential(nn.Linear(5, 3, bias=False), nn.Identity()), loss)
        received = {"model": objective.initial()}
        own = agent_context(objective, uneven().batches(0, 0, "train", 1))
        algorithm = FedRoD(**SHARED)
        found = algorithm.agent_update(own, received, algorithm.agent_init(objective, received))
        assert torch.isfinite(found.vectors["model"]).all()
