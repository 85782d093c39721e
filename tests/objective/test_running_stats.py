"""Tracked running statistics are coordinates of the flat vector that move as torch moves them."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nufed
from nufed import Federation, InputError, Objective, fedavg, load_adapted, load_bundle
from nufed.algorithms import AgentResult, Cost, Ditto, FedBN, FedPer, FedProx, Reptile, Scaffold
from nufed.algorithms.aggregation import ClippedMean
from nufed.algorithms.compression import Int8, TopK
from nufed.algorithms.local_optimizer import SGD
from nufed.data import as_samples
from nufed.lab.bundle.from_run import NoBundleError, make_bundle, make_personal
from nufed.lab.config import load_config
from nufed.lab.config.problem import Given, Problem, build_samples
from nufed.meta.fine_tuning import trajectory
from nufed.server import Rules, counted_parameters
from nufed.simulation import DirectEngine, Engines, train
from support import agent_context, batches, context, federation, update, without_report

LR = 0.3
SETTINGS = {"meta_lr": LR, "local_steps": 3, "batch_size": 6, "adapt_lr": 0.1}


def batch_norm():
    return nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def instance_norm():
    """Convolution, both norms, one without affine parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.Softplus(),
        nn.BatchNorm1d(4, affine=False),
        nn.Flatten(),
        nn.Linear(20, 3),
    ).double()


MAKERS = [batch_norm, instance_norm]


def seeded(count, seed=1):
    return [batch._replace(seed=i) for i, batch in enumerate(batches(count, seed=seed))]


def floats(module):
    return {n: t.clone() for n, t in module.state_dict().items() if t.is_floating_point()}


def torch_training(module, given, **settings):
    """The tensors of a module after one step of torch's SGD per batch."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), LR, **settings)
    for batch in given:
        optimizer.zero_grad()
        F.cross_entropy(module(batch.inputs.double()), batch.targets).backward()
        optimizer.step()
        yield floats(module)


def near(objective, w, right):
    found = objective.module(w).state_dict()
    for name, tensor in right.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-13), name


def statistics(objective, module):
    """Which coordinates are running statistics: those behind all parameters."""
    size = sum(p.numel() for p in module.parameters())
    return torch.arange(objective.size) >= size


@pytest.mark.parametrize("make", MAKERS)
def test_step_by_step_they_are_torchs(make):
    module = make()
    objective = Objective(module, running_stats="tracked")
    w, given = objective.initial(), seeded(4)
    near(objective, w, floats(module))
    for batch, right in zip(given, torch_training(module, given), strict=True):
        w = objective.track(w - LR * objective.grad(w, batch), batch, at=w)
        near(objective, w, right)
    models = list(trajectory(objective, objective.initial(), given, LR))
    near(objective, models[-1], right)
    moved = {n for n, t in floats(module).items() if not torch.allclose(t, right[n])}
    assert {n for n in right if "running" in n} <= moved


@pytest.mark.parametrize("make", MAKERS)
def test_local_training_is_torchs_with_momentum_and_weight_decay(make):
    """An optimiser touches no statistics: torch does not decay buffers either."""
    module, data = make(), federation()
    objective = Objective(module, running_stats="tracked")
    source = data.batches(2, 0, "train", 1)
    given = [source.draw("outer", 6, step=t)[0] for t in range(3)]
    own, received = agent_context(objective, source), {"shared": objective.initial()}
    for momentum, weight_decay in ((0.0, 0.0), (0.5, 0.1)):
        settings = {"momentum": momentum, "weight_decay": weight_decay}
        *_, right = torch_training(module, given, **settings)
        algorithm = FedPer(private="none", optimizer=SGD(**settings), **SETTINGS)
        state = algorithm.agent_init(objective, received)
        near(objective, algorithm.agent_update(own, received, state).vectors["shared"], right)
    *_, right = torch_training(module, given)
    result = fedavg(**SETTINGS).agent_update(own, {"model": objective.initial()}, {})
    near(objective, result.vectors["model"], right)


def test_what_an_algorithm_adds_to_gradients_does_not_reach_them():
    """SCAFFOLD's control variates would otherwise push statistics about."""
    module, data = batch_norm(), federation()
    objective = Objective(module, running_stats="tracked")
    stats = statistics(objective, module)
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    w, zero = objective.initial(), torch.zeros(objective.size, dtype=torch.float64)
    control = torch.where(stats, 1.0, 0.0).double()
    algorithm = Scaffold(**SETTINGS)
    found = [
        algorithm.agent_update(own, {"model": w, "control": zero}, {"control": c}).vectors["model"]
        for c in (zero, control)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_changed_in_place_and_no_gradient_reaches_them(make):
    module = make()
    before = copy.deepcopy(module.state_dict())
    objective = Objective(module, running_stats="tracked")
    w, (batch,) = objective.initial(), seeded(1)
    kept, stats = w.clone(), statistics(objective, module)
    assert stats.any() and len(w) == len(stats)
    v = torch.randn_like(w)
    for vector in (objective.grad(w, batch), objective.hvp(w, batch, v)):
        assert not vector[stats].any() and vector[~stats].any()
    tracked = objective.track(w, batch)
    assert torch.equal(tracked[~stats], w[~stats]) and not torch.equal(tracked[stats], w[stats])
    objective.value(w, batch)
    assert torch.equal(w, kept) and torch.equal(objective.initial(), kept)
    assert all(torch.equal(t, module.state_dict()[n]) for n, t in before.items())
    # a batch without a seed is evaluation
    assert torch.equal(objective.track(w, (batch.inputs, batch.targets)), w)


def test_gradients_and_products_against_autograd_on_the_formula():
    """In training mode, with the batch's mean and biased variance written out."""
    module = batch_norm()
    objective = Objective(module, running_stats="tracked")
    w, (batch,) = objective.initial() + 0.1, seeded(1)
    v = torch.randn_like(w)
    sizes = [20, 4, 4, 4, 12, 3, 4, 4]

    def value(w):
        w1, b1, scale, shift, w2, b2, _, _ = torch.split(w, sizes)
        z = batch.inputs @ w1.view(4, 5).T + b1
        z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() * scale + shift
        return F.cross_entropy(torch.tanh(z) @ w2.view(3, 4).T + b2, batch.targets)

    right, product = torch.autograd.functional.hvp(value, w, v)
    assert torch.allclose(objective.value(w, batch), right, rtol=1e-13)
    gradient = torch.autograd.functional.jacobian(value, w)
    assert torch.allclose(objective.grad(w, batch), gradient, rtol=0, atol=1e-13)
    assert torch.allclose(objective.hvp(w, batch, v), product, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", MAKERS)
def test_evaluation_uses_them_and_training_does_not(make):
    module = make()
    objective = Objective(module, running_stats="tracked")
    (batch,), stats = seeded(1), statistics(objective, module)
    w = objective.track(objective.initial(), batch)
    other = torch.where(stats, w + 1, w)
    assert torch.equal(objective.predict(w, batch.inputs), objective.module(w)(batch.inputs))
    outputs = [objective.predict(vector, batch.inputs) for vector in (w, other)]
    assert not torch.allclose(*outputs)
    assert torch.equal(objective.value(w, batch), objective.value(other, batch))


def test_float64_of_a_float32_objective():
    module = batch_norm().float()
    objective = Objective(module, running_stats="tracked").double
    w, given = objective.initial(), seeded(2)
    assert w.dtype == torch.float64
    for batch in given:
        w = objective.track(w - LR * objective.grad(w, batch), batch, at=w)
    *_, right = torch_training(module.double(), given)
    near(objective, w, right)


def test_a_cumulative_average_is_refused():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"running statistics of 1 can't be tracked.*momentum"):
        Objective(module, running_stats="tracked")
    Objective(module, running_stats="frozen")


def test_fedavg_averages_them():
    data, objective = federation(), Objective(batch_norm(), running_stats="tracked")
    engine = DirectEngine(objective, data, 5)
    algorithm = fedavg(**SETTINGS)
    w = objective.initial()
    _, after = train(algorithm, engine, w, rounds=1, participation=0.5)
    every = []
    for agent in after.cohort:
        source = data.batches(agent, 5, "train", 1)
        given = [source.draw("outer", 6, step=t)[0] for t in range(3)]
        *_, right = torch_training(objective.module(w), given)
        every.append(right)
    means = {name: sum(each[name] for each in every) / len(every) for name in every[0]}
    near(objective, after.server["model"], means)
    assert not torch.allclose(every[0]["1.running_mean"], means["1.running_mean"])


def pulled_training(module, centre, given, weight, most):
    """The tensors of a module after steps of torch's SGD near ``centre``, with clipping."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for batch in given:
        optimizer.zero_grad()
        pairs = zip(module.parameters(), centre.parameters(), strict=True)
        distance = sum((own - other.detach()).square().sum() for own, other in pairs)
        loss = F.cross_entropy(module(batch.inputs.double()), batch.targets)
        (loss + weight / 2 * distance).backward()
        norm = nn.utils.get_total_norm([own.grad for own in module.parameters()])
        for own in module.parameters():
            own.grad *= min(1, most / float(norm))
        optimizer.step()
    return floats(module)


class OwnPull(FedProx):
    """FedProx as a user would write it: its gradient is a function of whole vectors."""

    def agent_update(self, context, received, state):
        w = received["model"]

        def gradient(y, batch):
            return context.objective.grad(y, batch) + self.weight * (y - w)

        return AgentResult({"model": self.descend(context, w, gradient)}, state, Cost(3))


def test_proximal_terms_with_clipping_do_not_count_them():
    """Statistics far from the centre's would use up the norm to which a gradient is clipped."""
    objective, data = Objective(batch_norm(), running_stats="tracked"), federation()
    own = agent_context(objective, data.batches(2, 0, "train", 1))
    settings = {**SETTINGS, "optimizer": SGD(clip_norm=0.2), "weight": 0.5}
    w, v = objective.initial(), objective.initial()
    w[objective.counted() :] += 30
    given = {
        purpose: [own.batches.draw(purpose, 6, step=t)[0] for t in range(3)]
        for purpose in ("outer", "personal")
    }
    nets = objective.module(w), objective.module(v)
    right = pulled_training(nets[0], nets[0], given["outer"], 0.5, 0.2)
    for algorithm in (FedProx(**settings), OwnPull(**settings)):
        near(objective, algorithm.agent_update(own, {"model": w}, {}).vectors["model"], right)
    ditto = Ditto(**settings, personal_lr=LR, personal_steps=3)
    found = ditto.agent_update(own, {"model": w}, {"personal": v}).state["personal"]
    near(objective, found, pulled_training(nets[1], nets[0], given["personal"], 0.5, 0.2))


def ten_times_larger(data, agent):
    """The same data with the inputs of one agent times ten."""
    inputs = data.samples.inputs.clone()
    inputs[data.split.train[agent]] *= 10
    return Federation(as_samples((inputs, data.samples.targets.numpy())), data.split)


def test_norms_of_changes_do_not_count_them():
    """An agent with inputs of another scale moves its parameters like others."""
    data = ten_times_larger(federation(), 2)
    objective = Objective(batch_norm(), running_stats="tracked")
    engine = DirectEngine(objective, data, 5)
    rules = Rules(max_update_norm=3.0)
    for algorithm in (fedavg(**SETTINGS), FedPer(**SETTINGS)):
        start = objective.initial()
        before, after = train(algorithm, engine, start, rounds=1, participation=1.0, rules=rules)
        assert not after.rejected
        (name,) = algorithm.sends
        number = counted_parameters(algorithm, objective, after.server)[name]
        moved = (after.server[name] - before.server[name])[:number]
        assert after.update_norm == pytest.approx(float(moved.norm()))


@dataclass(frozen=True)
class Nearest:
    """The update with the smallest change."""

    def combine(self, updates, name, before):
        return min((own.vectors[name] for own in updates), key=lambda v: float((v - before).norm()))


@pytest.mark.parametrize("rule", [ClippedMean(), Nearest()])
def test_robust_rules_combine_them_apart(rule):
    """So that norms count parameters alone, and statistics are still bounded."""
    rng = torch.Generator().manual_seed(0)
    before = torch.randn(8, generator=rng, dtype=torch.float64)
    sent = [before + torch.randn(8, generator=rng, dtype=torch.float64) for _ in range(5)]
    sent[1][6:] += 40
    updates = [update(agent, vector) for agent, vector in enumerate(sent)]
    algorithm = Reptile(**SETTINGS, aggregation=rule)
    at = replace(context(), counted={"model": 6})
    found = algorithm.server_update(at, {"model": before}, updates)["model"]
    blocks = [
        rule.combine([update(a, v[own]) for a, v in enumerate(sent)], "model", before[own])
        for own in (slice(6), slice(6, 8))
    ]
    right = before + algorithm.server_lr * (torch.cat(blocks) - before)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-14)
    assert float((found - before)[6:].norm()) < 5


@pytest.mark.parametrize("codec", [Int8(), TopK(0.2)])
def test_codecs_send_them_as_they_are(codec):
    """Rounded to a large block, or sent a round late, a small variance would become negative."""
    data = ten_times_larger(federation(), 2)
    objective = Objective(batch_norm(), running_stats="tracked")
    engine, w = DirectEngine(objective, data, 5), objective.initial()
    plain, packed = (
        list(train(fedavg(**SETTINGS), engine, w, rounds=2, participation=1.0, rules=rules))
        for rules in (Rules(), Rules(codec=codec))
    )
    number = objective.counted()
    same = [
        torch.equal(a.server["model"][:number], b.server["model"][:number])
        for a, b in zip(plain, packed, strict=True)
    ]
    assert same == [True, False, False]
    assert torch.equal(plain[1].server["model"][number:], packed[1].server["model"][number:])
    assert packed[2].update_bytes > 8 * (objective.size - number)
    for agent in data.split.seen:
        assert not packed[2].states.get(agent)["residual/model"][number:].any()


def test_of_parts_of_the_model():
    objective = Objective(instance_norm(), running_stats="tracked")
    assert objective.counted() == sum(p.numel() for p in instance_norm().parameters())
    for name in ("all", "head", "norm", "body", "none", "*.running_var"):
        part = objective.part(name)
        inside = part.take(torch.arange(objective.size)) < objective.counted()
        assert objective.counted(part) == int(inside.sum())
        assert inside.tolist() == sorted(inside.tolist(), reverse=True)  # they come first


@pytest.mark.parametrize("make", MAKERS)
def test_stacks_of_agents_are_left_to_the_direct_engine(make):
    engines = Engines(Objective(make(), running_stats="tracked"), federation(), seed=5)
    for algorithm in (fedavg(**SETTINGS), FedBN(**SETTINGS)):
        assert engines.obstacle("batched", algorithm) and engines.obstacle("gram", algorithm)
        assert engines.choose(algorithm, "auto") == "direct"
        with pytest.raises(InputError, match=r'engine = "batched": .*use "direct"'):
            engines.choose(algorithm, "batched")


def digits_net():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"local_epochs": 1, "batch_size": 10},
            "agent c has 31 training samples and the batch_size of fedavg is 10: its last",
        ),
        ({"batch_size": 1}, "the batch_size of fedavg is 1: its last batch has one sample"),
    ],
)
def test_batches_of_one_sample_are_refused_before_training(tmp_path, settings, sentence):
    config = {
        "rounds": 2,
        "workers": 1,
        "baselines": [],
        "data": {"test": 0.25},
        "model": {"running_stats": "tracked"},
        "methods": {"fedavg": settings},
    }
    digits = build_samples(load_config({}).data)
    owners = np.repeat(["a", "b", "c"], [39, 40, 41])  # 30, 30 and 31 of them to train on
    given = {"data": (digits.inputs[:120], digits.targets[:120], owners), "out": tmp_path / "run"}
    with pytest.raises(InputError, match=sentence) as caught:
        nufed.run(config, model=digits_net, **given)
    assert "local_steps instead of local_epochs" in str(caught.value)
    assert not (tmp_path / "run").exists()
    with without_report():  # a module that can be trained on one sample
        nufed.run(config, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **given)


def test_a_whole_run_its_personal_models_and_its_bundle(tmp_path):
    config = {
        "rounds": 3,
        "seeds": [3],
        "participation": 0.5,
        "workers": 1,
        "baselines": [],
        "eval_steps": 2,
        "data": {"agents": 6, "samples_per_agent": 40, "dirichlet": 0.5, "unseen_agents": 1},
        "model": {"running_stats": "tracked"},
        "method": {"meta_lr": 0.1, "adapt_lr": 0.05, "batch_size": 10},
        "methods": {name: {"algorithm": name} for name in ("fedavg", "gmeta", "fedbn", "fedbabu")},
    }
    given = {"model": digits_net}
    with without_report():
        run = nufed.run(config, out=tmp_path / "run", **given)
    federation = Problem.make(run.config, Given(**given), seeds=[3]).federations[3]
    for method in config["methods"]:
        for scores in run.methods[method][3].final:
            made = make_personal(run, method, scores.agent, **given)
            answers = made.predict(federation.samples.inputs[federation.scored_rows(scores.agent)])
            right = federation.samples.targets[federation.scored_rows(scores.agent)].tolist()
            hits = sum(int(p.answer) == y for p, y in zip(answers, right, strict=True))
            assert hits / len(right) == scores.score[run.config.steps_of(method)[0]]
    files = [tmp_path / f"agent-{agent}" for agent in range(2)]
    for agent, file in enumerate(files):
        make_personal(run, "fedbn", agent, **given).save(file)
    norms = [load_adapted(f, module=digits_net()).module.get_submodule("model")[2] for f in files]
    assert not torch.equal(norms[0].running_mean, norms[1].running_mean)
    make_bundle(run, "fedavg", **given).save(tmp_path / "bundle.nufed")
    bundle = load_bundle(tmp_path / "bundle.nufed", module=digits_net())
    rows = federation.split.train[0]
    own = federation.samples.inputs[rows], federation.samples.targets[rows]
    adapted = bundle.adapt(*own, steps=1)
    norm = adapted.module.get_submodule("model")[2]
    assert not torch.equal(norm.running_mean, bundle.module[2].running_mean)
    with pytest.raises(NoBundleError, match="fedbn can't be bundled"):
        make_bundle(run, "fedbn", **given)
    assert make_bundle(run, "fedbabu", **given).about.adapt.steps == 2
