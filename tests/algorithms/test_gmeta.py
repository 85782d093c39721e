"""Algorithm 1 and its special cases against independent code."""

from dataclasses import fields, replace

import pytest
import torch

from nufed import Exact, FirstOrder, GMeta, HessianFree, InputError, Objective, fedavg, per_fedavg
from nufed.algorithms.aggregation import ClippedMean, Mean, Median
from nufed.algorithms.protocol import AgentUpdate
from nufed.meta.meta_gradient import MetaBatch
from nufed.seeding import stream
from nufed.simulation import DirectEngine, train
from support import agent_context, batches, context, federation, mlp, relative_error, tied

SETTINGS = {"adapt_lr": 0.4, "meta_lr": 0.2, "local_steps": 3, "batch_size": 7}


def final_model(algorithm, objective, data, rounds=4, seed=3):
    engine = DirectEngine(objective, data, seed)
    *_, last = train(algorithm, engine, objective.initial(), rounds=rounds, participation=0.5)
    return last.server["model"]


def test_without_adaptation_steps_it_is_fedavg_bit_for_bit():
    module, data = mlp(torch.float32), federation()
    objective = Objective(module)

    # FedAvg, written independently, as torch.optim.SGD steps
    w = torch.cat([p.detach().flatten() for p in module.parameters()])
    samples = data.samples
    for k in range(1, 5):
        locals_ = []
        for agent in sorted(stream(3, "cohort", k).choice(6, 3, replace=False)):
            model = w
            for t in range(3):
                rng = stream(3, "train/outer", k, int(agent), t)
                rows = data.split.train[agent][rng.choice(18, 7, replace=False)]
                torch.nn.utils.vector_to_parameters(model, module.parameters())
                loss = torch.nn.functional.cross_entropy(
                    module(samples.inputs[rows]), samples.targets[rows]
                )
                gradients = torch.autograd.grad(loss, list(module.parameters()))
                model = model.add(torch.cat([g.flatten() for g in gradients]), alpha=-0.2)
            locals_.append(model)
        w = (sum(model.double() for model in locals_) / len(locals_)).float()

    for algorithm in (fedavg(**SETTINGS), GMeta(0, curvature=Exact(), **SETTINGS)):
        assert torch.equal(final_model(algorithm, objective, data), w)


def test_fedavg_with_fine_tuning_is_fedavg_evaluated_after_steps():
    """Its personal model takes k plain steps, whose size training does not depend on."""
    objective, data = Objective(mlp()), federation()
    algorithm = fedavg(**SETTINGS)
    w = final_model(algorithm, objective, data)
    assert torch.equal(w, final_model(replace(algorithm, adapt_lr=9.0), objective, data))
    own = agent_context(objective, data.batches(2, seed=0, use="evaluate"))
    personal = algorithm.personal_model(own, {"model": w}, None)
    found = [each["model"] for each in algorithm.fine_tune(own, {"model": w}, personal.tensors, 3)]
    right = [w]
    for batch in own.batches.draw("adapt", SETTINGS["batch_size"], 3):
        right.append(right[-1] - SETTINGS["adapt_lr"] * objective.grad(right[-1], batch))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("curvature", "within"), [(Exact(), 1e-12), (FirstOrder(), 0), (HessianFree(1e-4), 1e-9)]
)
def test_one_step_equals_the_formula_of_per_fedavg(curvature, within):
    objective, data = Objective(mlp()), federation()
    alpha, beta = SETTINGS["adapt_lr"], SETTINGS["meta_lr"]
    algorithm = per_fedavg(curvature=curvature, **{**SETTINGS, "local_steps": 1})
    batches = data.batches(2, seed=0, use="train", round=1)
    w = objective.initial()
    own = agent_context(objective, batches)
    got = algorithm.agent_update(own, {"model": w}, {}).vectors["model"]

    (inner,), (outer,), (other,) = (batches.draw(p, 7) for p in ("adapt", "outer", "curvature"))
    d = objective.grad(w - alpha * objective.grad(w, inner), outer)
    if isinstance(curvature, Exact):
        hessian = torch.autograd.functional.hessian(lambda w: objective.forward(w, other), w)
        d = d - alpha * hessian @ d
    elif isinstance(curvature, HessianFree):
        ahead, behind = objective.grad(w + 1e-4 * d, other), objective.grad(w - 1e-4 * d, other)
        d = d - alpha * (ahead - behind) / 2e-4
    assert relative_error(w - got, beta * d) <= within + 1e-14


def test_names_are_settings_of_one_algorithm():
    def settings(algorithm):
        return {field.name: getattr(algorithm, field.name) for field in fields(GMeta)}

    assert settings(fedavg(**SETTINGS)) == settings(GMeta(0, curvature=FirstOrder(), **SETTINGS))
    own = {"curvature": HessianFree(), "rates_lr": 0.5, **SETTINGS}
    assert settings(per_fedavg(**own)) == settings(GMeta(1, **own))


def test_averaging_by_samples_weighs_agents_by_their_training_part():
    objective, data = Objective(mlp()), federation()
    train_parts = [rows[: 8 + agent] for agent, rows in enumerate(data.split.train)]
    object.__setattr__(data.split, "train", train_parts)
    algorithm = GMeta(1, aggregation=Mean("samples"), **SETTINGS)
    got = final_model(algorithm, objective, data, rounds=1)
    cohort = stream(3, "cohort", 1).choice(6, 3, replace=False).tolist()
    models = [
        algorithm.agent_update(
            agent_context(objective, data.batches(agent, 3, "train", 1)),
            {"model": objective.initial()},
            {},
        ).vectors["model"]
        for agent in cohort
    ]
    weights = [8 + agent for agent in cohort]
    right = sum(n * m for n, m in zip(weights, models, strict=True)) / sum(weights)
    assert relative_error(got, right) < 1e-14
    assert (
        relative_error(final_model(GMeta(1, **SETTINGS), objective, data, rounds=1), right) > 1e-4
    )


def test_every_local_update_has_batches_of_its_own():
    check_local_updates_are_the_recursion(GMeta)


def check_local_updates_are_the_recursion(cls):
    """τ = 2 and ν = 2 against the recursion written out, with the batches drawn by hand."""
    objective, data = Objective(mlp()), federation()
    alpha, beta = SETTINGS["adapt_lr"], SETTINGS["meta_lr"]
    algorithm = cls(2, curvature=Exact(), **{**SETTINGS, "local_steps": 2})
    batches = data.batches(1, seed=0, use="train", round=1)
    w = objective.initial()
    own = agent_context(objective, batches)
    got = algorithm.agent_update(own, {"model": w}, {}).vectors["model"]
    for t in range(2):
        first, second = batches.draw("adapt", 7, 2, step=t)
        curved, bent = batches.draw("curvature", 7, 2, step=t)
        (outer,) = batches.draw("outer", 7, step=t)
        w1 = w - alpha * objective.grad(w, first)
        w2 = w1 - alpha * objective.grad(w1, second)
        d = objective.grad(w2, outer)
        d = d - alpha * objective.hvp(w1, bent, d)
        d = d - alpha * objective.hvp(w, curved, d)
        w = w - beta * d
    assert relative_error(got, w) < 1e-14


def places_of(batch, data, agent):
    """The rows of a batch; the samples of the agent differ."""
    own = data.samples.inputs[data.split.train[agent]]
    same = (batch.inputs[:, None] == own[None]).flatten(2).all(dim=2)
    assert (same.sum(dim=1) == 1).all()
    return same.int().argmax(dim=1).tolist()


@pytest.mark.parametrize("size", [7, 18])
def test_disjoint_outer_samples_are_no_inner_ones(size):
    data = federation()
    algorithm = GMeta(3, curvature=Exact(), **SETTINGS | {"batch_size": size})
    disjoint = replace(algorithm, outer_samples="disjoint")
    batches, queries = data.batches(1, seed=0, use="train", round=1), set()
    for t in range(20):
        meta = disjoint.meta_batch(batches, t)
        inner = {p for b in [*meta.adapt, *meta.curvature] for p in places_of(b, data, 1)}
        outer = places_of(meta.outer, data, 1)
        assert inner.isdisjoint(outer) and len(inner) <= 9
        assert len(outer) == len(set(outer)) == min(size, 9)
        queries |= set(outer)
        assert len({b.seed for b in [*meta.adapt, *meta.curvature]}) == 6  # independent batches
    assert len(queries) == 18  # every update has halves of its own
    whole = replace(algorithm, batch_size=18).meta_batch(batches, 0)
    assert set(places_of(whole.outer, data, 1)) == set(places_of(whole.adapt[0], data, 1))


def test_resampled_outer_samples_are_drawn_with_replacement():
    data = federation()
    algorithm = GMeta(1, outer_samples="resampled", **SETTINGS | {"batch_size": 18})
    batches = data.batches(1, seed=0, use="train", round=1)
    numbers = []
    for t in range(50):
        outer = places_of(algorithm.meta_batch(batches, t).outer, data, 1)
        assert len(outer) == 18
        numbers.append(len(set(outer)))
    assert 0.58 < sum(numbers) / 50 / 18 < 0.70  # 1 − (1 − 1/18)¹⁸ = 0.643


def test_one_inner_batch_is_differentiated_as_a_loop():
    """With one batch for all steps the exact update is autograd through the unrolled loop."""
    objective, data = Objective(mlp()), federation()
    one = {**SETTINGS, "local_steps": 1, "inner_batches": "one", "outer_samples": "disjoint"}
    algorithm = GMeta(3, curvature=Exact(), **one)
    batches = data.batches(2, seed=0, use="train", round=1)
    meta = algorithm.meta_batch(batches, 0)
    assert len(meta.adapt) == len(meta.curvature) == 3
    assert len({b.seed for b in [*meta.adapt, *meta.curvature]}) == 1
    (first,) = batches.draw("adapt", 7, 1, 0, "support")
    assert torch.equal(first.inputs, meta.adapt[2].inputs)
    assert GMeta(3, FirstOrder(), **one).meta_batch(batches, 0).curvature == []

    w = objective.initial().requires_grad_()
    loop = w
    for _ in range(3):
        (g,) = torch.autograd.grad(objective.forward(loop, first), loop, create_graph=True)
        loop = loop - SETTINGS["adapt_lr"] * g
    (right,) = torch.autograd.grad(objective.forward(loop, meta.outer), w)
    w = w.detach()
    got = algorithm.agent_update(agent_context(objective, batches), {"model": w}, {})
    assert relative_error(w - got.vectors["model"], SETTINGS["meta_lr"] * right) < 1e-12
    assert got.cost == GMeta(3, curvature=Exact(), **SETTINGS | {"local_steps": 1})._cost(1)


def test_what_batches_are_drawn_from_changes_nothing_without_inner_steps():
    objective, data = Objective(mlp()), federation()
    right = final_model(fedavg(**SETTINGS), objective, data)
    for outer in ("resampled", "disjoint"):
        algorithm = GMeta(0, outer_samples=outer, inner_batches="one", **SETTINGS)
        assert torch.equal(final_model(algorithm, objective, data), right)


def test_disjoint_outer_samples_need_two_and_no_epochs():
    with pytest.raises(InputError, match=r"outer_samples = 'disjoint': with local_epochs"):
        GMeta(1, outer_samples="disjoint", local_epochs=1)
    data = federation()
    object.__setattr__(data.split, "train", [rows[:1] for rows in data.split.train])
    algorithm = GMeta(1, outer_samples="disjoint", **SETTINGS | {"batch_size": 1})
    with pytest.raises(
        InputError, match=r"single training sample.*outer_samples = \"independent\""
    ):
        algorithm.meta_batch(data.batches(0, 0, "train", 1), 0)


@pytest.mark.parametrize(("nu", "rates_lr"), [(0, 0), (1, 0), (3, 0), (3, 0.1)])
@pytest.mark.parametrize("curvature", [Exact(), FirstOrder(), HessianFree(1e-3)])
def test_the_cost_that_is_reported_is_the_work_that_is_done(nu, rates_lr, curvature, monkeypatch):
    objective, data = Objective(mlp(torch.float64)), federation()
    calls = {"grad": 0, "hvp": 0}
    for name in calls:
        original = getattr(Objective, name)

        def counted(self, *arguments, name=name, original=original):
            calls[name] += 1
            return original(self, *arguments)

        monkeypatch.setattr(Objective, name, counted)
    # checks of products are not counted
    monkeypatch.setattr("nufed.meta.curvature._Watch.due", lambda self: False)
    monkeypatch.setattr("nufed.meta.curvature._checked", [objective])
    algorithm = GMeta(nu, curvature=curvature, rates_lr=rates_lr, **SETTINGS)
    result = algorithm.agent_update(
        agent_context(objective, data.batches(0, 0, "train", 1)),
        algorithm.server_init(objective, objective.initial()),
        {},
    )
    assert (result.cost.gradients, result.cost.hvps) == (calls["grad"], calls["hvp"])
    assert result.cost.gradients >= SETTINGS["local_steps"]


def test_methods_meet_the_same_batches():
    batches = federation().batches(1, seed=0, use="train", round=2)
    few, many = batches.draw("adapt", 5, 1, step=1), batches.draw("adapt", 5, 3, step=1)
    assert torch.equal(few[0].inputs, many[0].inputs) and few[0].seed == many[0].seed
    assert len({b.seed for b in many}) == 3


@pytest.mark.parametrize(
    "bad",
    [
        {"adapt_steps": -1},
        {"adapt_steps": 1.5},
        {"local_steps": 0},
        {"batch_size": 0},
        {"adapt_lr": -0.1},
        {"meta_lr": float("nan")},
        {"meta_lr": float("inf")},
        {"rates_lr": -0.1},
        {"rates_lr": 0.1, "adapt_steps": 0},
        {"adapt_lr": 0.0, "rates_lr": 0.1},
        {"adapt_lr": torch.ones(3), "rates_lr": 0.1},
        {"adapt_lr": torch.ones(2, 3)},
        {"rates": "layer"},
    ],
)
def test_bad_settings_are_refused(bad):
    name, *_ = bad
    with pytest.raises(InputError, match=f"{name} = "):
        GMeta(**bad)


RATES = ["tensor", "coordinate", "step"]


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("module", [mlp, tied])
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("nu", [1, 3])
def test_learned_step_sizes_move_by_the_gradient_of_their_logarithms(
    nu, rates, module, first_order
):
    check_learned_step_sizes(GMeta, nu, rates, module, first_order)


def check_learned_step_sizes(cls, nu=3, rates="step", module=mlp, first_order=False):
    """One local update against autograd through the unrolled loop."""
    objective = Objective(module())
    own = batches(nu + 1)
    how = FirstOrder() if first_order else Exact()
    algorithm = cls(nu, curvature=how, rates_lr=0.7, rates=rates, **SETTINGS)
    before = algorithm.server_init(objective, objective.initial())
    spread = torch.linspace(-1, 1, len(before["log_rates"]), dtype=torch.float64)
    before = {**before, "log_rates": before["log_rates"] + spread}
    step = algorithm.optimizer.start(objective, algorithm.meta_lr, 1)
    after = algorithm.local_update(objective, before, MetaBatch(own[:nu], own[nu], own[:nu]), step)

    leaves = [before[name].clone().requires_grad_() for name in ("model", "log_rates")]
    w, numbers = leaves[0], leaves[1].exp()
    sizes = [p.numel() for p in module().parameters()]
    assert len(numbers) == {"tensor": len(sizes), "coordinate": sum(sizes)}.get(
        rates, nu * len(sizes)
    )
    for step, batch in enumerate(own[:nu]):
        if rates == "coordinate":
            every = numbers
        else:
            some = numbers.view(-1, len(sizes))[step if rates == "step" else 0]
            every = torch.cat([r.expand(n) for r, n in zip(some, sizes, strict=True)])
        (g,) = torch.autograd.grad(objective.forward(w, batch), w, create_graph=True)
        w = w - every * (g.detach() if first_order else g)
    right = torch.autograd.grad(objective.forward(w, own[nu]), leaves)
    for name, lr, gradient in zip(("model", "log_rates"), (0.2, 0.7), right, strict=True):
        assert relative_error(before[name] - after[name], lr * gradient) < 1e-11


@pytest.mark.parametrize("rates", RATES)
def test_step_sizes_that_hardly_move_give_what_one_fixed_size_gives(rates):
    """A vector of equal step sizes is that step size, up to rounding; off, equal bits."""
    objective, data = Objective(mlp()), federation()
    right = final_model(GMeta(3, **SETTINGS), objective, data)
    off = GMeta(3, rates_lr=0.0, rates=rates, **SETTINGS)
    assert torch.equal(final_model(off, objective, data), right)
    still = GMeta(3, rates_lr=1e-300, rates=rates, **SETTINGS)
    assert relative_error(final_model(still, objective, data), right) < 1e-13


def test_fine_tuning_beyond_the_trained_steps_takes_the_last_steps_sizes():
    objective, data = Objective(mlp()), federation()
    algorithm = GMeta(2, rates_lr=0.1, rates="step", **SETTINGS)
    server = algorithm.server_init(objective, objective.initial())
    spread = torch.linspace(-1, 1, len(server["log_rates"]), dtype=torch.float64)
    server = {**server, "log_rates": server["log_rates"] + spread}
    own = agent_context(objective, data.batches(0, 0, "evaluate"))
    models = [each["model"] for each in algorithm.fine_tune(own, server, server, 4, 0.5)]
    numbers = server["log_rates"].exp().view(2, -1)
    for step, batch in enumerate(own.batches.draw("adapt", 7, 4)):
        rate = torch.cat(
            [r.expand(n) for r, n in zip(numbers[min(step, 1)], objective.sizes, strict=True)]
        )
        right = models[step] - 0.5 * rate * objective.grad(models[step], batch)
        assert relative_error(models[step + 1], right) < 1e-14
    assert algorithm.shipped(objective, server).adapt_lr.shape == (2, objective.size)


def test_step_sizes_that_are_too_small_grow_and_serve_fine_tuning():
    objective, data = Objective(mlp()), federation()
    settings = {**SETTINGS, "adapt_lr": 0.05, "curvature": FirstOrder()}
    own, losses = data.batches(0, 0, "evaluate"), []
    for rates_lr in (0.0, 5.0):
        algorithm = GMeta(2, rates_lr=rates_lr, **settings)
        engine = DirectEngine(objective, data, 3)
        *_, last = train(algorithm, engine, objective.initial(), rounds=6, participation=1.0)
        tuned = algorithm.fine_tune(agent_context(objective, own), last.server, last.server, 2)
        models = [tensors["model"] for tensors in tuned]
        losses.append(float(objective.value(models[-1], data.scored(0))))
    assert losses[1] < losses[0]
    rates = last.server["log_rates"].exp()
    assert rates.min() > 0.05 and rates.max() > 0.1
    for part, gradient, rate in zip(
        (models[0] - models[1]).split(objective.sizes),
        objective.grad(models[0], own.draw("adapt", 7)[0]).split(objective.sizes),
        rates,
        strict=True,
    ):
        assert relative_error(part, rate * gradient) < 1e-12


@pytest.mark.parametrize(
    ("aggregation", "factor"), [(Mean(), 1e-8), (ClippedMean(), 2 ** (1 / 3)), (Median(), 2.0)]
)
def test_the_servers_rule_combines_learned_step_sizes_and_keeps_them_positive(aggregation, factor):
    """Two agents double every step size, and a third sends what is far below all of them."""
    objective = Objective(mlp())
    algorithm = GMeta(2, aggregation=aggregation, rates_lr=1.0, **SETTINGS)
    server = algorithm.server_init(objective, objective.initial())
    changes = [torch.tensor(x).log() for x in (2.0, 2.0, 1e-24 / 4)]
    updates = [
        AgentUpdate(i, 1, 9, {**server, "log_rates": server["log_rates"] + change})
        for i, change in enumerate(changes)
    ]
    after = algorithm.rate(objective, algorithm.server_update(context(), server, updates))
    torch.testing.assert_close(after, torch.full_like(after, 0.4 * factor), rtol=1e-5, atol=0)


def test_without_learning_state_and_messages_hold_the_model_only():
    objective = Objective(mlp())
    w = objective.initial()
    for algorithm in (GMeta(2, **SETTINGS), GMeta(2, rates_lr=0, **SETTINGS), fedavg(**SETTINGS)):
        assert algorithm.receives == algorithm.sends == ("model",)
        assert algorithm.server_init(objective, w) == {"model": w}
        assert algorithm.combines == "linearly" and algorithm.rate(objective, {}) == 0.4


# wrong implementations


class GraphIsCut(GMeta):
    """First-order under the name of exact."""

    def local_update(self, objective, vectors, batch, step):
        return GMeta.local_update(
            replace(self, curvature=FirstOrder()), objective, vectors, batch, step
        )


class OneBatchForAll(GMeta):
    def meta_batch(self, batches, t, outer=None):
        own = super().meta_batch(batches, t, outer)
        nu = self.adapt_steps
        return MetaBatch([own.outer] * nu, own.outer, [own.outer] * nu)


class SameBatchForCurvature(GMeta):
    """The Hessian of a step on the step's own batch."""

    def meta_batch(self, batches, t, outer=None):
        own = super().meta_batch(batches, t, outer)
        return MetaBatch(own.adapt, own.outer, own.adapt)


class OuterGradientAtTheStart(GMeta):
    def local_update(self, objective, vectors, batch, step):
        w = vectors["model"]
        return {"model": step(w, objective.grad(w, batch.outer))}


class HessianAtTheEnd(GMeta):
    """H at w_ν for every step instead of at w_l."""

    def local_update(self, objective, vectors, batch, step):
        w = end = vectors["model"]
        for each in batch.adapt:
            end = end - self.adapt_lr * objective.grad(end, each)
        d = objective.grad(end, batch.outer)
        for each in reversed(batch.curvature):
            d = d - self.adapt_lr * objective.hvp(end, each, d)
        return {"model": step(w, d)}


class StepsOfSizeBeta(GMeta):
    def rate(self, objective, received):
        return self.meta_lr


class MovesFromTheFineTunedModel(GMeta):
    """w_ν − β·d instead of w − β·d."""

    def local_update(self, objective, vectors, batch, step):
        after = super().local_update(objective, vectors, batch, step)["model"]
        w = end = vectors["model"]
        for each in batch.adapt:
            end = end - self.adapt_lr * objective.grad(end, each)
        return {"model": end + (after - w)}


MUTANTS = [
    GraphIsCut,
    OneBatchForAll,
    SameBatchForCurvature,
    OuterGradientAtTheStart,
    HessianAtTheEnd,
    StepsOfSizeBeta,
    MovesFromTheFineTunedModel,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    with pytest.raises(AssertionError):
        check_local_updates_are_the_recursion(mutant)


class RatesOfTheNextStep(GMeta):
    """The gradient of step l's sizes given to step l + 1."""

    def collected(self, objective, vectors):
        return super().collected(objective, vectors.roll(1, 0))


class SharedBetweenSteps(GMeta):
    """The sum over steps given to every step."""

    def collected(self, objective, vectors):
        return super().collected(objective, vectors.sum(0, keepdim=True).expand_as(vectors))


class LastSizesEverywhere(GMeta):
    def expanded(self, objective, numbers):
        return super().expanded(objective, numbers)[-1:].expand(self.adapt_steps, -1)


class MovesTheSizesThemselves(GMeta):
    """Without the factor a of ∂f/∂θ = a⊙∂f/∂a."""

    def collected(self, objective, vectors):
        return super().collected(objective, vectors / self.lr)

    def rate(self, objective, received):
        vars(self)["lr"] = super().rate(objective, received)
        return self.lr


@pytest.mark.parametrize(
    "mutant",
    [RatesOfTheNextStep, SharedBetweenSteps, LastSizesEverywhere, MovesTheSizesThemselves],
    ids=lambda cls: cls.__name__,
)
def test_wrong_learned_step_sizes_are_rejected(mutant):
    with pytest.raises(AssertionError):
        check_learned_step_sizes(mutant)
