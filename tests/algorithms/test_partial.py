"""FedPer, FedRep, FedBABU, LG-FedAvg, FedBN, FedSA-LoRA: masked methods against torch, and limits.

The oracle trains real modules with torch's own optimiser and moves tensors by their names; it knows
neither flat vectors nor parts. Every proof is a function of the algorithm's class, and wrong
implementations must fail one of them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conformance.cases import SETTINGS
from flower.app.in_memory import agents_data, federate, federation_of, plan_of
from nufed import InputError, Objective, fedavg
from nufed.algorithms import (
    AgentContext,
    Algorithm,
    FedBABU,
    FedBN,
    FedPer,
    FedRep,
    FedSALoRA,
    LGFedAvg,
)
from nufed.algorithms.local_optimizer import SGD
from nufed.algorithms.partial import PrivatePart, divide
from nufed.algorithms.protocol import AgentResult, Cost, Personal
from nufed.server import initial_server, to_send
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import agent_context, federation, mlp, same

LR, STEPS, HEAD_STEPS, BATCH, SEED = 0.1, 2, 3, 6, 5
PLAIN = {"meta_lr": LR, "local_steps": STEPS, "batch_size": BATCH, "adapt_lr": 0.1}
OPTIMIZERS = SGD(momentum=0.5, weight_decay=0.05), SGD()  # plain steps have code of their own
FAMILY = [FedPer, FedRep, FedBABU, LGFedAvg, FedBN, FedSALoRA]
DATA = federation()


class Residual(nn.Module):
    """BatchNorm under several names, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.entry, self.bn = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.down = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.bn(self.entry(x))) + self.down(x))


class Adapted(nn.Module):
    """A fixed layer with a low-rank adapter, and a head; B is not 0."""

    def __init__(self):
        super().__init__()
        self.register_buffer("fixed", torch.randn(4, 5), persistent=False)
        self.lora_A, self.lora_B = (nn.Linear(*sizes, bias=False) for sizes in ((5, 2), (2, 4)))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.fixed.T + self.lora_B(self.lora_A(x))))


MLP, RESIDUAL, ADAPTED = mlp(), Residual().double(), Adapted().double()
HEAD, BODY = ["2.weight", "2.bias"], ["0.weight", "0.bias"]
STATS = ("weight", "bias", "running_mean", "running_var")
NORM = [f"{layer}.{kind}" for layer in ("bn", "down.1") for kind in STATS]


def history(algorithm, objective, rounds=4, kind=DirectEngine, participation=0.5):
    w = objective.initial()
    engine = kind(objective, DATA, SEED)
    return list(train(algorithm, engine, w, rounds=rounds, participation=participation))


def outer(source, steps):
    return [source.draw("outer", BATCH, step=t)[0] for t in range(steps)]


# the oracle


def torch_steps(module, names, batches, sgd):
    """Steps of torch's optimiser on the named parameters; the others are frozen."""
    chosen = [p for n, p in module.named_parameters() if n in names]
    if not chosen:
        return
    optimizer = torch.optim.SGD(chosen, LR, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    module.train()
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(batch.inputs.double()), batch.targets).backward()
        optimizer.step()


def together(module, source, sgd):
    torch_steps(module, [n for n, _ in module.named_parameters()], outer(source, STEPS), sgd)


def head_first(module, source, sgd):
    torch_steps(module, HEAD, outer(source, HEAD_STEPS), sgd)
    torch_steps(module, BODY, outer(source, STEPS), sgd)


def body_only(module, source, sgd):
    torch_steps(module, BODY, outer(source, STEPS), sgd)


ORACLES = {
    FedPer: (MLP, HEAD, together),
    FedRep: (MLP, HEAD, head_first),
    FedBABU: (MLP, HEAD, body_only),
    LGFedAvg: (MLP, BODY, together),
    FedBN: (RESIDUAL, NORM, together),
    FedSALoRA: (ADAPTED, ["lora_B.weight"], together),
}


def oracle(base, rounds, sgd):
    """The server's tensors by name, and those that each agent keeps, after the rounds."""
    start, private, work = ORACLES[base]
    initial = {n: t for n, t in start.state_dict().items() if t.is_floating_point()}
    server, own = initial, {}
    for progress in rounds[1:]:
        results = []
        for agent in progress.cohort:
            module = copy.deepcopy(start)
            module.load_state_dict({**server, **own.get(agent, {})}, strict=False)
            work(module, DATA.batches(agent, SEED, "train", progress.round), sgd)
            after = copy.deepcopy(module.state_dict())
            own[agent] = {n: after[n] for n in private}
            results.append(after)
        means = {n: sum(r[n] for r in results) / len(results) for n in initial}
        server = {n: initial[n] if n in private else means[n] for n in initial}
    return server, own


def base_of(cls):
    return next(c for c in cls.__mro__ if c in ORACLES)


def make(cls, **settings):
    more = {"head_steps": HEAD_STEPS} if issubclass(cls, FedRep) else {}
    return cls(**PLAIN, **{**more, **settings})


def objective_of(cls):
    stats = "tracked" if base_of(cls) is FedBN else "refuse"
    return Objective(ORACLES[base_of(cls)][0], running_stats=stats)


def near(objective, w, right):
    found = objective.module(w).state_dict()
    for name, tensor in right.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-12), name


# the proofs


def check_training_is_torchs_by_name(cls):
    """Server, private parts and personal models to 1e-12, plain and with momentum and decay."""
    for sgd in OPTIMIZERS:
        algorithm, objective = make(cls, optimizer=sgd), objective_of(cls)
        rounds = history(algorithm, objective)
        server, own = oracle(base_of(cls), rounds, sgd)
        received = to_send(algorithm, rounds[-1].server)
        assert len(own) >= 4 and len({p.cohort for p in rounds[1:]}) > 1
        for agent in own:
            context = agent_context(objective, DATA.batches(agent, 0, "evaluate"))
            state = rounds[-1].states.get(agent)
            personal = algorithm.personal_model(context, received, state)
            right = {**server, **own[agent]}
            if base_of(cls) is FedBABU:
                assert state is None and all(torch.equal(own[agent][n], server[n]) for n in HEAD)
            near(objective, personal.model, right)
            assert personal.cost == Cost()


def check_an_empty_mask_is_fedavg(cls):
    """To the bit, on both engines, and the server then holds a whole model."""
    algorithm, objective = make(cls, private="none"), Objective(MLP)
    for kind in (DirectEngine, BatchedEngine):
        one, other = (history(a, objective, kind=kind) for a in (algorithm, fedavg(**PLAIN)))
        for mine, right in zip(one, other, strict=True):
            assert torch.equal(mine.server["shared"], right.server["model"])
    model = algorithm.global_model(objective, to_send(algorithm, one[-1].server))
    assert torch.equal(model, right.server["model"])
    assert not torch.equal(model, objective.initial())


def check_a_full_mask_is_training_alone(cls):
    """To the bit, on the same draws; FedBABU trains nothing and keeps the initial model."""
    more = {"head_steps": STEPS} if issubclass(cls, FedRep) else {}
    algorithm, objective = make(cls, private="all", **more), Objective(MLP)
    rounds = history(algorithm, objective)
    received = to_send(algorithm, rounds[-1].server)
    assert received["shared"].shape == (0,)
    for agent in DATA.split.agents:
        v = objective.initial()
        for progress in rounds[1:]:
            if agent in progress.cohort and not issubclass(cls, FedBABU):
                for batch in outer(DATA.batches(agent, SEED, "train", progress.round), STEPS):
                    v = torch.sub(v, objective.grad(v, batch), alpha=LR)
        state = rounds[-1].states.get(agent)
        if state is None and not issubclass(cls, FedBABU):
            continue
        context = agent_context(objective, DATA.batches(agent, 0, "evaluate"))
        assert torch.equal(algorithm.personal_model(context, received, state).model, v)


def check_private_coordinates_never_travel(cls):
    """What is sent has exactly the shared size, and does not depend on private values beyond f."""
    algorithm, objective = make(cls), objective_of(cls)
    start, private, _ = ORACLES[base_of(cls)]
    tensors = start.state_dict()
    size = sum(t.numel() for n, t in tensors.items() if n not in private and t.is_floating_point())
    server = initial_server(algorithm, objective, objective.initial())
    assert {name: v.shape for name, v in server.items()} == {"shared": (size,)}
    received = to_send(algorithm, server)
    context = agent_context(objective, DATA.batches(2, 0, "train"))
    result = algorithm.agent_update(context, received, algorithm.agent_init(objective, received))
    assert {name: v.shape for name, v in result.vectors.items()} == {"shared": (size,)}
    kept = {} if base_of(cls) is FedBABU else {"private": (objective.size - size,)}
    assert {name: v.shape for name, v in result.state.items()} == kept


def check_a_newcomer_trains_the_private_part_alone(cls):
    """By torch's optimiser on the private tensors, from the initial ones; its cost is counted."""
    start, private, _ = ORACLES[base_of(cls)]
    steps = HEAD_STEPS if issubclass(cls, FedRep) else STEPS
    for sgd in OPTIMIZERS:
        algorithm, objective = make(cls, optimizer=sgd), objective_of(cls)
        rounds = history(algorithm, objective, rounds=2)
        server, _ = oracle(base_of(cls), rounds, sgd)
        module, source = copy.deepcopy(start), DATA.batches(2, 0, "evaluate")
        module.load_state_dict(server, strict=False)
        batches = [source.draw("personal", BATCH, step=t)[0] for t in range(steps)]
        torch_steps(module, private, batches, sgd)
        right = {n: t for n, t in module.state_dict().items() if t.is_floating_point()}
        received = to_send(algorithm, rounds[-1].server)
        personal = algorithm.personal_model(agent_context(objective, source), received, None)
        near(objective, personal.model, right)
        assert personal.cost == Cost(steps)
        assert algorithm.global_model(objective, received) is None


def check_the_head_keeps_its_bits(cls):
    """FedBABU's global model has the initial head after every round, to the bit, in float32."""
    module = copy.deepcopy(MLP).float()
    for sgd in OPTIMIZERS:
        algorithm, objective = make(cls, optimizer=sgd), Objective(module)
        for progress in history(algorithm, objective, participation=1.0):
            w = algorithm.global_model(objective, to_send(algorithm, progress.server))
            found = objective.module(w).state_dict()
            assert all(torch.equal(found[n], module.state_dict()[n]) for n in HEAD)
        assert not torch.equal(found["0.weight"], module.state_dict()["0.weight"])


def check_fine_tuning_changes_what_it_says(cls):
    for part, names in (("all", HEAD + BODY), ("head", HEAD), ("body", BODY)):
        algorithm, objective = make(cls, fine_tuned=part), Objective(MLP)
        received = to_send(algorithm, initial_server(algorithm, objective, objective.initial()))
        context = agent_context(objective, DATA.batches(2, 0, "evaluate"))
        personal = algorithm.personal_model(context, received, None)
        *_, last = algorithm.fine_tune(context, received, personal.tensors, 2)
        right = objective.initial()
        mask = torch.cat(
            [torch.full((p.numel(),), float(n in names)) for n, p in MLP.named_parameters()]
        )
        for batch in context.batches.draw("adapt", BATCH, 2):
            right = right - 0.1 * mask.double() * objective.grad(right, batch)
        assert torch.allclose(last["model"], right, rtol=0, atol=1e-14)


def check_without_its_part_it_is_fedavg(cls):
    algorithm, objective = make(cls), Objective(MLP)
    one, other = (history(a, objective) for a in (algorithm, fedavg(**PLAIN)))
    assert torch.equal(one[-1].server["shared"], other[-1].server["model"])
    newcomer = algorithm.personal_model(
        agent_context(objective, DATA.batches(2, 0, "evaluate")), one[-1].server, None
    )
    assert torch.equal(newcomer.model, other[-1].server["model"]) and newcomer.cost == Cost()
    own = agent_context(objective, DATA.batches(2, 0, "train"))
    said = f"private = {algorithm.private!r}: the model has no such part"
    assert said in algorithm.checks.doubt(own, {})
    assert make(cls, private="none").checks.doubt(own, {}) is None


def check_it_is_fedper_with_the_pattern(cls):
    """To the bit: A and the head are averaged, B stays; FedAvg on adapters is another method."""
    objective = Objective(ADAPTED)
    mine = history(make(cls), objective)
    right = history(FedPer(**PLAIN, private="lora_B.weight"), objective)
    for one, other in zip(mine, right, strict=True):
        assert torch.equal(one.server["shared"], other.server["shared"])
        for agent in DATA.split.agents:
            assert same(one.states.get(agent) or {}, other.states.get(agent) or {})
    shared = objective.part("lora_B.weight", rest=True)
    whole = history(fedavg(**PLAIN), objective)[-1].server["model"]
    assert not torch.allclose(mine[-1].server["shared"], shared.take(whole))


EVERY = [
    check_training_is_torchs_by_name,
    check_an_empty_mask_is_fedavg,
    check_a_full_mask_is_training_alone,
    check_private_coordinates_never_travel,
]
PROOFS = {cls: [*EVERY, check_a_newcomer_trains_the_private_part_alone] for cls in FAMILY}
PROOFS[FedBABU] = [*EVERY, check_the_head_keeps_its_bits, check_fine_tuning_changes_what_it_says]
PROOFS[FedBN] += [check_without_its_part_it_is_fedavg]
PROOFS[FedSALoRA] += [check_it_is_fedper_with_the_pattern, check_without_its_part_it_is_fedavg]


def named(pairs):
    return [pytest.param(c, check, id=f"{c.__name__}-{check.__name__}") for c, check in pairs]


@pytest.mark.parametrize("cls, check", named((c, p) for c in FAMILY for p in PROOFS[c]))
def test_proof(cls, check):
    check(cls)


# wrong implementations


class HeadIsAveraged(FedPer):
    def parts(self, objective):
        return divide(objective.base, "none")


class HeadIsForgotten(FedPer):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        return AgentResult(result.vectors, state, result.cost)


class HeadIsNotTrained(FedPer):
    def train(self, context, w):
        return self.descend(context, w, part=self.parts(context.objective)[1]), Cost(STEPS)


class PersonalBodyIsStale(FedPer):
    """Uses the body that the agent had after its last round, not the server's latest."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, {"private": state["private"]})
        kept = {**result.state, "body": result.vectors["shared"]}
        return AgentResult(result.vectors, kept, result.cost)

    def personal_model(self, context, received, state):
        old = received if state is None else {"shared": state["body"]}
        return super().personal_model(context, old, state)


class PersonalHeadIsInitial(FedPer):
    def personal_model(self, context, received, state):
        w = self.join(
            context.objective, received["shared"], self.initial_private(context.objective)
        )
        return Personal({"model": w})


class WholeModelIsSent(FedPer):
    def server_init(self, objective, w):
        return {"shared": w}

    def agent_update(self, context, received, state):
        _, shared = self.parts(context.objective)
        s = shared.take(received["shared"])
        result = super().agent_update(context, {"shared": s}, state)
        whole = self.join(context.objective, result.vectors["shared"], result.state["private"])
        return AgentResult({"shared": whole}, result.state, result.cost)


class NewcomerTrainsEverything(FedPer):
    def personal_model(self, context, received, state):
        if state is not None:
            return super().personal_model(context, received, state)
        u = self.initial_private(context.objective)
        w = self.join(context.objective, received["shared"], u)
        w = self.descend(context, w, batches=self.local_batches(context, "personal"))
        return Personal({"model": w}, Cost(STEPS))


class NewcomerIsFree(FedPer):
    def personal_model(self, context, received, state):
        return Personal(super().personal_model(context, received, state).tensors)


class TrainsTogether(FedRep):
    def train(self, context, w):
        return PrivatePart.train(self, context, w)


class BodyFirst(FedRep):
    def train(self, context, w):
        private, shared = self.parts(context.objective)
        w = self.descend(context, w, part=shared)
        batches = context.draw_each(self.step_draws(steps=self.head_steps))
        return self.descend(context, w, part=private, batches=batches), Cost(5)


class BothInTheSecondLoop(FedRep):
    def train(self, context, w):
        private, _ = self.parts(context.objective)
        batches = context.draw_each(self.step_draws(steps=self.head_steps))
        w = self.descend(context, w, part=private, batches=batches)
        return self.descend(context, w), Cost(5)


class FrozenByGradientAlone:
    """Zero gradients for the frozen part; the optimiser still decays it."""

    def descend(self, context, w, gradient=None, *, part=None, **more):
        grad = context.objective.grad
        only = None if part is None else lambda w, batch: part.only(grad(w, batch))
        return super().descend(context, w, only, **more)


class HalfFrozenRep(FrozenByGradientAlone, FedRep):
    pass


class HalfFrozenHead(FrozenByGradientAlone, FedBABU):
    pass


class OneOptimizerForBoth(FedRep):
    """The momentum of the head's loop goes on in the body's."""

    def train(self, context, w):
        parts, step = self.parts(context.objective), self.start_steps(context)
        for part, steps in zip(parts, (self.head_steps, self.local_steps), strict=True):
            for batch in context.draw_each(self.step_draws(steps=steps)):
                w = step(w, part.only(context.objective.grad(w, batch)))
        return w, Cost(5)


class HeadIsTrained(FedBABU):
    def descend(self, context, w, gradient=None, *, part=None, **more):
        return super().descend(context, w, gradient, **more)


class HeadIsNew(FedBABU):
    def initial_private(self, objective):
        return torch.randn_like(super().initial_private(objective))


class HeadIsAveragedToo(FedBABU):
    """The whole model travels, and equal numbers are averaged."""

    def server_init(self, objective, w):
        return {"shared": w}

    def whole(self, objective, received):
        return received["shared"]

    def agent_update(self, context, received, state):
        w = self.descend(context, received["shared"], part=self.parts(context.objective)[1])
        return AgentResult({"shared": w}, state, Cost(STEPS))


class FineTunesTheHeadOnly(FedBABU):
    def rate(self, objective, received):
        ones = torch.ones(objective.base.size, dtype=torch.float64)
        return objective.base.part("head").only(ones) * self.adapt_lr


class MaskIsNotInverse(LGFedAvg):
    def parts(self, objective):
        private, shared = super().parts(objective)
        return shared, private


class BodyIsShared(LGFedAvg):
    def parts(self, objective):
        return divide(objective.base, "head")


class OnlyAffineIsPrivate(FedBN):
    def parts(self, objective):
        if self.private != "norm":
            return super().parts(objective)
        return divide(objective.base, "bn.weight, bn.bias, down.1.weight, down.1.bias")


class OnlyStatisticsArePrivate(FedBN):
    def parts(self, objective):
        return divide(objective.base, "*running*" if self.private == "norm" else self.private)


class LayersByTheirName(FedBN):
    def parts(self, objective):
        return divide(objective.base, "bn.*" if self.private == "norm" else self.private)


class StatisticsAreNotMoved(FedBN):
    def descend(self, context, w, *more, **others):
        part = context.objective.base.part
        moved = super().descend(context, w, *more, **others)
        stats = part("*running*" if self.private == "norm" else "none")
        return stats.put(moved, stats.take(w))


class NormIsAveraged(FedBN):
    def parts(self, objective):
        return divide(objective.base, "none" if self.private == "norm" else self.private)


# right with momentum and weight decay, and wrong in plain steps


class PlainNormIsForgotten(FedBN):
    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        kept = {"private": state["private"].clone()} if self.optimizer == SGD() else result.state
        return AgentResult(result.vectors, kept, result.cost)


class PlainNormRestarts(FedBN):
    def agent_update(self, context, received, state):
        if self.optimizer == SGD():
            state = {"private": self.initial_private(context.objective)}
        return super().agent_update(context, received, state)


class PlainStepsAreTwiceAsLong(FedBN):
    def start_steps(self, context, lr=None, memory=None):
        return super().start_steps(context, 2 * self.meta_lr if self.optimizer == SGD() else lr)


class PlainHeadIsFrozen(FedPer):
    def train(self, context, w):
        part = self.parts(context.objective)[1] if self.optimizer == SGD() else None
        return self.descend(context, w, part=part), Cost(STEPS)


class TrainsTogetherInPlainSteps(FedRep):
    def train(self, context, w):
        return (PrivatePart if self.optimizer == SGD() else FedRep).train(self, context, w)


class PlainHeadIsTrained(FedBABU):
    def descend(self, context, w, gradient=None, *, part=None, **more):
        part = None if self.optimizer == SGD() else part
        return super().descend(context, w, gradient, part=part, **more)


BY_NAME = check_training_is_torchs_by_name
MUTANTS = [
    (PlainNormIsForgotten, BY_NAME),
    (PlainNormRestarts, BY_NAME),
    (PlainStepsAreTwiceAsLong, BY_NAME),
    (PlainHeadIsFrozen, BY_NAME),
    (TrainsTogetherInPlainSteps, BY_NAME),
    (PlainHeadIsTrained, BY_NAME),
    (HeadIsAveraged, BY_NAME),
    (HeadIsAveraged, check_private_coordinates_never_travel),
    (HeadIsAveraged, check_a_full_mask_is_training_alone),
    (HeadIsForgotten, BY_NAME),
    (HeadIsForgotten, check_a_full_mask_is_training_alone),
    (HeadIsNotTrained, BY_NAME),
    (HeadIsNotTrained, check_a_full_mask_is_training_alone),
    (PersonalBodyIsStale, BY_NAME),
    (PersonalHeadIsInitial, BY_NAME),
    (WholeModelIsSent, check_private_coordinates_never_travel),
    (NewcomerTrainsEverything, check_a_newcomer_trains_the_private_part_alone),
    (NewcomerIsFree, check_a_newcomer_trains_the_private_part_alone),
    (TrainsTogether, BY_NAME),
    (BodyFirst, BY_NAME),
    (BothInTheSecondLoop, BY_NAME),
    (BothInTheSecondLoop, check_a_full_mask_is_training_alone),
    (HalfFrozenRep, BY_NAME),
    (OneOptimizerForBoth, BY_NAME),
    (HalfFrozenHead, BY_NAME),
    (HeadIsTrained, BY_NAME),
    (HeadIsNew, BY_NAME),
    (HeadIsNew, check_the_head_keeps_its_bits),
    (HeadIsAveragedToo, check_private_coordinates_never_travel),
    (FineTunesTheHeadOnly, check_fine_tuning_changes_what_it_says),
    (MaskIsNotInverse, BY_NAME),
    (MaskIsNotInverse, check_an_empty_mask_is_fedavg),
    (BodyIsShared, BY_NAME),
    (OnlyAffineIsPrivate, BY_NAME),
    (OnlyAffineIsPrivate, check_private_coordinates_never_travel),
    (OnlyStatisticsArePrivate, BY_NAME),
    (LayersByTheirName, BY_NAME),
    (StatisticsAreNotMoved, BY_NAME),
    (NormIsAveraged, BY_NAME),
]


@pytest.mark.parametrize("mutant, check", named(MUTANTS))
def test_a_wrong_copy_is_rejected(mutant, check):
    with pytest.raises(AssertionError):
        check(mutant)


# what is around them


@pytest.mark.parametrize("cls", FAMILY)
def test_with_everything_private_flower_gives_the_same(cls):
    """An empty vector passes checks, payload and states."""
    algorithm = cls(private="all", **SETTINGS)
    data = agents_data(5)
    plan = plan_of(algorithm, agents=5, rounds=3, participation=0.5, unseen_agents=1)
    direct = DirectEngine(plan.objective, federation_of(data, plan.seed, 1), plan.seed)
    right = list(train(algorithm, direct, plan.objective.initial(), rounds=3, participation=0.5))
    rounds, outcome, _ = federate(plan, data)
    assert all(same(a.server, b.server) for a, b in zip(rounds, right, strict=True))
    assert rounds[-1].server["shared"].numel() == 0 and not outcome.missing
    assert all(not progress.rejected for progress in right)


def test_several_parts_may_be_private():
    """FedPer with K_P = 2, and a head with norm layers."""
    objective = Objective(RESIDUAL, running_stats="tracked")
    sizes = {
        "head": 15,
        "last:2": 15 + 16,
        "head, norm": 15 + 32,
        "*.bias": 4 + 4 + 4 + 4 + 3,
    }
    for private, size in sizes.items():
        state = FedPer(private=private).agent_init(objective, {})
        assert state["private"].shape == (size,)
    with pytest.raises(InputError, match=r"part = 'conv\*': no parameter"):
        FedPer(private="head, conv*").agent_init(objective, {})


def test_epochs_of_a_newcomer_are_counted():
    algorithm, objective = FedPer(local_epochs=2, **PLAIN), Objective(MLP)
    source = DATA.batches(2, 0, "evaluate")
    received = to_send(algorithm, initial_server(algorithm, objective, objective.initial()))
    context = AgentContext(0, 6, 0, objective, source, source.samples)
    personal = algorithm.personal_model(context, received, None)
    assert personal.cost == Cost(2 * 3) and algorithm.combines is None


def test_babus_personal_model_is_the_global_one_fine_tuned():
    """So a bundle of it may be fine-tuned by anyone."""
    assert FedBABU.personal_model is Algorithm.personal_model
    assert FedBABU.fine_tune is Algorithm.fine_tune and FedBABU.notes.shown_steps is None
    algorithm, objective = FedBABU(**PLAIN), Objective(MLP)
    received = to_send(algorithm, initial_server(algorithm, objective, objective.initial()))
    assert torch.equal(algorithm.shipped(objective, received).model, objective.initial())
    assert FedPer(**PLAIN).shipped(objective, received) is None
