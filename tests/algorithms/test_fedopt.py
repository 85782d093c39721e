"""FedOpt: server optimisers against torch's and the paper's formulas, beside any algorithm."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

import nufed
from nufed import InputError, Objective, fedavg, gmeta
from nufed.algorithms import (
    ALGORITHMS,
    AgentUpdate,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    GMeta,
    PFedMe,
    Reptile,
    Scaffold,
)
from nufed.algorithms.server_optimizer import (
    MOMENTUM,
    OPTIMIZER_STATE,
    VARIANCE,
    Adagrad,
    Adam,
    AvgM,
    Plain,
    Yogi,
)
from nufed.server import initial_server, next_server, to_send
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import Killed, context, federation, file_hashes, mlp, same, without_report

SETTINGS = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6, "adapt_lr": 0.2}


def history(algorithm, engine, rounds=4, start=None):
    w = engine.objective.initial()
    return list(train(algorithm, engine, w, rounds=rounds, participation=0.5, start=start))


def changes(count=10, size=5):
    """Δ of ten rounds: small at first, then large, then tiny, where Adam forgets and Yogi not."""
    generator = torch.Generator().manual_seed(3)
    scales = [0.01, 0.02, 3.0, 2.0, 0.5, 0.05, 0.01, 0.001, 0.001, 0.001]
    return [s * torch.randn(size, generator=generator, dtype=torch.float64) for s in scales[:count]]


def walk(optimizer, deltas, w=None):
    """The models after every round in which the algorithm's own change is Δ."""
    w = torch.linspace(-1, 2, 5, dtype=torch.float64) if w is None else w
    state, models = optimizer.initial(w), []
    for delta in deltas:
        w, state = optimizer.step(w, w + delta, state)
        models.append(w)
    return models


def torch_walk(make, deltas):
    """The same with an optimiser of torch, whose gradient is −Δ."""
    w = torch.nn.Parameter(torch.linspace(-1, 2, 5, dtype=torch.float64))
    optimizer, models = make([w]), []
    for delta in deltas:
        w.grad = -delta
        optimizer.step()
        models.append(w.detach().clone())
    return models


def formula_walk(deltas, eta, beta1, beta2, tau, yogi):
    """Algorithm 2 of Reddi et al., number by number."""
    w = [float(x) for x in torch.linspace(-1, 2, 5, dtype=torch.float64)]
    m, v, models = [0.0] * 5, [tau**2] * 5, []
    for delta in deltas:
        for i, d in enumerate(delta.tolist()):
            m[i] = beta1 * m[i] + (1 - beta1) * d
            if yogi:
                sign = (v[i] > d * d) - (v[i] < d * d)
                v[i] = v[i] - (1 - beta2) * d * d * sign
            else:
                v[i] = beta2 * v[i] + (1 - beta2) * d * d
            w[i] = w[i] + eta * m[i] / (v[i] ** 0.5 + tau)
        models.append(torch.tensor(w, dtype=torch.float64))
    return models


def all_close(found, right):
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def check_avgm_without_momentum_is_fedavg(cls):
    """β = 0, η = 1: to 4 ulp of the larger of w and the combined model."""
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(1)
        before, *sent = (torch.randn(999, generator=generator, dtype=dtype) for _ in range(4))
        before[:100] *= 1e4
        updates = [AgentUpdate(i, 1, 9, {"model": each}) for i, each in enumerate(sent)]
        plain = fedavg()
        algorithm = replace(plain, server_optimizer=cls(1.0, 0.0))
        server = {"model": before, **cls(1.0, 0.0).initial(before)}
        found = next_server(algorithm, context(), server, updates)["model"]
        right = next_server(plain, context(), {"model": before}, updates)["model"]
        ulp = torch.finfo(dtype).eps * torch.maximum(before.abs(), right.abs())
        assert bool(((found - right).abs() <= 4 * ulp).all())


def check_avgm_is_torchs_momentum(cls):
    found = walk(cls(0.7, 0.8), changes())
    all_close(found, torch_walk(lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.8), changes()))


def check_adagrad_is_torchs(cls):
    """With v = τ² at the start and eps = τ."""
    tau = 0.05
    found = walk(cls(0.3, 0.0, tau), changes())
    right = torch_walk(
        lambda p: torch.optim.Adagrad(p, lr=0.3, initial_accumulator_value=tau**2, eps=tau),
        changes(),
    )
    all_close(found, right)


def check_adagrad_with_momentum(cls):
    """m = β₁m + (1 − β₁)Δ in the place of Δ, v = τ² + ΣΔ²."""
    tau, beta, m, total = 0.05, 0.6, torch.zeros(5).double(), torch.zeros(5).double()
    w, right = torch.linspace(-1, 2, 5, dtype=torch.float64), []
    for delta in changes():
        m, total = beta * m + (1 - beta) * delta, total + delta * delta
        w = w + 0.3 * m / ((tau**2 + total).sqrt() + tau)
        right.append(w)
    all_close(walk(cls(0.3, beta, tau), changes()), right)


def check_adam(cls):
    settings = {"eta": 0.2, "beta1": 0.8, "beta2": 0.7, "tau": 0.03}
    all_close(
        walk(cls(0.2, 0.8, 0.03, 0.7), changes()), formula_walk(changes(), yogi=False, **settings)
    )


def check_yogi(cls):
    settings = {"eta": 0.2, "beta1": 0.8, "beta2": 0.7, "tau": 0.03}
    right = formula_walk(changes(), yogi=True, **settings)
    all_close(walk(cls(0.2, 0.8, 0.03, 0.7), changes()), right)
    adam = formula_walk(changes(), yogi=False, **settings)
    assert float((adam[-1] - right[-1]).norm()) > 0.01  # the sequence tells them apart


def check_only_the_model_is_optimised(kind):
    """Log-rates and control variates are as without an optimiser, for the same updates."""
    optimizer = Adam(0.1)
    for base in (gmeta(adapt_steps=2, rates_lr=0.5, **SETTINGS), Scaffold(**SETTINGS)):
        other = next(name for name in base.sends if name != "model")
        engine = DirectEngine(Objective(mlp()), federation(), 5)
        objective = engine.objective
        with_it = kind(base, optimizer)
        server = initial_server(with_it, objective, objective.initial())
        generator = torch.Generator().manual_seed(2)
        for number in range(3):
            vectors = [{n: moved(server[n], generator) for n in base.sends} for _ in range(3)]
            updates = [AgentUpdate(i, number, 9, v) for i, v in enumerate(vectors)]
            own = {name: server[name] for name in base.sends}
            plain = next_server(base, context(), own, updates)
            after = next_server(with_it, context(), server, updates)
            assert torch.equal(after[other], plain[other])
            state = {name: server[name] for name in OPTIMIZER_STATE}
            right, _ = optimizer.step(server["model"], plain["model"], state)
            assert torch.equal(after["model"], right)
            assert not torch.allclose(after["model"], plain["model"])
            server = after


def moved(vector, generator):
    return vector + torch.randn(vector.shape, generator=generator, dtype=vector.dtype)


def with_optimizer(base, optimizer):
    return replace(base, server_optimizer=optimizer)


@pytest.mark.parametrize(
    "check, cls",
    [
        (check_avgm_without_momentum_is_fedavg, AvgM),
        (check_avgm_is_torchs_momentum, AvgM),
        (check_adagrad_is_torchs, Adagrad),
        (check_adagrad_with_momentum, Adagrad),
        (check_adam, Adam),
        (check_yogi, Yogi),
        (check_only_the_model_is_optimised, with_optimizer),
    ],
)
def test_proof(check, cls):
    check(cls)


NAMED = {"avgm": FedAvgM, "adagrad": FedAdagrad, "adam": FedAdam, "yogi": FedYogi}


@pytest.mark.parametrize("name", NAMED)
def test_named_methods_are_fedavg_with_that_optimiser(name):
    engine = DirectEngine(Objective(mlp()), federation(), 5)
    cls, optimizer = (
        NAMED[name],
        {"avgm": AvgM, "adagrad": Adagrad, "adam": Adam, "yogi": Yogi}[name],
    )
    assert ALGORITHMS[f"fed{name}"] is cls
    both = [
        history(a, engine)
        for a in (cls(**SETTINGS), fedavg(server_optimizer=optimizer(), **SETTINGS))
    ]
    for one, other in zip(*both, strict=True):
        assert same(one.server, other.server)
    plain = history(fedavg(**SETTINGS), engine)
    assert not torch.equal(plain[-1].server["model"], both[0][-1].server["model"])


@pytest.mark.parametrize("optimizer", [AvgM(0.5), Adagrad(), Adam(0.05), Yogi(0.05)])
@pytest.mark.parametrize(
    "base",
    [
        fedavg(**SETTINGS),
        gmeta(adapt_steps=2, rates_lr=0.5, **SETTINGS),
        Scaffold(**SETTINGS),
        ALGORITHMS["pfedme"](**SETTINGS),
        ALGORITHMS["apfl"](**SETTINGS),
    ],
    ids=lambda base: type(base).__name__,
)
def test_resumed_in_the_middle_on_both_engines(optimizer, base):
    algorithm = replace(base, server_optimizer=optimizer)
    ends, objective = [], Objective(mlp())
    for kind in (DirectEngine, BatchedEngine):
        engine = kind(objective, federation(), 5)
        whole = history(algorithm, engine)
        resumed = history(algorithm, engine, start=history(algorithm, engine, 2)[-1])
        assert same(whole[-1].server, resumed[-1].server)
        assert float(whole[-1].server[MOMENTUM].norm()) > 0
        assert (VARIANCE in whole[-1].server) == (type(optimizer) is not AvgM)
        ends.append(whole[-1].server["model"])
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-9)


def test_a_run_killed_in_the_middle_resumes_to_the_same_files(tmp_path):
    methods = {
        "fedadam": {},
        "gmeta": {"adapt_steps": 1, "rates_lr": 0.1, "server_optimizer": "adam"},
        "scaffold": {"server_optimizer": "yogi"},
    }
    config = {
        "rounds": 4,
        "eval_every": 4,
        "checkpoint_every": 2,
        "workers": 1,
        "data": {"agents": 4, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
        "model": {"args": {"hidden": [8]}},
        "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6, "optimizer_lr": 0.05},
        "methods": methods,
    }
    left = 9  # events: in the middle of the second method

    def listener(event):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    with without_report():
        nufed.run(config, out=tmp_path / "whole")
        with pytest.raises(Killed):
            nufed.run(config, out=tmp_path / "begun", on_progress=listener)
        assert file_hashes(tmp_path / "begun") != file_hashes(tmp_path / "whole")
        nufed.resume(tmp_path / "begun")
    assert file_hashes(tmp_path / "begun") == file_hashes(tmp_path / "whole")


def test_optimiser_states_stay_at_the_server():
    algorithm = FedAdam(**SETTINGS)
    objective = Objective(mlp())
    server = initial_server(algorithm, objective, objective.initial())
    assert set(server) == {"model", MOMENTUM, VARIANCE}
    assert set(to_send(algorithm, server)) == {"model"}
    assert torch.equal(server[VARIANCE], torch.full_like(server["model"], 1e-3**2))


# wrong implementations


class Dampened(AvgM):
    """m ← βm + (1 − β)Δ, as adaptive methods have it."""

    def step(self, before, after, state):
        beta = self.optimizer_momentum
        m = beta * state[MOMENTUM] + (1 - beta) * (after - before)
        return before + self.optimizer_lr * m, {MOMENTUM: m}


class Nesterov(AvgM):
    def step(self, before, after, state):
        delta = after - before
        m = self.optimizer_momentum * state[MOMENTUM] + delta
        return before + self.optimizer_lr * (delta + self.optimizer_momentum * m), {MOMENTUM: m}


class AvgMDown(AvgM):
    """Δ taken as a gradient."""

    def step(self, before, after, state):
        m = self.optimizer_momentum * state[MOMENTUM] + (after - before)
        return before - self.optimizer_lr * m, {MOMENTUM: m}


class AvgMForgets(AvgM):
    def step(self, before, after, state):
        return super().step(before, after, self.initial(before))


class FromCombined(AvgM):
    """The momentum is added to the combined model, which counts Δ twice."""

    def step(self, before, after, state):
        m = self.optimizer_momentum * state[MOMENTUM] + (after - before)
        return after + self.optimizer_lr * m, {MOMENTUM: m}


@dataclass(frozen=True)
class Adaptive(Adam):
    """The right step in other words, of which wrong implementations change one line each."""

    def step(self, before, after, state):
        delta = after - before
        m = self.optimizer_momentum * state[MOMENTUM] + (1 - self.optimizer_momentum) * delta
        v = self.variance(state[VARIANCE], self.squares(delta, m))
        number = state.get("number", 0) + 1
        w = before + self.optimizer_lr * self.direction(delta, m, v, number)
        return w, {MOMENTUM: m, VARIANCE: v, "number": number}

    def squares(self, delta, m):
        return delta**2

    def direction(self, delta, m, v, number):
        return m / (v.sqrt() + self.optimizer_tau)


class FromMomentum(Adaptive):
    def squares(self, delta, m):
        return m**2


class BiasCorrected(Adaptive):
    def direction(self, delta, m, v, number):
        m = m / (1 - self.optimizer_momentum**number)
        v = v / (1 - self.optimizer_beta2**number)
        return m / (v.sqrt() + self.optimizer_tau)


class FromZero(Adam):
    def initial(self, w):
        return {MOMENTUM: torch.zeros_like(w), VARIANCE: torch.zeros_like(w)}


class FromTau(Adam):
    """v starts at τ instead of τ²."""

    def initial(self, w):
        return {MOMENTUM: torch.zeros_like(w), VARIANCE: torch.full_like(w, self.optimizer_tau)}


class WithoutMomentum(Adaptive):
    def direction(self, delta, m, v, number):
        return delta / (v.sqrt() + self.optimizer_tau)


class TauInside(Adaptive):
    def direction(self, delta, m, v, number):
        return m / (v + self.optimizer_tau**2).sqrt()


class WithoutRoot(Adaptive):
    def direction(self, delta, m, v, number):
        return m / (v + self.optimizer_tau)


class Down(Adaptive):
    def direction(self, delta, m, v, number):
        return -m / (v.sqrt() + self.optimizer_tau)


class YogiTurned(Yogi):
    def variance(self, v, squares):
        return v + (1 - self.optimizer_beta2) * squares * torch.sign(v - squares)


class AdagradOfMomentum(Adagrad):
    def step(self, before, after, state):
        m = self.optimizer_momentum * state[MOMENTUM] + (1 - self.optimizer_momentum) * (
            after - before
        )
        v = state[VARIANCE] + m**2
        return before + self.optimizer_lr * m / (v.sqrt() + self.optimizer_tau), {
            MOMENTUM: m,
            VARIANCE: v,
        }


class AdagradFromZero(Adagrad):
    def initial(self, w):
        return {MOMENTUM: torch.zeros_like(w), VARIANCE: torch.zeros_like(w)}


def on_all_vectors(base, optimizer):
    """The optimiser acts on whatever the server holds."""

    class Everything(type(base)):
        def server_update(self, context, server, updates):
            after = super().server_update(context, server, updates)
            for name in set(self.sends) - {"model"}:
                changed, _ = optimizer.step(
                    server[name], after[name], optimizer.initial(server[name])
                )
                after = {**after, name: changed}
            return after

    own = {f.name: getattr(base, f.name) for f in fields(base)}
    return Everything(**{**own, "server_optimizer": optimizer})


def not_at_all(base, optimizer):
    """The setting is held and never used."""

    class Unused(type(optimizer)):
        def step(self, before, after, state):
            return after, state

    return replace(base, server_optimizer=Unused(**vars(optimizer)))


MUTANTS = [
    (Dampened, check_avgm_is_torchs_momentum),
    (Nesterov, check_avgm_is_torchs_momentum),
    (AvgMDown, check_avgm_is_torchs_momentum),
    (AvgMDown, check_avgm_without_momentum_is_fedavg),
    (AvgMForgets, check_avgm_is_torchs_momentum),
    (FromCombined, check_avgm_without_momentum_is_fedavg),
    (FromCombined, check_avgm_is_torchs_momentum),
    (FromMomentum, check_adam),
    (BiasCorrected, check_adam),
    (FromZero, check_adam),
    (FromTau, check_adam),
    (WithoutMomentum, check_adam),
    (TauInside, check_adam),
    (WithoutRoot, check_adam),
    (Down, check_adam),
    (Yogi, check_adam),
    (Adam, check_yogi),
    (YogiTurned, check_yogi),
    (AdagradOfMomentum, check_adagrad_with_momentum),
    (AdagradFromZero, check_adagrad_is_torchs),
    (on_all_vectors, check_only_the_model_is_optimised),
    (not_at_all, check_only_the_model_is_optimised),
]


@pytest.mark.parametrize("mutant, check", MUTANTS, ids=lambda each: each.__name__)
def test_a_wrong_copy_is_rejected(mutant, check):
    with pytest.raises(AssertionError):
        check(mutant)


def test_the_step_that_wrong_implementations_change_is_right():
    check_adam(Adaptive)


def test_without_an_optimiser_the_model_is_the_algorithms_own():
    w, after = torch.zeros(2), torch.ones(2)
    assert Plain().step(w, after, {}) == (after, {}) and Plain().initial(w) == {}
    assert GMeta().server_optimizer == FedAvg().server_optimizer == Plain()


@pytest.mark.parametrize(
    "algorithm, given, allowed",
    [
        (FedAvg(server_optimizer=Adam()), "server_optimizer = adam", {"server_optimizer": Plain()}),
        *(
            (cls(server_lr=1.5), "server_lr = 1.5", {"server_lr": 1.0})
            for cls in (Scaffold, PFedMe, Reptile)
        ),
    ],
)
def test_a_server_that_would_extrapolate_running_statistics_is_refused(algorithm, given, allowed):
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    tracked, frozen = (Objective(module, running_stats=how) for how in ("tracked", "frozen"))
    with pytest.raises(InputError, match=f"{given}: .*running statistics.*GroupNorm"):
        initial_server(algorithm, tracked, tracked.initial())
    assert initial_server(algorithm, frozen, frozen.initial())
    assert initial_server(replace(algorithm, **allowed), tracked, tracked.initial())
