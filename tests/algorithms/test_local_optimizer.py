"""Optimisers of local steps: against torch's, schedules by their formulas, epochs, and SCAFFOLD."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from nufed import InputError, Objective, fedavg, gmeta
from nufed.algorithms import ALGORITHMS, Scaffold
from nufed.algorithms.local_optimizer import SGD, AdamW, AdamWSteps, Memory, Nesterov, Steps
from nufed.algorithms.protocol import AgentContext
from nufed.meta.fine_tuning import descend
from nufed.server import server_model
from nufed.simulation import DirectEngine, Engines, train
from support import batches, context, federation, mlp, uneven_federation

SETTINGS = {"meta_lr": 0.1, "local_steps": 4, "batch_size": 6}


def own_context(objective, data, agent, round=3):
    batches = data.batches(agent, 0, "train", round)
    return AgentContext.of(context(round), objective, batches, batches.samples)


def history(algorithm, engine, rounds=3):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5))


def torch_steps(objective, w, batches, lr, momentum, weight_decay, clip):
    """SGD of torch on a module, with its gradients clipped by norm first."""
    parameter = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.SGD(
        [parameter], lr=lr, momentum=momentum, weight_decay=weight_decay
    )  # fmt: skip
    for batch in batches:
        parameter.grad = objective.grad(parameter.detach(), batch)
        if clip:
            torch.nn.utils.clip_grad_norm_([parameter], clip)
        optimizer.step()
    return parameter.detach()


def check_fedavg_is_torchs_sgd(cls):
    """In float64, with each part alone and all together, and momentum that starts anew."""
    objective, data = Objective(mlp()), federation()
    w = objective.initial()
    for agent in (1, 2):
        own = own_context(objective, data, agent)
        batches = [own.batches.draw("outer", 6, step=t)[0] for t in range(4)]
        for momentum, decay, clip in (
            (0.8, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.2), (0.8, 0.3, 0.2), (0.8, 0.3, 1e9),
        ):  # fmt: skip
            algorithm = fedavg(optimizer=cls(momentum, decay, clip), **SETTINGS)
            found = algorithm.agent_update(own, {"model": w}, {}).vectors["model"]
            right = torch_steps(objective, w, batches, 0.1, momentum, decay, clip)
            # clip_grad_norm_ divides by the norm plus 1e-6
            torch.testing.assert_close(found, right, rtol=0, atol=1e-6 if clip == 0.2 else 1e-13)


def check_clipping_bounds_the_norm_exactly(cls):
    """min(‖g‖, clip), in g's direction."""
    objective = Objective(mlp())
    g, w = torch.randn(66).double(), torch.zeros(66).double()
    for clip in (0.5, 1e3):
        step = cls(clip_norm=clip).start(objective, 1.0, 1)
        right = -g * min(1.0, clip / float(g.norm()))
        torch.testing.assert_close(step(w, g), right, rtol=1e-14, atol=1e-14)
        rows = cls(clip_norm=clip).start(objective, 1.0, 1)(
            torch.zeros(2, 66).double(), torch.stack([g, 5000 * g])
        )  # fmt: skip
        torch.testing.assert_close(rows[0], right, rtol=1e-14, atol=1e-14)
        assert float(rows[1].norm()) == pytest.approx(clip)


def check_schedules_are_their_formulas(cls):
    """η, ηγ/(γ + k − 1) and η/2·(1 + cos(π·min(1, (k − 1)/γ))), in rounds 1 … and at use."""
    for k in (1, 2, 5, 11, 40):
        right = {
            "constant": 0.3,
            "inverse": 0.3 * 10 / (10 + k - 1),
            "cosine": 0.15 * (1 + math.cos(math.pi * min(1.0, (k - 1) / 10))),
        }
        for schedule, rate in right.items():
            own = cls(schedule=schedule, schedule_rounds=10)
            assert own.rate(0.3, k) == pytest.approx(rate, rel=1e-14, abs=1e-17)
            assert own.rate(0.3, 0) == 0.3
    assert cls(schedule="inverse", schedule_rounds=10).rate(0.3, 11) == pytest.approx(0.15)
    assert cls(schedule="cosine", schedule_rounds=10).rate(0.3, 11) == pytest.approx(0, abs=1e-17)


@pytest.mark.parametrize(
    "check",
    [
        check_fedavg_is_torchs_sgd,
        check_clipping_bounds_the_norm_exactly,
        check_schedules_are_their_formulas,
    ],
)
def test_proof(check):
    check(SGD)


@pytest.mark.parametrize("schedule", ["inverse", "cosine"])
def test_rounds_use_the_step_size_of_the_schedule(schedule):
    """FedAvg with a schedule is, round by round, FedAvg with that round's step size."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    own = SGD(schedule=schedule, schedule_rounds=4)
    rounds = history(fedavg(optimizer=own, **SETTINGS), engine)
    progress = rounds[0]
    for k, right in enumerate(rounds[1:], start=1):
        share = (k - 1) / 4
        rate = (
            0.1 / (1 + share) if schedule == "inverse" else 0.05 * (1 + math.cos(math.pi * share))
        )
        plain = fedavg(**{**SETTINGS, "meta_lr": rate})
        *_, progress = train(
            plain, engine, rounds[0].server["model"], rounds=k, participation=0.5, start=progress
        )  # fmt: skip
        torch.testing.assert_close(
            progress.server["model"], right.server["model"], rtol=0, atol=1e-14
        )  # fmt: skip


def test_defaults_are_plain_steps_to_the_bit():
    objective, data = Objective(mlp(torch.float32)), federation()
    own = own_context(objective, data, 2)
    w = objective.initial()
    found = fedavg(**SETTINGS).agent_update(own, {"model": w}, {}).vectors["model"]
    right = w
    for t in range(4):
        (batch,) = own.batches.draw("outer", 6, step=t)
        right = torch.sub(right, objective.grad(right, batch), alpha=0.1)
    assert torch.equal(found, right) and fedavg().optimizer == SGD()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_that_trains_locally_heeds_the_optimiser(name):
    """The same defaults give the same bits; momentum, decay, clipping and schedule change them."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    cls = ALGORITHMS[name]
    settings = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
    plain = history(cls(**settings), engine)[-1].server
    name = server_model(cls())
    for own, equal in (
        (SGD(), True),
        (SGD(schedule_rounds=7), True),
        (SGD(momentum=0.9), False),
        (SGD(weight_decay=0.1), False),
        (SGD(clip_norm=0.05), False),
        (SGD(schedule="inverse", schedule_rounds=1), False),
    ):
        found = history(cls(optimizer=own, **settings), engine)[-1].server
        assert torch.equal(found[name], plain[name]) == equal, own


# epochs


@pytest.mark.parametrize("size", [5, 6, 40])
def test_an_epoch_visits_every_sample_once(size):
    data, objective = uneven_federation(), Objective(mlp())
    for agent in range(4):
        own = own_context(objective, data, agent)
        algorithm = fedavg(local_epochs=2, batch_size=size)
        batches = list(algorithm.local_batches(own))
        every = own.batches.whole().inputs
        assert len(batches) == algorithm.steps_per_round(own)
        assert len(batches) == 2 * math.ceil(len(every) / min(size, len(every)))
        orders = []
        for epoch in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
            seen = torch.cat([batch.inputs for batch in epoch])
            orders.append(seen)
            assert all(len(batch.inputs) == min(size, len(every)) for batch in epoch[:-1])
            assert sorted(seen.tolist()) == sorted(every.tolist())
        assert not torch.equal(*orders)  # each epoch in an order of its own


def test_epochs_are_gradient_steps_on_those_batches():
    data, objective = uneven_federation(), Objective(mlp())
    w = objective.initial()
    for agent in range(4):
        own = own_context(objective, data, agent)
        algorithm = fedavg(meta_lr=0.1, local_epochs=2, batch_size=6)
        result = algorithm.agent_update(own, {"model": w}, {})
        right, steps = w, 0
        for number in range(2):
            for batch in own.batches.epoch("outer", 6, number):
                right, steps = right - 0.1 * objective.grad(right, batch), steps + 1
        torch.testing.assert_close(result.vectors["model"], right, rtol=0, atol=1e-14)
        assert result.cost.gradients == steps


# SCAFFOLD: c_i⁺ from what was really done


def raw_gradients(objective, own, received, c_i, algorithm, batches):
    """y after torch's SGD along ∇f − c_i + c, and the raw gradients on the way."""
    optimizer = algorithm.optimizer
    parameter, raw = torch.nn.Parameter(received["model"].clone()), []
    late = 2 / optimizer.schedule_rounds if optimizer.schedule == "inverse" else 0  # in round 3
    rate = algorithm.meta_lr / (1 + late)
    steps = torch.optim.SGD(
        [parameter], lr=rate, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
    )
    for batch in batches:
        raw.append(objective.grad(parameter.detach(), batch))
        parameter.grad = raw[-1] - c_i + received["control"]
        if optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], optimizer.clip_norm)
        steps.step()
    return parameter.detach(), torch.stack(raw)


def check_control_is_the_mean_of_raw_gradients(cls):
    """With any optimiser, schedule, and number of steps; in round 3, on agents of three sizes."""
    data, objective = uneven_federation(), Objective(mlp())
    x = objective.initial()
    generator = torch.Generator().manual_seed(1)
    c, c_i = (
        0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2)
    )  # fmt: skip
    received = {"model": x, "control": c}
    optimizers = (
        SGD(),
        SGD(momentum=0.8),
        SGD(weight_decay=0.3),
        SGD(clip_norm=0.3),
        SGD(schedule="inverse", schedule_rounds=2),
        SGD(momentum=0.8, weight_decay=0.3, clip_norm=0.3, schedule="inverse", schedule_rounds=2),
    )
    for agent, epochs in ((0, 0), (0, 2), (1, 2), (2, 2)):
        for own in optimizers:
            algorithm = cls(
                meta_lr=0.1, local_steps=3, local_epochs=epochs, batch_size=6, optimizer=own
            )
            at = own_context(objective, data, agent, round=3)
            numbers = range(epochs)
            batches = [b for n in numbers for b in at.batches.epoch("outer", 6, n)] or [
                at.batches.draw("outer", 6, step=t)[0] for t in range(3)
            ]
            result = algorithm.agent_update(at, received, {"control": c_i})
            y, raw = raw_gradients(objective, at, received, c_i, algorithm, batches)
            near = 1e-5 if own.clip_norm else 1e-12
            torch.testing.assert_close(result.vectors["model"], y, rtol=0, atol=near)
            found = result.state["control"]
            torch.testing.assert_close(found, raw.mean(0), rtol=0, atol=near)
            change = result.vectors["control"] - c
            torch.testing.assert_close(change, found - c_i, rtol=0, atol=1e-13)
            assert result.cost.gradients == len(batches)
            if own == SGD():  # the usual form
                usual = c_i - c + (x - y) / (len(batches) * 0.1)
                torch.testing.assert_close(found, usual, rtol=0, atol=1e-12)


def test_scaffolds_control_is_the_mean_of_raw_gradients():
    check_control_is_the_mean_of_raw_gradients(Scaffold)


def test_scaffold_survives_a_round_whose_step_size_is_0():
    """At the end of a cosine schedule c_i⁺ is the mean of gradients at x."""
    data, objective = federation(), Objective(mlp())
    own = SGD(schedule="cosine", schedule_rounds=2)
    algorithm = Scaffold(meta_lr=0.1, local_steps=3, batch_size=6, optimizer=own)
    at = own_context(objective, data, 1, round=3)
    x = objective.initial()
    zero = torch.zeros_like(x)
    result = algorithm.agent_update(at, {"model": x, "control": zero}, {"control": zero})
    batches = [at.batches.draw("outer", 6, step=t)[0] for t in range(3)]
    right = torch.stack([objective.grad(x, batch) for batch in batches]).mean(0)
    torch.testing.assert_close(result.vectors["model"], x, rtol=0, atol=1e-14)
    torch.testing.assert_close(result.state["control"], right, rtol=0, atol=1e-12)


# the meta-gradient


def check_clipping_bounds_the_meta_step(cls):
    """‖w⁺ − w‖ = β·clip where the meta-gradient is longer, and its direction is kept."""
    objective, data = Objective(mlp()), federation()
    w = 5 * objective.initial()
    at = own_context(objective, data, 2)
    for rates_lr in (0.0, 0.1):
        settings = {"adapt_steps": 3, "adapt_lr": 2.0, "local_steps": 1, "batch_size": 6}
        plain = cls(meta_lr=0.1, rates_lr=rates_lr, **settings)
        clipped = replace(plain, optimizer=SGD(clip_norm=0.01))
        received = {"model": w}
        if rates_lr:
            received = dict(plain.server_init(objective, w))
        one, other = (a.agent_update(at, received, {}).vectors for a in (plain, clipped))
        long, short = one["model"] - w, other["model"] - w
        assert float(long.norm()) > 2 * 0.1 * 0.01
        assert float(short.norm()) == pytest.approx(0.1 * 0.01, rel=1e-9)
        cosine = float(long @ short / (long.norm() * short.norm()))
        assert cosine == pytest.approx(1, abs=1e-9)
        if rates_lr:  # only steps of the model are clipped
            assert torch.equal(one["log_rates"], other["log_rates"])


def test_clipping_bounds_the_step_of_gmeta():
    check_clipping_bounds_the_meta_step(gmeta)


def check_steps_leave_statistics_alone(cls):
    """Running statistics are coordinates of w, but no parameters: batches alone move them."""
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    objective, data = Objective(net, running_stats="tracked"), federation()
    start = objective.initial()
    start[-14:] += 0.5
    at = own_context(objective, data, 2)
    (batch,) = at.batches.draw("outer", 6, step=0)
    shared = {"meta_lr": 0.1, "local_steps": 1, "batch_size": 6}
    optimizer = cls(weight_decay=0.5, momentum=0.5)
    away = {"model": start, "control": torch.ones_like(start)}
    for algorithm, further in (
        (fedavg(optimizer=optimizer, **shared), 0.5 * start),
        (Scaffold(optimizer=optimizer, **shared), 0.5 * start + 1),
    ):
        state = {"control": torch.zeros_like(start)}
        found = algorithm.agent_update(at, away, state).vectors["model"]
        right = start - 0.1 * (objective.grad(start, batch) + further)
        inputs = nn.functional.linear(batch.inputs.double(), start[:35].view(7, 5), start[35:42])
        right[-14:-7] = 0.9 * start[-14:-7] + 0.1 * inputs.mean(0)
        right[-7:] = 0.9 * start[-7:] + 0.1 * inputs.var(0)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


def test_steps_leave_statistics_alone():
    check_steps_leave_statistics_alone(SGD)


# wrong implementations


class Wrong(SGD):
    def start(self, objective, lr, round, memory=None):
        return self.Own(self, objective, self.rate(lr, round), memory)


class DecayBeforeClipping(Wrong):
    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            own = self._optimizer
            without = Steps(replace_sgd(own, weight_decay=0.0), self._objective, self._rate)
            without._memory = self._memory
            return without(w, gradient + own.weight_decay * w)


class ClipsByValue(Wrong):
    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            clip = self._optimizer.clip_norm
            return super().__call__(w, gradient.clamp(-clip, clip) if clip else gradient, batch)


class ClipsAlways(Wrong):
    """Short gradients are made longer."""

    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            clip = self._optimizer.clip_norm
            return super().__call__(
                w, gradient * clip / gradient.norm() if clip else gradient, batch
            )


class ClipsTheMomentum(Wrong):
    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            own = self._optimizer
            g = gradient + own.weight_decay * w
            if own.momentum:
                before = self._memory["momentum"]
                self._memory["momentum"] = g = g if before is None else own.momentum * before + g
            if own.clip_norm:
                g = g * min(1.0, own.clip_norm / float(g.norm()))
            return descend(w, self._rate, g)


class Dampened(Wrong):
    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            return super().__call__(w, (1 - self._optimizer.momentum) * gradient, batch)


class WithoutMomentum(Wrong):
    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            self._memory = Memory({})
            return super().__call__(w, gradient, batch)


class DecayTwice(Wrong):
    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            return super().__call__(w, gradient + self._optimizer.weight_decay * w, batch)


class MovesStatistics(Wrong):
    """Weight decay and corrections of running statistics."""

    class Own(Steps):
        def __call__(self, w, gradient, batch=None, overwrite=False):
            return descend(w, self._rate, gradient + self._optimizer.weight_decay * w)


class LateSchedule(SGD):
    def rate(self, lr, round):
        return super().rate(lr, round + 1)


class CosineComesBack(SGD):
    """cos without the min."""

    def rate(self, lr, round):
        if self.schedule == "cosine" and round:
            share = (round - 1) / self.schedule_rounds
            return lr * 0.5 * (1 + math.cos(math.pi * share))
        return super().rate(lr, round)


def replace_sgd(own, **changes):
    return SGD(**{**{f.name: getattr(own, f.name) for f in fields(SGD)}, **changes})


class UsualFormAlways(Scaffold):
    """c_i − c + (x − y)/(τη) although the optimiser changes steps."""

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        x, c, c_i = received["model"], received["control"], state["control"]
        new = self.usual(context, x - result.vectors["model"], c_i - c)
        sent = {**result.vectors, "control": c + (new - c_i)}
        return replace(result, vectors=sent, state={"control": new})

    def usual(self, context, way, difference):
        rate = self.optimizer.rate(self.meta_lr, context.round)
        return difference + way / (self.steps_per_round(context) * rate)


class CountsLocalSteps(UsualFormAlways):
    """τ is the setting, whatever was done."""

    def usual(self, context, way, difference):
        return difference + way / (
            self.local_steps * self.optimizer.rate(self.meta_lr, context.round)
        )


class FirstStepSize(UsualFormAlways):
    """η is that of round 1."""

    def usual(self, context, way, difference):
        return difference + way / (self.steps_per_round(context) * self.meta_lr)


def unclipped(**settings):
    class Unclipped(type(gmeta())):
        def start_steps(self, context, lr=None, memory=None):
            return SGD().start(context.objective, self.meta_lr, context.round)

    return Unclipped(**settings)


TORCH, CLIP, SCHEDULE = (
    check_fedavg_is_torchs_sgd,
    check_clipping_bounds_the_norm_exactly,
    check_schedules_are_their_formulas,
)
CONTROL, META = check_control_is_the_mean_of_raw_gradients, check_clipping_bounds_the_meta_step
MUTANTS = [
    (DecayBeforeClipping, TORCH),
    (ClipsByValue, TORCH),
    (ClipsByValue, CLIP),
    (ClipsAlways, TORCH),
    (ClipsAlways, CLIP),
    (ClipsTheMomentum, TORCH),
    (Dampened, TORCH),
    (WithoutMomentum, TORCH),
    (DecayTwice, TORCH),
    (MovesStatistics, check_steps_leave_statistics_alone),
    (LateSchedule, SCHEDULE),
    (CosineComesBack, SCHEDULE),
    (UsualFormAlways, CONTROL),
    (CountsLocalSteps, CONTROL),
    (FirstStepSize, CONTROL),
    (unclipped, META),
]


@pytest.mark.parametrize("mutant, check", MUTANTS, ids=lambda each: each.__name__)
def test_a_wrong_copy_is_rejected(mutant, check):
    with pytest.raises(AssertionError):
        check(mutant)


# Nesterov and AdamW


def torchs(own, parameter, lr):
    if isinstance(own, AdamW):
        settings = {"betas": (own.beta1, own.beta2), "eps": own.epsilon}
        return torch.optim.AdamW([parameter], lr, weight_decay=own.weight_decay, **settings)
    return torch.optim.SGD(
        [parameter], lr, own.momentum, weight_decay=own.weight_decay, nesterov=True
    )


def check_it_is_torchs_step_by_step(change=lambda step: step):
    """In float64, after each of 12 steps; a second loop begins anew."""
    objective = Objective(mlp())
    for own in (
        Nesterov(),
        Nesterov(momentum=0.5, weight_decay=0.3),
        AdamW(),
        AdamW(weight_decay=0.0),
        AdamW(weight_decay=0.5, beta1=0.7, beta2=0.9, epsilon=1e-3),
    ):
        for _ in range(2):
            w, step = objective.initial(), change(own.start(objective, 0.05, 1))
            parameter = torch.nn.Parameter(w.clone())
            optimizer = torchs(own, parameter, 0.05)
            for batch in batches(12):
                parameter.grad = objective.grad(parameter.detach(), batch)
                optimizer.step()
                w = step(w, objective.grad(w, batch), batch)
                torch.testing.assert_close(w, parameter.detach(), rtol=0, atol=1e-13)


def test_nesterov_and_adamw_are_torchs():
    check_it_is_torchs_step_by_step()


class DecaysTheGradient:
    """Adam with L2 regularisation, in place of AdamW."""

    def __init__(self, step):
        self.step, self.decay = step, step._optimizer.weight_decay
        if isinstance(step._optimizer, AdamW):
            step._adamw = replace(step._optimizer, weight_decay=0.0)

    def __call__(self, w, g, batch):
        adam = isinstance(self.step._optimizer, AdamW)
        return self.step(w, g + self.decay * w if adam else g, batch)


def uncorrected(step):
    """AdamW without bias correction."""
    if isinstance(step, AdamWSteps):
        step._taken = 10**6
    return step


def heavy_ball(step):
    """Momentum in place of Nesterov's."""
    own = step._optimizer
    if isinstance(own, Nesterov):
        step._optimizer = SGD(momentum=own.momentum, weight_decay=own.weight_decay)
    return step


@pytest.mark.parametrize("change", [DecaysTheGradient, uncorrected, heavy_ball])
def test_a_wrong_optimiser_is_rejected(change):
    with pytest.raises(AssertionError):
        check_it_is_torchs_step_by_step(change)


@pytest.mark.parametrize("own", [Nesterov(), AdamW()], ids=["nesterov", "adamw"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_trains_with_it(name, own):
    """Its state is fresh in every round: rounds from the same progress are the same rounds."""
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    settings = {"meta_lr": 0.01, "local_steps": 2, "batch_size": 6}
    algorithm, plain = (ALGORITHMS[name](**settings, **o) for o in ({"optimizer": own}, {}))
    name = server_model(algorithm)
    found, again, right = (history(a, engine, 2)[-1].server for a in (algorithm, algorithm, plain))
    assert torch.equal(found[name], again[name]) and not torch.equal(found[name], right[name])


def test_engines_that_need_linear_combinations_refuse_adamw():
    engines = Engines(Objective(mlp()), federation(), 5)
    for own, usable in ((Nesterov(), True), (AdamW(), False), (AdamW(weight_decay=0.0), False)):
        algorithm = gmeta(adapt_steps=2, adapt_lr=0.1, optimizer=own, **SETTINGS)
        assert engines.obstacle("batched", algorithm) is None
        assert (engines.obstacle("gram", algorithm) is None) == usable


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"momentum": 1.0}])
def test_nesterov_needs_a_momentum(settings):
    with pytest.raises(InputError, match="momentum"):
        Nesterov(**settings)


# what agents keep


KEPT = (
    SGD(momentum=0.8, weight_decay=0.3, optimizer_state="kept"),
    Nesterov(momentum=0.5, optimizer_state="kept"),
    AdamW(weight_decay=0.5, optimizer_state="kept"),
)


def plain_torch(own, parameter, lr):
    if type(own) is not SGD:
        return torchs(own, parameter, lr)
    return torch.optim.SGD([parameter], lr, own.momentum, weight_decay=own.weight_decay)


def check_rounds_continue_torchs_steps(change=lambda state: state):
    """Three rounds of one agent are twelve steps of one optimiser of torch, in float64."""
    objective, data = Objective(mlp()), federation()
    for own in KEPT:
        algorithm = fedavg(optimizer=own, **SETTINGS)
        w = objective.initial()
        state = algorithm.agent_init(objective, {"model": w})
        parameter = torch.nn.Parameter(w.clone())
        optimizer = plain_torch(own, parameter, 0.1)
        for round in (1, 2, 3):
            at = own_context(objective, data, 1, round)
            before = {name: vector.clone() for name, vector in state.items()}
            result = algorithm.agent_update(at, {"model": w}, state)
            assert all(torch.equal(before[name], state[name]) for name in state)
            assert {n: x.shape for n, x in result.state.items()} == {
                n: x.shape for n, x in state.items()
            }
            w, state = result.vectors["model"], change(result.state)
            for t in range(4):
                (batch,) = at.batches.draw("outer", 6, step=t)
                parameter.grad = objective.grad(parameter.detach(), batch)
                optimizer.step()
            torch.testing.assert_close(w, parameter.detach(), rtol=0, atol=1e-12)


def test_rounds_continue_torchs_steps():
    check_rounds_continue_torchs_steps()


def forgets(name):
    return lambda state: {n: torch.zeros_like(x) if name in n else x for n, x in state.items()}


@pytest.mark.parametrize("name", ["momentum", "mean", "squares", "steps"])
def test_each_part_of_what_is_kept_matters(name):
    with pytest.raises(AssertionError):
        check_rounds_continue_torchs_steps(forgets(name))


def test_ditto_keeps_one_memory_for_each_of_its_models():
    """v is trained as by one optimiser of torch along ∇f(v) + λ(v − w), w by another."""
    objective, data = Objective(mlp()), federation()
    own = SGD(momentum=0.8, optimizer_state="kept")
    algorithm = ALGORITHMS["ditto"](
        optimizer=own, weight=0.5, personal_lr=0.2, personal_steps=4, **SETTINGS
    )
    w = objective.initial()
    state = algorithm.agent_init(objective, {"model": w})
    assert set(state) == {"personal", "local.momentum", "personal.momentum"}
    one, other = (torch.nn.Parameter(w.clone()) for _ in range(2))
    steps = [plain_torch(own, one, 0.1), plain_torch(own, other, 0.2)]
    for round in (1, 2):
        at = own_context(objective, data, 1, round)
        result = algorithm.agent_update(at, {"model": w}, state)
        for t in range(4):
            (batch,) = at.batches.draw("outer", 6, step=t)
            one.grad = objective.grad(one.detach(), batch)
            steps[0].step()
        for t in range(4):
            (batch,) = at.batches.draw("personal", 6, step=t)
            other.grad = objective.grad(other.detach(), batch) + 0.5 * (other.detach() - w)
            steps[1].step()
        w, state = result.vectors["model"], result.state
        torch.testing.assert_close(w, one.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(state["personal"], other.detach(), rtol=0, atol=1e-12)


def test_what_is_kept_changes_rounds_of_agents_that_took_part_before():
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    for own in KEPT:
        kept, fresh = (
            history(fedavg(optimizer=replace(own, optimizer_state=state), **SETTINGS), engine, 4)
            for state in ("kept", "fresh")
        )
        repeated = [r.round for r in kept[1:] if set(r.cohort) & set(kept[1].cohort)][1]
        for one, other in zip(kept, fresh, strict=True):
            same_bits = torch.equal(one.server["model"], other.server["model"])
            assert same_bits == (one.round < repeated)


def test_optimizers_that_remember_nothing_or_of_parts_are_refused():
    with pytest.raises(InputError, match="no state to keep; set momentum"):
        SGD(optimizer_state="kept")
    with pytest.raises(InputError, match="agents of FedRep can't keep it"):
        ALGORITHMS["fedrep"](optimizer=KEPT[0])
    methods = {name: cls for name, cls in ALGORITHMS.items() if cls.kept_loops}
    assert {"fedavg", "gmeta", "fedadam", "reptile", "fedprox", "scaffold", "ditto"} <= set(methods)
    for cls in methods.values():
        for own in KEPT:
            algorithm = cls(optimizer=own, **SETTINGS)
            state = algorithm.agent_init(Objective(mlp()), {"model": torch.zeros(66)})
            assert {name for name in state if "." in name} == {
                f"{loop}.{name}" for loop in cls.kept_loops for name in own.initial(torch.zeros(2))
            }


def test_agents_of_adamw_that_took_part_unequally_are_not_stacked():
    engines = Engines(Objective(mlp()), federation(), 5)
    for own, obstacle in ((KEPT[0], False), (KEPT[1], False), (KEPT[2], True)):
        algorithm = fedavg(optimizer=own, **SETTINGS)
        assert (engines.obstacle("batched", algorithm) is not None) == obstacle
        assert obstacle or "keep no state" in engines.obstacle("gram", algorithm)
