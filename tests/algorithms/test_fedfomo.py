"""FedFomo: weights by hand, what is held out, and which models the server sends."""

from dataclasses import dataclass, replace
from itertools import pairwise
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from nufed import Objective
from nufed.algorithms import FedFomo
from nufed.algorithms.agent_rows import row_of, with_rows
from nufed.algorithms.protocol import Context
from nufed.server import Downlink, to_send
from nufed.simulation import DirectEngine, train
from support import Point, agent_context, context, federation, mlp, quadratic_loss, quadratics

SHARED = {"meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
OWN = {"models": 2, "held_out": 0.3, "exploration": 0.5, "exploration_decay": 0.1, **SHARED}
START = torch.tensor([4.0, 0.0, 0.0], dtype=torch.float64)


def at_an_agent(agent=1, cls=FedFomo, **settings):
    """The algorithm, the context of an agent with f(w) = ½(w − b)ᵀA(w − b), b and f."""
    data, pairs = quadratics()
    objective = Objective(Point(3), quadratic_loss)
    a, b = pairs[agent]
    own = agent_context(objective, data.batches(agent, 0, "train", 1))
    algorithm = cls(**{**OWN, **settings})
    return algorithm, own, b, lambda w: 0.5 * (w - b) @ a @ (w - b)


def check_the_weights_by_hand(cls):
    """Two models that are better than θ at different distances, and one that is worse."""
    algorithm, own, b, f = at_an_agent(cls=cls)
    better, local = START + 0.6 * (b - START) + 0.1, START + 0.2 * (b - START)
    worse = START - 0.1 * (b - START)
    assert max(f(better), f(local)) < f(START) < f(worse)
    got = {"models": torch.stack([worse, better]), "known": torch.ones(2)}
    w, weights = algorithm.mixed(own, got, {"start": START, "local": local})
    gains = [(f(START) - f(x)) / (x - START).norm() for x in (better, local)]
    shares = [gain / sum(gains) for gain in gains]
    assert torch.allclose(w, shares[0] * better + shares[1] * local, rtol=1e-12, atol=0)
    assert weights.tolist() == pytest.approx([0, float(shares[0]), float(shares[1])], rel=1e-12)


def check_the_weights_sum_to_one(cls):
    """And none is negative; where no model is better, θ stays."""
    algorithm, own, b, f = at_an_agent(cls=cls)
    generator, moved = torch.Generator().manual_seed(0), 0
    for number in range(30):
        *models, local = b + 0.1 * number * torch.randn(
            3, 3, generator=generator, dtype=torch.float64
        )
        state = {"start": START, "local": local}
        got = {"models": torch.stack(models), "known": torch.ones(2)}
        w, weights = algorithm.mixed(own, got, state)
        assert float(weights.sum()) == pytest.approx(1, abs=1e-12) and float(weights.min()) >= 0
        if min(map(f, [*models, local])) < f(START):
            moved += 1
            assert torch.allclose(w, weights @ torch.stack([*models, local]), atol=1e-12)
        else:
            assert torch.equal(w, START) and weights.tolist() == [0, 0, 1]
    assert 0 < moved < 30
    same = {"models": START.expand(2, 3), "known": torch.ones(2)}
    for lower in (0.0, 1e-16):  # neither 0/0, nor rounding of a loss over 0
        values = iter([1.0, *3 * [1.0 - lower]])
        with patch.object(Objective, "value", lambda *of, v=values: START.new_tensor(next(v))):
            w, weights = algorithm.mixed(own, same, {"start": START, "local": START})
        assert torch.equal(w, START) and weights.tolist() == [0, 0, 1]


@dataclass
class Watched:
    """Batches that note the places that are taken."""

    source: object
    trained: list
    held: list

    agent = 2

    def take(self, places, seed=None):
        (self.held if seed is None else self.trained).append(sorted(places.tolist()))
        return self.source.take(places, seed)

    def stream(self, purpose, step=0):
        return self.source.stream(purpose, step)

    def targets(self):
        return self.source.targets()


def check_held_out_samples_are_never_trained_on(cls):
    data, objective = federation(), Objective(mlp())
    for more in ({}, {"local_epochs": 2}, {"batch_size": 40}):
        algorithm, held = cls(**{**OWN, **more}), set()
        for round in (1, 2, 3):
            watched = Watched(data.batches(2, 0, "train", round), [], [])
            own = agent_context(objective, watched, round)
            w = objective.initial()
            models = torch.stack([w, w + 0.01])
            got = {"models": models, "known": torch.ones(2)}
            result = algorithm.agent_update(own, got, {"start": w, "local": w})
            (places,) = {tuple(each) for each in watched.held}
            held.add(places)
            trained = {place for batch in watched.trained for place in batch}
            assert trained and not trained & set(places) and len(places) == 5
            assert result.cost.gradients == len(watched.trained)
            if "local_epochs" in more:
                assert len(trained) == 13 and len(watched.trained) == 6
        assert len(held) == 1


def heard_of(algorithm, agents=6):
    """A server that has heard of agents 0, 10, 20, …, with models of that number."""
    objective = Objective(Point(3), quadratic_loss)
    server = algorithm.server_init(objective, objective.initial())
    rows = {10 * i: {"models": torch.full((3,), 10.0 * i).double()} for i in range(agents)}
    affinity = torch.rand(agents, agents, generator=torch.Generator().manual_seed(1)).double()
    return {**with_rows(server, rows), "affinity": affinity}


def sent(algorithm, server, agent, round=1, seed=0):
    down = Downlink.of(to_send(algorithm, server, Context(round, 6, 3, seed=seed)))
    got = down.to(agent)
    assert len(got["models"]) == len(got["known"]) == algorithm.models
    return [int(w[0]) for w, known in zip(*got.values(), strict=True) if known]


def check_the_most_valued_models_are_sent(cls):
    algorithm = cls(**{**OWN, "exploration": 0.0, "models": 3})
    server = heard_of(algorithm)
    for row in range(6):
        order = server["affinity"][row].argsort(descending=True).tolist()
        assert sent(algorithm, server, 10 * row) == [10 * r for r in order if r != row][:3]
    assert len(set(sent(algorithm, server, 55))) == 3  # unheard of: any
    assert sorted(sent(cls(**{**OWN, "models": 8}), server, 20)) == [0, 10, 30, 40, 50]
    assert sent(algorithm, heard_of(algorithm, 0), 20) == []  # the first round


def check_exploration_is_random_and_fades(cls):
    """A share ε_k of first places is uniform over the others."""
    algorithm = cls(**{**OWN, "models": 1})
    server = heard_of(algorithm)
    best = 10 * max((float(x), r) for r, x in enumerate(server["affinity"][2]) if r != 2)[1]
    for round, explored in ((1, 0.4), (4, 0.1), (9, 0.0)):
        first = [sent(algorithm, server, 20, round, seed)[0] for seed in range(600)]
        others = [first.count(10 * r) for r in range(6) if 10 * r not in (20, best)]
        assert first.count(20) == 0 and sum(others) == pytest.approx(480 * explored, abs=50)
        assert max(others) - min(others) < 40


def check_training_against_an_independent_loop(cls):
    """All models, states and values of six rounds, to 1e-12."""
    data = federation()
    engine = DirectEngine(Objective(mlp()), data, 5)
    algorithm, objective = cls(**{**OWN, "exploration": 0.0, "models": 3}), engine.objective
    rounds = list(train(algorithm, engine, objective.initial(), rounds=6, participation=0.5))
    w0 = objective.initial()
    last, values, state, crossed, fewer = {}, {}, {}, 0, 0
    for before, progress in pairwise(rounds):
        down = Downlink.of(to_send(algorithm, before.server, Context(progress.round, 6, 3, seed=5)))
        sends = {}
        for i in progress.cohort:
            known = sorted((j for j in last if j != i), key=lambda j: -values.get((i, j), 0.0))
            places = [
                [j for j in known if torch.allclose(last[j], w, rtol=0, atol=1e-12)]
                for w in down.to(i)["models"][: len(known)]
            ]
            assert all(places)
            of = [first for first, *_ in places]
            assert sorted(values.get((i, j), 0.0) for j in of) == sorted(
                values.get((i, j), 0.0) for j in known[:3]
            )
            fewer += len(known) < 3
            start, own = state.get(i, (w0, w0))
            n = len(data.split.train[i])
            held = [round(x) for x in np.linspace(0, n - 1, round(0.3 * n)).tolist()]
            source = data.batches(i, 5, "train", progress.round)
            batch = source.take(np.array(held))
            candidates, gains = [*(last[j] for j in of), own], []
            for w in candidates:
                gain = float(objective.value(start, batch) - objective.value(w, batch))
                gains.append(gain / float((w - start).norm()) if gain > 0 else 0.0)
            total = sum(gains) or 1.0
            w = start
            for gain, each in zip(gains, candidates, strict=True):
                w = w + gain / total * (each - start)
            for j, gain in zip(of, gains, strict=False):
                if gain:
                    values[i, j] = values.get((i, j), 0.0) + gain / total
                    crossed += 1
            state[i], fit = (w,), np.array([p for p in range(n) if p not in held])
            for t in range(2):
                rng = source.stream("outer", t)
                chosen = source.take(rng.permutation(fit)[:6], int(rng.integers(2**63)))
                w = w - 0.1 * objective.grad(w, chosen)
            sends[i] = w
            state[i] = (state[i][0], w)
        last |= sends
    server = rounds[-1].server
    assert crossed > 5 and fewer > 3 and server["agents"].tolist() == sorted(last)
    for i, w in last.items():
        kept = rounds[-1].states.get(i)
        assert torch.allclose(server["models"][row_of(server, i)], w, rtol=0, atol=1e-12)
        assert torch.allclose(kept["start"], state[i][0], rtol=0, atol=1e-12)
        for j in last:
            value = float(server["affinity"][row_of(server, i), row_of(server, j)])
            assert value == pytest.approx(values.get((i, j), 0.0), abs=1e-12)


CHECKS = (
    check_the_weights_by_hand,
    check_the_weights_sum_to_one,
    check_held_out_samples_are_never_trained_on,
    check_the_most_valued_models_are_sent,
    check_exploration_is_random_and_fades,
    check_training_against_an_independent_loop,
)
BY_HAND, SUM, HELD, VALUED, EXPLORED, LOOP = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedFomo)


# wrong implementations


class Near(Objective):
    """Distances are all 1."""

    def norm(self, w):
        return torch.ones_like(super().norm(w))


class NotDividedByDistance(FedFomo):
    def mixed(self, context, received, state):
        near = Near(Point(3), quadratic_loss)
        return super().mixed(replace(context, objective=near), received, state)


class NotNormalised(FedFomo):
    def mixed(self, context, received, state):
        w, weights = super().mixed(context, received, state)
        return state["start"] + 0.5 * (w - state["start"]), weights / 2


class WithoutItsOwn(FedFomo):
    """The own model is no candidate."""

    def mixed(self, context, received, state):
        return super().mixed(context, received, {**state, "local": state["start"]})


class CountsItsOwnAgain(FedFomo):
    """Places without a model hold copies of the agent's own, which are tried."""

    def downlink(self, context, server, agent):
        down, row = super().downlink(context, server, agent), row_of(server, agent)
        own = server["model"] if row is None else server["models"][row]
        models = torch.where(down["known"].unsqueeze(1) > 0, down["models"], own)
        return {"models": models, "known": torch.ones_like(down["known"])}


class NoDistance(Objective):
    """The smallest distance is that of the smallest numbers."""

    def norm(self, w):
        return super().norm(w) + torch.finfo(w.dtype).tiny


class DividesByZero(FedFomo):
    """A gain that is rounding counts, whatever the distance."""

    def mixed(self, context, received, state):
        near = NoDistance(Point(3), quadratic_loss)
        return super().mixed(replace(context, objective=near), received, state)


class TrainsOnAll(FedFomo):
    """Held-out samples are trained on, too."""

    def local_batches(self, context, purpose="outer"):
        for t in range(self.local_steps):
            places = context.batches.stream(purpose, t).permutation(len(context.batches.targets()))
            yield context.batches.take(places[: self.batch_size], 0)


class LeastValuedFirst(FedFomo):
    """As in FLGo."""

    def picked(self, context, server, agent):
        turned = {**server, "affinity": -server["affinity"]}
        return super().picked(context, turned, agent)


class NeverExplores(FedFomo):
    def picked(self, context, server, agent):
        return super().picked(replace(context, round=0), server, agent)


class ValuesOfOthers(FedFomo):
    """A value is added to the column in place of the row."""

    def server_update(self, context, server, updates):
        after = super().server_update(context, server, updates)
        return {**after, "affinity": after["affinity"].T.clone()}


MUTANTS = [
    (NotDividedByDistance, BY_HAND),
    (NotNormalised, SUM),
    (WithoutItsOwn, BY_HAND),
    (CountsItsOwnAgain, LOOP),
    (DividesByZero, SUM),
    (TrainsOnAll, HELD),
    (LeastValuedFirst, VALUED),
    (NeverExplores, EXPLORED),
    (ValuesOfOthers, LOOP),
]


@pytest.mark.parametrize(("wrong", "rejects"), MUTANTS)
def test_a_wrong_copy_is_rejected(wrong, rejects):
    with pytest.raises(AssertionError):
        rejects(wrong)


def test_the_smallest_parts():
    algorithm = FedFomo(**OWN)
    for number, (fit, held) in {1: ([0], [0]), 2: ([1], [0]), 4: ([1, 2, 3], [0])}.items():
        own = agent_context(None, Mock(targets=lambda n=number: range(n)))
        assert [part.tolist() for part in algorithm.parts(own)] == [fit, held]


def test_a_newcomer_mixes_models_of_others():
    objective, algorithm = Objective(mlp()), FedFomo(**OWN)
    engine = DirectEngine(objective, federation(unseen=1), 5)
    *_, last = train(algorithm, engine, objective.initial(), rounds=4, participation=0.6)
    (agent,) = engine.federation.split.unseen
    down = Downlink.of(to_send(algorithm, last.server, context())).to(agent)
    own = agent_context(objective, engine.federation.batches(agent, 5, "evaluate"))
    new = algorithm.personal_model(own, down, None)
    assert new.cost.gradients == 2 and algorithm.shipped(objective, down) is None
    start, weights = algorithm.mixed(own, down, algorithm.agent_init(objective, down))
    assert weights[:-1].max() > 0 and not torch.equal(start, objective.initial())
    assert torch.equal(new.model, algorithm.descend(own, start))
