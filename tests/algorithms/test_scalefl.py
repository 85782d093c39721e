"""ScaleFL: sub-networks against networks that are built narrow, its loss and its means by hand."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flower.app.in_memory import agents_data, federate, federation_of, plan_of
from nufed import InputError, Objective, fedavg
from nufed.algorithms import AgentUpdate, ScaleFL
from nufed.algorithms.aggregation import Mean, Median
from nufed.algorithms.local_optimizer import SGD
from nufed.algorithms.scalefl import CapacityLevels, first_exits, first_levels, narrowed
from nufed.evaluate import RESAMPLES, Measure
from nufed.models import MultiExit, multi_exit
from nufed.objective.parts import Part
from nufed.server import to_send
from nufed.simulation import DirectEngine, WorkerEngine, train
from nufed.simulation.batched_engine import StackedBatches
from nufed.simulation.gram_engine import IndexedBatches
from support import agent_context, context, federation, mlp, same, states_of

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.2}
LEVELS = {"widths": "0.5, 0.75, 1", "depths": "1, 2, 3", "shares": "1, 1, 1"}
LOSS = {"distill_weight": 0.7, "temperature": 2.5}
FULL = {"widths": "1", "depths": "3", "shares": "1"}
HIDDEN = (7, 6, 5)
UNITS = {0: [4], 1: [6, 5], 2: [7, 6, 5]}  # of the hidden layers of each level, counted by hand
LEVEL_OF = [0, 1, 0, 2, 0, 1]  # 0, ½, ¼, ¾, ⅛, ⅝ in thirds
ACTS = {"tanh": torch.tanh, "softplus": F.softplus}  # softplus(0) is not 0


def net(activation="tanh"):
    torch.manual_seed(2)
    return multi_exit((5,), 3, HIDDEN, activation).double()


def made(cls, **other):
    return cls(**{**SHARED, **LEVELS, **LOSS, **other})


def history(algorithm, objective, rounds=3, participation=0.5, kind=DirectEngine):
    engine = kind(objective, federation(), 5)
    w = objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=participation))


# what the expected values come from: networks cut out by hand, and the loss as the docstring has it


def cut(w, units, activation="tanh"):
    """The parameters of the narrow and shallow network of so many units, cut out of w."""
    whole = net(activation)
    vector_to_parameters(w, whole.parameters())
    stages, exits, before = [], [], 5
    for number, k in enumerate(units):
        layer, leave = whole.stages[number][1], whole.exits[number]
        stages.append([layer.weight.detach()[:k, :before].clone(), layer.bias.detach()[:k].clone()])
        exits.append([leave.weight.detach()[:, :k].clone(), leave.bias.detach().clone()])
        before = k
    return [*stages, *exits]


def put(w, parts, units, activation="tanh"):
    """w with the parameters of the narrow network at their places."""
    whole = net(activation)
    vector_to_parameters(w.clone(), whole.parameters())
    before = 5
    with torch.no_grad():
        for number, k in enumerate(units):
            layer, leave = whole.stages[number][1], whole.exits[number]
            (weight, bias), (out, offset) = parts[number], parts[len(units) + number]
            layer.weight[:k, :before], layer.bias[:k] = weight, bias
            leave.weight[:, :k], leave.bias[:] = out, offset
            before = k
    return parameters_to_vector(whole.parameters()).detach()


def mask(units):
    """The coordinates of the narrow network, as a mask."""
    return _mask(tuple(units))


@cache
def _mask(units):
    zeros = torch.zeros(Objective(net()).size, dtype=torch.float64)
    ones = [[torch.ones_like(t) for t in part] for part in cut(zeros, units)]
    return put(zeros, ones, units) == 1


def outputs(parts, x, activation="tanh"):
    """The outputs of all exits of a narrow network."""
    depth, found = len(parts) // 2, []
    for (weight, bias), (out, offset) in zip(parts[:depth], parts[depth:], strict=True):
        x = ACTS[activation](x @ weight.T + bias)
        found.append(x @ out.T + offset)
    return found


def loss_by_hand(z, y, a=1.0, gamma=0.7, t=2.5):
    """f of the docstring, from probabilities."""
    depth = len(z)
    value = depth * -z[-1].log_softmax(1)[range(len(y)), y].mean()
    target = (z[-1] / t).softmax(1).detach()
    for j, own in enumerate(z[:-1], 1):
        value = value + j * a * -own.log_softmax(1)[range(len(y)), y].mean()
        each = (target * (target.log() - (own / t).softmax(1).log())).sum(1)
        value = value + j * gamma * t * t * each.mean()
    return value / (depth + a * sum(range(1, depth)))


def steps_by_hand(parts, batches, lr, activation="tanh", a=1.0):
    """The narrow network after one step of plain gradient descent per batch."""
    for batch in batches:
        leaves = [t.requires_grad_() for part in parts for t in part]
        z = outputs(parts, batch.inputs.double(), activation)
        grads = iter(torch.autograd.grad(loss_by_hand(z, batch.targets, a), leaves))
        parts = [[(t - lr * next(grads)).detach() for t in part] for part in parts]
    return parts


# the proofs


def check_full_capacity_is_fedavg_on_all_exits(cls):
    """With the same loss, to the bit, for any rounds and cohorts."""

    class AllExits(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            found = []
            for stage, leave in zip(self.net.stages, self.net.exits, strict=True):
                x = stage(x)
                found.append(leave(x))
            return found

    def loss(z, y):
        first, second, last = z
        target = F.log_softmax(last.detach() / 2.5, 1)
        parts = [(3 / 6, F.cross_entropy(last, y))]
        for j, own in ((1, first), (2, second)):
            parts.append((j / 6, F.cross_entropy(own, y)))
            kl = F.kl_div(F.log_softmax(own / 2.5, 1), target, reduction="none", log_target=True)
            parts.append((0.7 * j / 6, 6.25 * kl.sum(1).mean()))
        return sum(weight * value for weight, value in parts)

    found = history(made(cls, **FULL), Objective(net()), 4)
    right = history(fedavg(**SHARED), Objective(AllExits(), loss), 4)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.server["model"], other.server["model"])
    assert not torch.equal(found[0].server["model"], found[-1].server["model"])


def check_without_other_exits_it_is_plain_fedavg(cls):
    """Full capacity, a = γ = 0: to the bit, also after fine-tuning and with another rule."""
    for rule in (Mean(), Mean("samples"), Median()):
        none = {"exit_weight": 0.0, "distill_weight": 0.0, "aggregation": rule}
        algorithm, plain = made(cls, **FULL, **none), fedavg(**SHARED, aggregation=rule)
        found, right = (history(each, Objective(net()), 4) for each in (algorithm, plain))
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one.server["model"], other.server["model"])
        engine = DirectEngine(Objective(net()), federation(), 5)
        states = dict.fromkeys(range(6))
        scores = [
            engine.evaluate(a, {"model": p.server["model"]}, states, steps=3, measure=Measure("x"))
            for a, p in ((algorithm, found[-1]), (plain, right[-1]))
        ]
        assert scores[0] == scores[1]


def check_an_agent_trains_the_narrow_network(cls):
    """What it sends is what a network that is built narrow and shallow has learned."""
    for activation, a in product(ACTS, (1.0, 0.3)):
        objective = Objective(net(activation))
        w = objective.initial()
        for agent, level in enumerate(LEVEL_OF):
            source = federation().batches(agent, 5, "train", 4)
            own = agent_context(objective, source, round=4)
            algorithm = made(cls, exit_weight=a)
            found = algorithm.agent_update(own, {"model": w}, {}).vectors["model"]
            batches = [batch for t in range(3) for batch in source.draw("outer", 6, step=t)]
            parts = steps_by_hand(cut(w, UNITS[level], activation), batches, 0.1, activation, a)
            right = put(w, parts, UNITS[level], activation)
            torch.testing.assert_close(found, right, rtol=0, atol=1e-13)
            held = mask(UNITS[level])
            assert torch.equal(found[~held], w[~held]) and not (found == w)[held].any()


def check_distillation_leaves_the_last_exit_alone(cls):
    """The divergence has exactly no gradient at the classifier that it learns from."""
    objective = Objective(net())
    source = federation().batches(3, 5, "train", 1)
    w, (batch,) = objective.initial(), source.draw("outer", 6)
    grads = [
        made(cls, distill_weight=gamma).objective(objective, 3).grad(w, batch) for gamma in (0, 0.7)
    ]
    last, first = objective.part("exits.2.*"), objective.part("exits.0.*")
    assert torch.equal(last.take(grads[0]), last.take(grads[1]))
    assert not torch.equal(first.take(grads[0]), first.take(grads[1]))


def sent(agents, size):
    """Updates with other numbers everywhere, far larger ones where the agent holds nothing."""
    generator = torch.Generator().manual_seed(3)
    for agent in agents:
        y = torch.randn(size, generator=generator, dtype=torch.float64)
        wrong = 1e6 * torch.ones_like(y)
        y = torch.where(mask(UNITS[LEVEL_OF[agent]]), y, wrong)
        yield AgentUpdate(agent, 1, 10 + agent, {"model": y})


def check_slices_are_means_of_their_holders(cls):
    """Each coordinate, one by one; those that nobody holds keep their bits."""
    objective = Objective(net())
    for rule, weights in ((Mean(), [1] * 6), (Mean("samples"), range(10, 16))):
        algorithm = made(cls, aggregation=rule)
        for agents in ([0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4], [0, 4], [2]):
            server = algorithm.server_init(objective, objective.initial())
            updates = list(sent(agents, objective.size))
            after = algorithm.server_update(context(), server, updates)["model"].tolist()
            masks = [mask(UNITS[LEVEL_OF[agent]]).tolist() for agent in agents]
            values = [update.vectors["model"].tolist() for update in updates]
            for c, (before, found) in enumerate(zip(server["model"].tolist(), after, strict=True)):
                holders = [i for i, own in enumerate(masks) if own[c]]
                if not holders:
                    assert found == before
                    continue
                total = sum(weights[agents[i]] for i in holders)
                mean = sum(weights[agents[i]] * values[i][c] for i in holders) / total
                assert math.isclose(found, mean, rel_tol=1e-12, abs_tol=1e-14)


def check_what_nobody_holds_keeps_its_bits(cls):
    """Without agents of the largest level, in training; everything else moves."""
    found = history(made(cls, shares="1, 1, 0"), Objective(net()), 4, participation=1.0)
    start, end = found[0].server["model"], found[-1].server["model"]
    held = mask(UNITS[0]) | mask(UNITS[1])
    assert torch.equal(start[~held], end[~held]) and not (start == end)[held].any()


def check_the_personal_model_is_the_own_subnetwork(cls):
    """Its answer is that of the narrow network's last exit, fine-tuned as that network would be."""
    objective, data, algorithm = Objective(net()), federation(), made(cls)
    received = {"model": objective.initial()}
    for agent, level in enumerate(LEVEL_OF):
        own = agent_context(objective, data.batches(agent, 5, "evaluate"), round=0)
        x, _ = data.scored(agent)
        personal = algorithm.personal_model(own, received, None)
        assert personal.cost.gradients == 0
        models = list(algorithm.fine_tune(own, received, personal.tensors, 2, 0.5))
        parts = cut(received["model"], UNITS[level])
        drawn = own.batches.draw("adapt", 6, 2)
        for steps, model in enumerate(models):
            assert not model["model"][~mask(UNITS[level])].any()
            right = outputs(steps_by_hand(parts, drawn[:steps], 0.1), x.double())[-1].detach()
            answer = algorithm.predict(objective, model, x)
            torch.testing.assert_close(answer, right, rtol=0, atol=1e-13)


def check_levels_never_change(cls):
    """An agent holds the same coordinates in all rounds, at evaluation, and for the server."""
    objective, data, algorithm = Objective(net()), federation(), made(cls)
    for agent, level in enumerate(LEVEL_OF):
        for use, round in (("train", 1), ("train", 2), ("train", 9), ("evaluate", 0)):
            own = agent_context(objective, data.batches(agent, 5, use, round), round=round)
            depth, held = algorithm.subnetwork(own)
            assert depth == len(UNITS[level]) and torch.equal(held, mask(UNITS[level]))


PROOFS = [
    check_full_capacity_is_fedavg_on_all_exits,
    check_without_other_exits_it_is_plain_fedavg,
    check_an_agent_trains_the_narrow_network,
    check_distillation_leaves_the_last_exit_alone,
    check_slices_are_means_of_their_holders,
    check_what_nobody_holds_keeps_its_bits,
    check_the_personal_model_is_the_own_subnetwork,
    check_levels_never_change,
]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.__name__)
def test_proof(proof):
    proof(ScaleFL)


# wrong implementations


def by_units(units):
    """The first level of each coordinate, from units by level."""
    found = torch.full((Objective(net()).size,), 2, dtype=torch.int8)
    for level in (1, 0):
        found[mask(units[level])] = level
    return found


class MeanOverTheCohort(ScaleFL):
    """Also averages what an agent does not hold."""

    def server_update(self, context, server, updates):
        model = self.aggregation.combine(updates, "model", server["model"])
        return {**server, "model": model}


class DividesByTheCohort(ScaleFL):
    def server_update(self, context, server, updates):
        held = [server["levels"] <= self.levels.of(u.agent) for u in updates]
        total = sum(
            torch.where(h, u.vectors["model"], 0) for h, u in zip(held, updates, strict=True)
        )
        nobody = ~torch.stack(held).any(0)
        return {**server, "model": torch.where(nobody, server["model"], total / len(updates))}


class ZeroWhereNobodyHolds(ScaleFL):
    def server_update(self, context, server, updates):
        after = super().server_update(context, server, updates)
        most = max(self.levels.of(update.agent) for update in updates)
        return {**after, "model": torch.where(server["levels"] <= most, after["model"], 0)}


class Unweighted(ScaleFL):
    """Ignores the rule of aggregation."""

    def server_update(self, context, server, updates):
        return super().server_update(context, server, [replace(u, samples=1) for u in updates])


class WholeForward(ScaleFL):
    """Coordinates that are not held take part in the forward pass."""

    def agent_update(self, context, received, state):
        w, (depth, held) = received["model"], self.subnetwork(context)
        own = replace(context, objective=self.objective(context.objective, depth))
        gradient = own.objective.grad
        y = self.descend(own, w, lambda w, batch: torch.where(held, gradient(w, batch), 0))
        result = super().agent_update(context, received, state)
        return replace(result, vectors={"model": y})


class TrainsEverything(ScaleFL):
    """Steps leave the sub-network."""

    def agent_update(self, context, received, state):
        w, (depth, held) = received["model"], self.subnetwork(context)
        own = replace(context, objective=self.objective(context.objective, depth))
        y = self.descend(own, torch.where(held, w, 0))
        result = super().agent_update(context, received, state)
        return replace(result, vectors={"model": torch.where(held, y, w)})


class SendsZeros(ScaleFL):
    """What is not held comes back as 0."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        _, held = self.subnetwork(context)
        return replace(result, vectors={"model": torch.where(held, result.vectors["model"], 0)})


class Scaled(ScaleFL):
    """Divides the weights of narrow networks by their width."""

    def agent_update(self, context, received, state):
        width = float(self.levels.widths[self.levels.of(context.agent)])
        return super().agent_update(context, {"model": received["model"] / width}, state)


class OtherLevels(ScaleFL):
    """Trains the sub-networks of other levels."""

    def narrow(self, context):
        base, level = context.objective.base, self.levels.of(context.agent)
        widths, depths = self.others(self.levels.widths, self.levels.depths)
        loss = partial(self.exits_loss, base.loss)
        part = Part.where(first_levels(base, widths, depths) <= level)
        return narrowed(base, widths[level], depths[level], loss), part


class RoundsDown(OtherLevels):
    def others(self, widths, depths):
        return [Fraction(int(5 * width), 5) for width in widths], depths

    def first_levels(self, objective):
        return by_units({0: [3], 1: [5, 4]})


class WholeWidth(OtherLevels):
    def others(self, widths, depths):
        return [Fraction(1)] * len(widths), depths

    def first_levels(self, objective):
        ones = [Fraction(1)] * len(self.levels.widths)
        return first_levels(objective.base, ones, self.levels.depths)


class WholeDepth(OtherLevels):
    """Narrow, but with all exits."""

    def others(self, widths, depths):
        return widths, [depths[-1]] * len(depths)

    def subnetwork(self, context):
        _, held = super().subnetwork(context)
        return self.levels.depths[-1], held


class LevelOfTheRound(ScaleFL):
    def subnetwork(self, context):
        level = (self.levels.of(context.agent) + context.round) % len(self.levels.widths)
        return self.levels.depths[level], self.first_levels(context.objective) <= level


class NoDistillation(ScaleFL):
    def distillation(self, outputs, targets):
        return 0 * super().distillation(outputs, targets)


class MeanOverClasses(ScaleFL):
    def distillation(self, outputs, targets):
        return super().distillation(outputs, targets) / outputs.shape[2]


class WithoutSquare(ScaleFL):
    def distillation(self, outputs, targets):
        return super().distillation(outputs, targets) / self.temperature**2


class WithoutTemperature(ScaleFL):
    def distillation(self, outputs, targets):
        return super().distillation(outputs * self.temperature, targets)


class GradientIntoTeacher(ScaleFL):
    def distillation(self, outputs, targets):
        t, (*earlier, last) = self.temperature, outputs
        teacher = F.softmax(last / t, 1)
        each = [F.kl_div(F.log_softmax(z / t, 1), teacher, reduction="batchmean") for z in earlier]
        return t * t * torch.stack(each)


class Reversed(ScaleFL):
    """KL(p_j ‖ p_d)."""

    def distillation(self, outputs, targets):
        p = (outputs / self.temperature).softmax(2)
        each = p[:-1] * (p[:-1].log() - p[-1].detach().log())
        return self.temperature**2 * each.sum(2).mean(1)


class FromTheNextExit(ScaleFL):
    """Each exit learns from the one behind it, not from the last."""

    def distillation(self, outputs, targets):
        pairs = [super(FromTheNextExit, self).distillation(torch.stack(pair), targets)
                 for pair in pairwise(outputs)]  # fmt: skip
        return torch.cat(pairs)


class EqualExits(ScaleFL):
    """All exits weigh the same."""

    def exits_loss(self, loss, outputs, targets):
        *earlier, last = outputs
        value = loss(last, targets) + self.exit_weight * sum(loss(z, targets) for z in earlier)
        if earlier and self.distill_weight:
            value = value + self.distill_weight * self.distillation(outputs, targets).sum()
        return value / (1 + self.exit_weight * len(earlier))


class ExitsScaleDistillation(ScaleFL):
    """a·γ in place of γ."""

    def agent_update(self, context, received, state):
        scaled = replace(self, distill_weight=self.exit_weight * self.distill_weight)
        return ScaleFL.agent_update(scaled, context, received, state)


class NotDivided(ScaleFL):
    def exits_loss(self, loss, outputs, targets):
        total = len(outputs) + self.exit_weight * sum(range(len(outputs)))
        return total * super().exits_loss(loss, outputs, targets)


class LastExitOnly(ScaleFL):
    def exits_loss(self, loss, outputs, targets):
        return loss(outputs[-1], targets)


class ShareOfLoss(ScaleFL):
    """(1 − γ)·ℓ at earlier exits."""

    def exits_loss(self, loss, outputs, targets):
        value = super().exits_loss(loss, outputs, targets)
        total = sum(range(1, len(outputs) + 1))
        for j, z in enumerate(outputs[:-1], 1):
            value = value - self.distill_weight * j / total * loss(z, targets)
        return value


class MeanOfExits(ScaleFL):
    def predict(self, objective, personal, inputs):
        exits = first_exits(objective.base, int(personal["exit"]))
        return exits.predict(personal["model"], inputs).mean(0)


class LastOfAll(ScaleFL):
    """Answers with the exit of the whole network."""

    def predict(self, objective, personal, inputs):
        return objective.predict(personal["model"], inputs)


class WholePersonal(ScaleFL):
    """Uses the global model, at the agent's exit."""

    def personal_model(self, context, received, state):
        own = super().personal_model(context, received, state)
        return replace(own, tensors={**own.tensors, "model": received["model"]})


class TunesThePlainLoss(ScaleFL):
    """Fine-tunes by the loss of the whole network's last exit."""

    def fine_tune(self, context, received, personal, steps, scale=1.0):
        return super(ScaleFL, self).fine_tune(context, received, personal, steps, scale)


class IgnoresTheScale(ScaleFL):
    def fine_tune(self, context, received, personal, steps, scale=1.0):
        return super().fine_tune(context, received, personal, steps)


MUTANTS = [
    (ExitsScaleDistillation, check_an_agent_trains_the_narrow_network),
    (MeanOverTheCohort, check_slices_are_means_of_their_holders),
    (DividesByTheCohort, check_slices_are_means_of_their_holders),
    (ZeroWhereNobodyHolds, check_slices_are_means_of_their_holders),
    (ZeroWhereNobodyHolds, check_what_nobody_holds_keeps_its_bits),
    (Unweighted, check_slices_are_means_of_their_holders),
    (WholeForward, check_an_agent_trains_the_narrow_network),
    (TrainsEverything, check_an_agent_trains_the_narrow_network),
    (SendsZeros, check_an_agent_trains_the_narrow_network),
    (Scaled, check_an_agent_trains_the_narrow_network),
    (RoundsDown, check_an_agent_trains_the_narrow_network),
    (RoundsDown, check_slices_are_means_of_their_holders),
    (WholeWidth, check_an_agent_trains_the_narrow_network),
    (WholeWidth, check_levels_never_change),
    (WholeDepth, check_an_agent_trains_the_narrow_network),
    (WholeDepth, check_the_personal_model_is_the_own_subnetwork),
    (LevelOfTheRound, check_levels_never_change),
    (NoDistillation, check_an_agent_trains_the_narrow_network),
    (NoDistillation, check_full_capacity_is_fedavg_on_all_exits),
    (MeanOverClasses, check_an_agent_trains_the_narrow_network),
    (MeanOverClasses, check_full_capacity_is_fedavg_on_all_exits),
    (WithoutSquare, check_an_agent_trains_the_narrow_network),
    (WithoutTemperature, check_an_agent_trains_the_narrow_network),
    (GradientIntoTeacher, check_an_agent_trains_the_narrow_network),
    (GradientIntoTeacher, check_distillation_leaves_the_last_exit_alone),
    (Reversed, check_an_agent_trains_the_narrow_network),
    (FromTheNextExit, check_an_agent_trains_the_narrow_network),
    (EqualExits, check_an_agent_trains_the_narrow_network),
    (NotDivided, check_an_agent_trains_the_narrow_network),
    (NotDivided, check_without_other_exits_it_is_plain_fedavg),
    (LastExitOnly, check_an_agent_trains_the_narrow_network),
    (ShareOfLoss, check_an_agent_trains_the_narrow_network),
    (MeanOfExits, check_the_personal_model_is_the_own_subnetwork),
    (LastOfAll, check_the_personal_model_is_the_own_subnetwork),
    (WholePersonal, check_the_personal_model_is_the_own_subnetwork),
    (TunesThePlainLoss, check_the_personal_model_is_the_own_subnetwork),
    (IgnoresTheScale, check_the_personal_model_is_the_own_subnetwork),
]


@pytest.mark.parametrize("mutant, proof", MUTANTS, ids=lambda each: each.__name__)
def test_a_wrong_copy_is_rejected(mutant, proof):
    with pytest.raises(AssertionError):
        proof(mutant)


# around it


def evaluate(algorithm, engine, progress):
    received, states = to_send(algorithm, progress.server), states_of(engine, progress)
    return engine.evaluate(
        algorithm, received, states, steps=2, measure=Measure("accuracy", resamples=RESAMPLES)
    )


def test_workers_and_resuming_give_the_same_bits():
    algorithm = made(ScaleFL)
    engine = DirectEngine(Objective(net()), federation(unseen=1), 5)
    w, more = engine.objective.initial(), {"participation": 0.6}
    right = list(train(algorithm, engine, w, rounds=4, **more))
    with WorkerEngine(engine, 2) as workers:
        spread = list(train(algorithm, workers, w, rounds=4, **more))
        assert evaluate(algorithm, workers, spread[-1]) == evaluate(algorithm, engine, right[-1])
    resumed = list(train(algorithm, engine, w, rounds=4, start=right[2], **more))
    for other in (spread, resumed):
        assert same(other[-1].server, right[-1].server)


def test_on_flower_it_gives_the_bits_of_the_direct_engine():
    algorithm, data = made(ScaleFL), agents_data(5)
    plan = plan_of(algorithm, agents=5, rounds=3, participation=0.5, unseen_agents=1)
    plan = replace(plan, objective=Objective(net()))
    direct = DirectEngine(plan.objective, federation_of(data, plan.seed, 1), plan.seed)
    w = plan.objective.initial()
    right = list(train(algorithm, direct, w, rounds=3, participation=0.5))
    rounds, outcome, _ = federate(plan, data)
    for one, other in zip(rounds, right, strict=True):
        assert same(one.server, other.server)
    assert outcome.scores == evaluate(algorithm, direct, right[-1]) and not outcome.missing


@pytest.mark.parametrize("epochs", [0, 2])
def test_the_optimiser_stays_within_the_coordinates(epochs):
    """Momentum, weight decay and clipping by the norm of the sub-network's gradient."""
    own = SGD(momentum=0.5, weight_decay=0.1, clip_norm=0.2)
    algorithm = made(ScaleFL, optimizer=own, local_epochs=epochs)
    objective = Objective(net("softplus"))
    source = federation().batches(1, 5, "train", 1)
    w, held = objective.initial(), mask(UNITS[1])
    found = algorithm.agent_update(
        replace(agent_context(objective, source), samples=source.samples), {"model": w}, {}
    )
    y, momentum = torch.where(held, w, 0), 0
    drawn = [b for t in range(3) for b in source.draw("outer", 6, step=t)]
    epoch = [b for number in range(epochs) for b in source.epoch("outer", 6, number)]
    for batch in epoch or drawn:
        parts = steps_by_hand(cut(y, UNITS[1], "softplus"), [batch], 1.0, "softplus")
        g = y - put(y, parts, UNITS[1], "softplus")
        g = g * min(1.0, 0.2 / float(g.norm())) + 0.1 * y
        momentum = 0.5 * momentum + g
        y = y - 0.1 * momentum
    right = torch.where(held, y, w)
    torch.testing.assert_close(found.vectors["model"], right, rtol=0, atol=1e-12)
    assert found.cost.gradients == len(epoch or drawn)


def test_a_narrow_agent_of_a_wide_network_is_a_full_agent_of_the_narrow_one():
    """Also with tracked statistics of BatchNorm, in stages and exits."""

    def normed(first, second):
        stages = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Softplus())
                  for a, b in ((5, first), (first, second))]  # fmt: skip
        exits = [nn.Sequential(nn.BatchNorm1d(k), nn.Linear(k, 3)) for k in (first, second)]
        return Objective(MultiExit(stages, exits).double(), running_stats="tracked")

    torch.manual_seed(0)
    wide, narrow = normed(7, 4), normed(4, 2)
    own = made(ScaleFL, widths="0.5, 1", depths="2, 2", shares="1, 1")
    full = replace(own, widths="1", depths="2", shares="1")
    data = federation()
    w = torch.rand(wide.size, dtype=torch.float64) + 0.5
    held = first_levels(wide, own.levels.widths, [2, 2]) == 0
    assert int(held.sum()) == narrow.size and wide.tracks_statistics
    source, test = data.batches(2, 5, "train", 1), data.batches(2, 5, "evaluate")
    found, right = (
        algorithm.agent_update(agent_context(objective, source), {"model": v}, {}).vectors["model"]
        for algorithm, objective, v in ((own, wide, w), (full, narrow, w[held]))
    )
    torch.testing.assert_close(found[held], right, rtol=0, atol=1e-12)
    assert torch.equal(found[~held], w[~held]) and not (found == w)[held].all()
    (x, _), answers = data.scored(2), []
    for algorithm, objective, v in ((own, wide, w), (full, narrow, w[held])):
        context = agent_context(objective, test, round=0)
        personal = algorithm.personal_model(context, {"model": v}, None)
        models = list(algorithm.fine_tune(context, {"model": v}, personal.tensors, 2))
        answers.append([algorithm.predict(objective, model, x) for model in models])
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_float32_and_other_losses():
    objective = Objective(multi_exit((5,), 1, (4, 3)), F.mse_loss)
    algorithm = ScaleFL("0.5, 1", "1, 2", "1, 1", distill_weight=0.0, **SHARED)
    source = federation().batches(0, 5, "train", 1)

    class Regression:
        agent = 0

        def draw(self, *draw, step):
            return [b._replace(targets=b.inputs[:, :1]) for b in source.draw(*draw, step=step)]

    own = agent_context(objective, Regression())
    w = objective.initial()
    y = algorithm.agent_update(own, {"model": w}, {}).vectors["model"]
    assert y.dtype == torch.float32 and not torch.equal(y, w)
    distilling = replace(algorithm, distill_weight=0.1, shares="0, 1")
    with pytest.raises(InputError, match="distillation needs an output for each class"):
        distilling.agent_update(own, {"model": w}, {})


@dataclass
class Misuse:
    settings: dict
    says: str


MISUSES = [
    Misuse({"widths": "0.5, x"}, "widths = '0.5, x': must be numbers, 0 or more, separated by"),
    Misuse({"widths": ""}, "widths = '': must be numbers"),
    Misuse({"shares": "1e9, 1, 1"}, "shares = '1e9, 1, 1': must be numbers"),
    Misuse({"depths": "1, 2"}, "depths = '1, 2': must have one number for each of the 3 levels"),
    Misuse(
        {"widths": "0.5, 0.4, 1"}, "widths = '0.5, 0.4, 1': must be above 0, in ascending order"
    ),
    Misuse({"widths": "0, 0.4, 1"}, "must be above 0, in ascending order, and end with 1"),
    Misuse({"widths": "0.5, 0.6, 0.9"}, "must be above 0, in ascending order, and end with 1"),
    Misuse({"depths": "0, 1, 3"}, "depths = '0, 1, 3': must be whole numbers, 1 or more"),
    Misuse({"depths": "1, 1.5, 3"}, "must be whole numbers, 1 or more, in ascending order"),
    Misuse({"depths": "2, 1, 3"}, "must be whole numbers, 1 or more, in ascending order"),
    Misuse({"shares": "0, 0, 0"}, "shares = '0, 0, 0': must not all be 0"),
    Misuse({"temperature": 0.0}, "temperature = 0.0: must be a finite number, above 0"),
]


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: str(misuse.settings))
def test_wrong_settings_get_one_sentence(misuse):
    with pytest.raises(InputError) as error:
        made(ScaleFL, **misuse.settings)
    assert misuse.says in str(error.value) and "\n" not in str(error.value)


def test_depths_that_the_model_lacks_get_one_sentence():
    """Without any, levels share its exits out; a model without exits has widths alone."""
    for module, says in ((mlp(), "the model has 1 exit,"), (net(), "the model has 3 exits,")):
        objective = Objective(module)
        with pytest.raises(InputError) as error:
            ScaleFL(depths="1, 2, 3, 4", **SHARED).server_init(objective, objective.initial())
        assert f"depths = '1, 2, 3, 4': {says} which the last level must reach" in str(error.value)
    plain = Objective(mlp())
    for depths in ("1, 1, 1", "auto"):
        narrow = made(ScaleFL, depths=depths)
        assert narrow.server_init(plain, plain.initial())["levels"].unique().tolist() == [0, 1, 2]
    exits, by_hand = Objective(net()), made(ScaleFL, depths="1, 2, 3")
    auto = made(ScaleFL, depths="auto").server_init(exits, exits.initial())["levels"]
    assert torch.equal(auto, by_hand.server_init(exits, exits.initial())["levels"])


@pytest.mark.parametrize("shares", ["1, 1, 1, 1", "5, 3, 2", "0, 1, 3", "1", "0.2, 0.8, 0"])
def test_levels_have_their_shares(shares):
    """Any run of consecutive agents, to within a few of them."""
    numbers = [float(part) for part in shares.split(",")]
    ones, depths = ", ".join(["1"] * len(numbers)), ", ".join(["1"] * len(numbers))
    levels = CapacityLevels.read(ones, depths, shares)
    for first, count in ((0, 10), (0, 100), (37, 50), (1000, 64)):
        found = [levels.of(agent) for agent in range(first, first + count)]
        for level, share in enumerate(numbers):
            right = count * share / sum(numbers)
            assert abs(found.count(level) - right) < (3 if share else 1)


def test_contexts_know_the_number_of_the_agent():
    data, objective = federation(), Objective(mlp())
    sources = [data.batches(agent, 5, "train", 1) for agent in (4, 2)]
    assert agent_context(objective, sources[0]).agent == 4
    for stacked in (StackedBatches(sources), IndexedBatches.make(sources, [])):
        assert agent_context(objective, stacked).agent.tolist() == [[4], [2]]
    drawn = IndexedBatches.make(sources, ScaleFL(**SHARED).update_draws())
    assert drawn.agent.tolist() == [[4], [2]]


def test_the_answer_of_a_multi_exit_model_is_its_last_exit():
    module = net()
    assert isinstance(module, MultiExit) and len(module.exits) == 3
    x = torch.randn(4, 5, dtype=torch.float64)
    w = parameters_to_vector(module.parameters()).detach()
    last = outputs(cut(w, HIDDEN), x)[-1]
    torch.testing.assert_close(module(x), last, rtol=0, atol=1e-14)
    with pytest.raises(InputError, match="hidden = \\(\\): must have at least one layer"):
        multi_exit((5,), 3, ())
