"""ANIL: gMeta whose step sizes are 0 outside the head, in training and at use."""

from dataclasses import replace

import pytest
import torch

from nufed import Exact, FirstOrder, HessianFree, Objective, gmeta
from nufed.algorithms import ANIL
from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.partial import divide
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import agent_context, federation, mlp, same, tied

SHARED = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_steps": 2}
CURVATURES = (Exact(), FirstOrder(), HessianFree())


def history(algorithm, engine, rounds=3):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def both_histories(one, other, kind=DirectEngine, module=mlp):
    engine = kind(Objective(module()), federation(), 5)
    return zip(history(one, engine), history(other, engine), strict=True)


def fine_tuned(algorithm, objective, w, steps=2):
    """The model after fine-tuning at use, and the batches of it."""
    own = agent_context(objective, federation().batches(2, 0, "evaluate"))
    received = {"model": w}
    personal = algorithm.personal_model(own, received, None).tensors
    *_, tuned = algorithm.fine_tune(own, received, personal, steps)
    return tuned["model"], own.batches.draw("adapt", 6, steps)


def check_everything_is_gmeta(cls):
    """With a vector of equal step sizes to the bit, with a number to rounding; also at use."""
    size = Objective(mlp()).size
    vector = torch.full((size,), 0.2, dtype=torch.float64)
    for curvature in CURVATURES:
        shared = {**SHARED, "curvature": curvature}
        one = cls(adapted="all", adapt_lr=0.2, **shared)
        for other, bits in (
            (gmeta(adapt_lr=vector, **shared), True),
            (gmeta(adapt_lr=0.2, **shared), False),
        ):
            for a, b in both_histories(one, other):
                if bits:
                    assert same(a.server, b.server)
                else:
                    torch.testing.assert_close(
                        a.server["model"], b.server["model"], rtol=0, atol=1e-9
                    )
            objective = Objective(mlp())
            w = objective.initial()
            models = [fine_tuned(each, objective, w)[0] for each in (one, other)]
            torch.testing.assert_close(*models, rtol=0, atol=0 if bits else 1e-14)


def check_nothing_is_gmeta_with_step_size_0(cls):
    """To the bit; fine-tuning at use changes nothing."""
    for curvature in CURVATURES:
        shared = {**SHARED, "curvature": curvature}
        one, other = cls(adapted="none", adapt_lr=0.2, **shared), gmeta(adapt_lr=0.0, **shared)
        for a, b in both_histories(one, other):
            assert same(a.server, b.server)
        objective = Objective(mlp())
        assert torch.equal(fine_tuned(one, objective, objective.initial())[0], objective.initial())


def check_the_update_is_unrolled_autograd(cls):
    """One local update on whole training parts, where all batches of an update are the same."""
    objective, data = Objective(mlp()), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    algorithm = cls(adapt_lr=0.4, **{**SHARED, "batch_size": 18, "local_steps": 1})
    w = objective.initial().requires_grad_()
    mask, batch, model = torch.zeros(66, dtype=torch.float64), own.batches.whole(), w
    mask[42:] = 1  # 5·7 + 7 numbers of the first layer come before the head's 7·3 + 3
    for _ in range(2):
        (g,) = torch.autograd.grad(objective.forward(model, batch), model, create_graph=True)
        model = model - 0.4 * mask * g
    (by_w,) = torch.autograd.grad(objective.forward(model, batch), w)
    after = algorithm.agent_update(own, {"model": w.detach()}, {}).vectors["model"]
    torch.testing.assert_close((w.detach() - after) / 0.1, by_w, rtol=0, atol=1e-11)
    assert float(by_w[:42].norm()) > 0.01


def check_use_fine_tunes_the_head_alone(cls):
    """By plain steps; the body keeps its bits."""
    objective = Objective(mlp())
    w = objective.initial()
    found, batches = fine_tuned(cls(adapt_lr=0.2, **SHARED), objective, w)
    right = w.clone()
    for batch in batches:
        right[42:] = right[42:] - 0.2 * objective.grad(right, batch)[42:]
    assert torch.equal(found[:42], w[:42])
    torch.testing.assert_close(found, right, rtol=0, atol=1e-14)


CHECKS = (
    check_everything_is_gmeta,
    check_nothing_is_gmeta_with_step_size_0,
    check_the_update_is_unrolled_autograd,
    check_use_fine_tunes_the_head_alone,
)


@pytest.mark.parametrize("check", CHECKS)
def test_proof(check):
    check(ANIL)


@pytest.mark.parametrize("rates_lr", [0.0, 0.5])
def test_stacked_agents_and_tied_weights(rates_lr):
    algorithm = ANIL(adapt_lr=0.2, rates_lr=rates_lr, **SHARED)
    for module in (mlp, tied):
        torch.manual_seed(0)
        objective = Objective(module())
        kinds = DirectEngine, BatchedEngine
        both = [history(algorithm, kind(objective, federation(), 5)) for kind in kinds]
        for a, b in zip(*both, strict=True):
            for name in a.server:
                torch.testing.assert_close(a.server[name], b.server[name], rtol=1e-9, atol=1e-12)


def test_learned_rates_of_the_body_stay_where_they_are():
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    rounds = history(ANIL(adapt_lr=0.2, rates_lr=0.5, **SHARED), engine)
    first, last = (p.server["log_rates"] for p in (rounds[0], rounds[-1]))
    torch.testing.assert_close(first[:2], last[:2], rtol=1e-15, atol=0)
    assert bool((first[2:] != last[2:]).all())


def test_a_part_by_its_name_and_one_that_is_not_there():
    objective = Objective(mlp())
    rate = ANIL(adapt_lr=0.2, adapted="0.*").rate(objective, {"model": objective.initial()})
    assert rate.tolist() == [0.2] * 42 + [0.0] * 24
    with pytest.raises(ValueError, match="part = 'classifier'"):
        ANIL(adapted="classifier").rate(objective, {"model": objective.initial()})


def test_bounds_do_not_cover_it():
    assert ANIL.notes.theory(ANIL()) is None and gmeta.notes.theory(gmeta()) is not None


# wrong implementations


class BodyFrozen(ANIL):
    """The outer update leaves the body alone as well."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        w, part = result.vectors["model"], context.objective.base.part(self.adapted)
        kept = part.put(received["model"], part.take(w))
        return replace(result, vectors={**result.vectors, "model": kept})


class WholeAtUse(ANIL):
    def fine_tune(self, context, received, personal, steps, scale=1.0):
        own = gmeta(adapt_lr=self.adapt_lr, batch_size=self.batch_size)
        return own.fine_tune(context, received, personal, steps, scale)


class HeadOnlyAtUse(ANIL):
    """Training is gMeta's."""

    def local_update(self, objective, vectors, batch, step):
        fields = {**SHARED, "batch_size": self.batch_size, "local_steps": self.local_steps}
        own = gmeta(adapt_lr=self.adapt_lr, curvature=self.curvature, **fields)
        return own.local_update(objective, vectors, batch, step)


class OtherPart(ANIL):
    """The body is fine-tuned and the head is not."""

    def rate(self, objective, received):
        return self.adapt_lr - super().rate(objective, received)

    def tuned_part(self, objective):
        return divide(objective.base, self.adapted)[1]


class WithoutTheBodysCurvature(ANIL):
    """The rows of the body are missing from I − α∇²f·diag(m)."""

    def local_update(self, objective, vectors, batch, step):
        part = objective.base.part(self.adapted)

        class Cut(Exact):
            def product(self, objective, w, batch, v, within=None):
                full = super().product(objective, w, batch, v, within)
                return part.put(torch.zeros_like(full), part.take(full))

        own = replace(ANIL(**SHARED), adapt_lr=self.adapt_lr, curvature=Cut())
        return own.local_update(objective, vectors, batch, step)


class WholeModel(GMeta):
    def __init__(self, adapted="head", **settings):
        super().__init__(**settings)


ALL, NONE, UNROLLED, USE = CHECKS
MUTANTS = {
    BodyFrozen: (NONE, UNROLLED),
    WholeAtUse: (NONE, USE),
    HeadOnlyAtUse: (NONE, UNROLLED),
    OtherPart: (ALL, NONE, UNROLLED, USE),
    WithoutTheBodysCurvature: (UNROLLED,),
    WholeModel: (NONE, UNROLLED, USE),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
