"""The choice of engine, and that it does not change the model."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from nufed import Exact, Federation, FirstOrder, GMeta, InputError, Objective, Samples
from nufed.algorithms import ALGORITHMS, Ditto, FedAvg, PerFedAvg, Personal, Scaffold
from nufed.algorithms.protocol import Checks
from nufed.data.text import next_token_loss
from nufed.evaluate import Measure
from nufed.lab.config import load_config
from nufed.lab.config.problem import build_federation, build_samples
from nufed.models import cnn_groupnorm, fcnn, gru, logistic
from nufed.objective.micro_batches import IGNORED
from nufed.simulation import ENGINES, GRAM, DirectEngine, Engines, choose_engine, train
from support import federation, uneven_federation

METHOD = GMeta(
    adapt_steps=2, adapt_lr=0.01, meta_lr=0.01, local_steps=4, batch_size=40, curvature=Exact()
)


def wide(agents=3, inputs=1500, samples=80):
    return federation(agents, samples, inputs=inputs)


def digits():
    config = load_config("quickstart")
    samples = build_samples(config.data)
    return build_federation(config, samples, 0)


def engines(module, data, visits=20.0, **settings):
    return Engines(Objective(module), data, 0, visits=visits, **settings)


def net(data, hidden=(80, 60)):
    return fcnn(data.samples.input_shape, 3, hidden=hidden)


def test_small_networks_are_stacked():
    data = digits()
    method = GMeta(
        adapt_steps=3, adapt_lr=0.05, meta_lr=0.3, local_steps=4, batch_size=10, curvature=Exact()
    )
    assert engines(fcnn((8, 8), 10, hidden=(32,)), data).choose(method, "auto") == "batched"


def test_wide_first_layers_use_gram_space_if_agents_train_often_enough():
    data = wide()
    for visits, right in ((20, "gram_onednn"), (1e-3, "batched")):
        chosen = engines(net(data), data, visits).choose(METHOD, "auto")
        assert chosen == right
    big = wide(inputs=4000)  # two models are more than a small stack
    assert engines(net(big), big, 1e-3).choose(METHOD, "auto") == "closed_form"
    assert engines(net(big), big).choose(METHOD, "auto") == "gram_onednn"
    with_norm = nn.Sequential(nn.Linear(4000, 220), nn.LayerNorm(220), nn.Linear(220, 3))
    large = engines(with_norm, big, 1e-3)  # 40·4000·220 > 2²⁵
    assert large.choose(METHOD, "auto") == "direct_onednn"


def test_derivatives_are_written_out_for_agents_that_cannot_be_stacked():
    data = wide()
    for name in ("knn_per", "fedala", "fedrod"):
        assert engines(net(data), data).choose(ALGORITHMS[name](), "auto") == "closed_form"
    with_norm = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    with pytest.raises(InputError, match="no fully connected network"):
        engines(with_norm, data).choose(METHOD, "closed_form")


def test_sequences_are_stacked_unless_the_loss_ignores_tokens():
    tokens = torch.randint(0, 9, (48, 6))
    data = Federation(Samples(tokens[:, :-1], tokens[:, 1:]), federation(2, 24).split)
    module = gru((5,), 9, hidden=(4,), vocabulary=9, next_token=True)
    fedavg = FedAvg(meta_lr=0.1, local_steps=2, batch_size=8)
    chosen = Engines(Objective(module, next_token_loss), data, 0)
    assert chosen.choose(fedavg, "auto") == "batched"
    data.samples.targets[3, 2] = IGNORED
    ignoring = Engines(Objective(module, next_token_loss), data, 0)
    assert ignoring.choose(fedavg, "auto") == "direct"
    with pytest.raises(InputError, match="of which the loss ignores some"):
        ignoring.choose(fedavg, "batched")


def test_networks_too_large_for_stacks_have_their_derivatives_written_out():
    data = wide(inputs=2000)
    scaffold = Scaffold(meta_lr=0.01, local_steps=4, batch_size=40)
    module = net(data)
    assert engines(module, data).choose(scaffold, "auto") == "closed_form"
    softplus = nn.Sequential(*module, nn.Softplus())  # has no closed form
    assert engines(softplus, data).choose(scaffold, "auto") == "direct"


def test_small_models_in_gram_space_are_evaluated_in_stacks():
    data = federation(12, 60)
    these, states = engines(net(data, hidden=(8,)), data), {agent: {} for agent in range(12)}
    gram, direct = these.get("gram"), these.get("direct")
    assert [len(chunk) for chunk in gram.chunks(METHOD, list(states))] == [4, 4, 4]
    assert [len(chunk) for chunk in gram.scored_chunks(METHOD, list(states))] == [12]
    server, how = (
        {"model": these.objective.initial()},
        {"steps": 2, "measure": Measure("loss", None)},
    )
    for got, right in zip(
        *(engine.evaluate(METHOD, server, states, **how) for engine in (gram, direct)), strict=True
    ):
        assert got.loss == pytest.approx(right.loss, rel=1e-4)
    large = engines(net(wide()), wide()).get("gram")
    assert large.scored_chunks(METHOD, [0, 1, 2]) == large.chunks(METHOD, [0, 1, 2]) == [[0, 1, 2]]


def test_no_gram_matrix_for_agents_with_many_samples_and_few_batches():
    data = wide(agents=2, samples=1200)
    once = GMeta(
        adapt_steps=0,
        adapt_lr=0.01,
        meta_lr=0.01,
        local_steps=1,
        batch_size=40,
        curvature=FirstOrder(),
    )
    assert engines(net(data), data).choose(once, "auto") not in GRAM
    assert engines(net(data), data).choose(METHOD, "auto") == "gram_onednn"


def images():
    data = federation(4, 60, inputs=64)
    samples = Samples(data.samples.inputs.view(-1, 8, 8), data.samples.targets, tuple("abc"))
    return Federation(samples, data.split)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x.flatten(1))


def small(batch_size=20):
    return GMeta(
        adapt_steps=2,
        adapt_lr=0.05,
        meta_lr=0.1,
        local_steps=2,
        batch_size=batch_size,
        curvature=Exact(),
    )


def test_convolutions_and_random_layers_are_run_directly():
    data = images()
    assert engines(cnn_groupnorm((8, 8), 3), data).choose(small(), "auto") == "direct"
    assert engines(Drops(), data).choose(small(), "auto") == "direct"
    still = Drops()
    still.layers[1].p = 0.0
    assert engines(still, data).choose(small(), "auto") == "batched"


class Alone(GMeta):
    """Does not declare that its agents may be stacked."""

    combines = None


@dataclass(frozen=True)
class Mixing(FedAvg):
    """Declares that its agents may be stacked, but takes a norm over all of them."""

    combines = "elementwise"

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        w, before = result.vectors["model"], received["model"]
        change = w - before
        return replace(result, vectors={"model": before + change / change.norm()})


@dataclass(frozen=True)
class Forgetting(FedAvg):
    """Declares that it combines vectors linearly, but draws more batches than it declares."""

    def update_draws(self):
        return super().update_draws()[:-3]


@dataclass(frozen=True)
class Squinting(FedAvg):
    """Correct in stacked training, wrong in stacked evaluation."""

    combines = "elementwise"

    def fine_tune(self, context, received, personal, steps, scale=1.0):
        for own in super().fine_tune(context, received, personal, steps, scale):
            yield {"model": own["model"] / own["model"].norm()}


@dataclass(frozen=True, kw_only=True)
class MixingControls(Scaffold):
    """Right as long as all control variates are 0: divides by a norm over the whole stack."""

    def agent_update(self, context, received, state):
        own = {"control": state["control"] / (1 + state["control"].norm())}
        return super().agent_update(context, received, own)


@dataclass(frozen=True)
class MixingPersonal(Ditto):
    """Right as long as all personal models are equal: averages them over the stack."""

    def agent_update(self, context, received, state):
        v = state["personal"]
        own = {"personal": v.mean(dim=0).expand_as(v) if v.dim() > 1 else v}
        return super().agent_update(context, received, own)


@dataclass(frozen=True)
class MixingUse(Ditto):
    """Right in training; in evaluation, averages personal models over the stack."""

    def personal_model(self, context, received, state):
        if state is None or state["personal"].dim() == 1:
            return super().personal_model(context, received, state)
        return Personal({"model": state["personal"].mean(dim=0).expand_as(state["personal"])})


@pytest.mark.parametrize("wrong", [MixingControls, MixingPersonal, MixingUse])
def test_a_trial_detects_a_mix_of_agents_states(wrong):
    settings = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
    these = engines(logistic((5,), 3), federation())
    (right,) = wrong.__bases__
    assert these.choose(right(**settings), "auto") == "batched"
    assert these.choose(wrong(**settings), "auto") == "closed_form"


@pytest.mark.parametrize("sizes", [(12, 16, 24, 24, 12, 24), (12, 16, 40, 24, 20, 24)])
def test_a_trial_stacks_two_agents_of_uneven_ones(sizes):
    """Agents with batches of different sizes are never stacked, and would show nothing."""
    data = uneven_federation(sizes)
    settings = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 2, "batch_size": 40}
    for unseen in ((), (3, 5)):
        own = Federation(data.samples, replace(data.split, unseen=unseen), data.small_agents)
        these = engines(logistic((5,), 3), own)
        assert these.choose(FedAvg(**settings), "auto") == "batched"
        assert these.choose(Mixing(**settings), "auto") == "closed_form"


@dataclass(frozen=True)
class FirstSamples(FedAvg):
    """Takes the first agent's number of samples for all of a stack."""

    combines = "elementwise"

    def agent_update(self, context, received, state):
        result = super().agent_update(context, received, state)
        samples = context.samples
        first = samples[0, 0] if isinstance(samples, torch.Tensor) else samples
        return replace(result, vectors={"model": result.vectors["model"] / first})


def test_a_trial_stacks_agents_with_different_numbers_of_samples():
    settings = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
    these = engines(logistic((5,), 3), uneven_federation((24, 24, 24, 40), unseen=0))
    assert these.choose(FirstSamples(**settings), "auto") == "closed_form"


def test_results_that_are_not_finite_on_both_engines_agree():
    """Whoever asks for an engine learns from training that the step size is too large."""
    data = federation(inputs=1500)
    wild = GMeta(adapt_steps=2, adapt_lr=1e200, meta_lr=1e200, local_steps=3, batch_size=6)
    assert engines(net(data), data).choose(wild, "batched") == "batched"


RAN = []


class LessMemory(Checks):
    def for_trial(self):
        return replace(self.algorithm, memory=1)


@dataclass(frozen=True)
class Recording(FedAvg):
    """Records the settings that it was run with."""

    combines = "elementwise"
    adapt_steps: int = 3
    memory: int = 100

    def agent_update(self, context, received, state):
        RAN.append((self.adapt_steps, self.memory))
        return super().agent_update(context, received, state)

    @property
    def checks(self):
        return LessMemory(self)


def test_on_a_large_model_an_algorithm_says_what_is_tried(monkeypatch):
    settings = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
    for stack, memory in ((2**18, 100), (10, 1)):
        RAN.clear()
        monkeypatch.setattr(choose_engine, "STACK", stack)
        own = Recording(**settings)
        assert engines(logistic((5,), 3), federation()).choose(own, "batched") == "batched"
        assert set(RAN) == {(3, memory)} and own.memory == 100


def test_gmeta_is_tried_for_one_fine_tuning_step():
    assert METHOD.checks.for_trial() == replace(METHOD, adapt_steps=1) and METHOD.adapt_steps == 2
    for own in (FedAvg(), PerFedAvg(), Scaffold(), Ditto()):
        assert own.checks.for_trial() == own


def test_a_shorter_algorithm_may_be_tried_in_place_of_one_with_long_rounds():
    settings = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
    these = engines(logistic((5,), 3), federation())
    long, wrong = Recording(memory=7, **settings), Mixing(**settings)
    RAN.clear()
    for _ in range(2):
        assert these.choose(long, "auto", Recording(memory=5, **settings)) == "batched"
    assert {memory for _, memory in RAN} == {5}
    assert these.choose(long, "auto", wrong) == "closed_form"
    with pytest.raises(InputError, match="Mixing gives other results"):
        these.choose(long, "batched", wrong)
    assert 7 not in {memory for _, memory in RAN}
    # the claim is that of the algorithm itself
    assert these.choose(Alone(1, **settings), "auto", FedAvg(**settings)) == "closed_form"


def test_a_trial_detects_a_wrong_declaration():
    data = federation()
    settings = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
    for wrong in (Mixing(**settings), Squinting(**settings)):
        these = engines(logistic((5,), 3), data)
        assert these.choose(FedAvg(**settings), "auto") == "batched"
        assert these.choose(wrong, "auto") == "closed_form"
        with pytest.raises(InputError, match="gives other results than the direct engine"):
            these.choose(wrong, "batched")
    with pytest.raises(InputError, match=r"does not begin|gives other"):
        engines(net(outlying()), outlying()).choose(Forgetting(**settings), "gram")


def test_algorithms_without_combines_are_not_stacked():
    data = federation()
    these = engines(logistic((5,), 3), data)
    steps = {"adapt_lr": 0.1, "meta_lr": 0.1, "local_steps": 1, "batch_size": 6}
    assert these.choose(Alone(1, **steps), "auto") == "closed_form"
    assert these.choose(GMeta(1, **steps), "auto") == "batched"


def test_gram_space_refuses_step_sizes_per_coordinate():
    data = wide()
    objective = Objective(net(data))
    method = GMeta(
        adapt_steps=2,
        adapt_lr=torch.full((objective.size,), 0.01),
        meta_lr=0.01,
        local_steps=4,
        batch_size=40,
        curvature=Exact(),
    )
    assert Engines(objective, data, 0, visits=20).choose(method, "auto") == "batched"


def test_gram_space_refuses_learned_step_sizes():
    data = wide()
    learned = GMeta(
        adapt_steps=2,
        adapt_lr=0.01,
        meta_lr=0.01,
        local_steps=4,
        batch_size=40,
        curvature=Exact(),
        rates_lr=0.1,
    )
    assert engines(net(data), data).choose(learned, "auto") == "batched"
    with pytest.raises(InputError, match="one step size for all weights"):
        engines(net(data), data).choose(learned, "gram")


def test_gram_matrices_above_the_memory_limit_are_refused(monkeypatch):
    data = wide(inputs=4000)
    size = 3 * 60**2 * 4  # three agents, 60 training samples, float32
    for allowed, seeds, right in (
        (size, 1, "gram_onednn"),
        (size - 1, 1, "closed_form"),
        (size, 2, "closed_form"),
        (2 * size, 2, "gram_onednn"),
    ):
        monkeypatch.setattr(choose_engine, "GRAM_BYTES", allowed)
        these = engines(net(data), data, seeds=seeds)
        assert these.choose(METHOD, "auto") == right
        if right == "closed_form":
            with pytest.raises(InputError, match=r"matrices would take 0\.0 GiB"):
                these.choose(METHOD, "gram")


@pytest.mark.parametrize("cores", [1, 64])
def test_the_choice_does_not_depend_on_the_number_of_cores(cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    for data, right in ((wide(), "gram_onednn"), (federation(samples=60), "batched")):
        assert engines(net(data), data).choose(small(), "auto") == right


WIDTH = 1200


class Net(nn.Module):
    """A first layer, with operations before and after it."""

    def __init__(self, width=40):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


class Doubled(Net):
    def forward(self, x):
        return super().forward(2 * x)


class Normalised(Net):
    def forward(self, x):
        return super().forward((x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True))


class Clamped(Net):
    """The identity for most samples."""

    def forward(self, x):
        return super().forward(x.clamp(-8, 8))


class Residual(Net):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + x)


class Peeking(Residual):
    """A skip connection past the first layer that is active for few samples."""

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + torch.relu(x - 8))


class Gated(Residual):
    """A skip connection past the first layer that is closed initially."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + self.gate * x)


class Again(Net):
    """The first layer is used twice."""

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return self.head(torch.tanh(self.first(torch.tanh(self.first(x)))))


class TiedLayers(Net):
    """A second layer with the first layer's weight."""

    def __init__(self):
        super().__init__(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def frozen():
    module = Net()
    module.first.weight.requires_grad_(False)
    return module


def hooked():
    """Its first layer's outputs are changed for the last agent only."""
    module = Net()
    module.first.register_forward_hook(lambda layer, inputs, outputs: outputs.clamp(-4, 4))
    return module


MISFITS = {
    "doubled": Doubled,
    "normalised": Normalised,
    "clamped": Clamped,
    "residual": Residual,
    "peeking": Peeking,
    "gated": Gated,
    "used twice": Again,
    "tied": TiedLayers,
    "frozen": frozen,
    "hooked": hooked,
}


def outlying():
    """Agents of which the last has inputs far from the others'."""
    data = federation(4, 40, inputs=WIDTH)
    data.samples.inputs[data.split.train[3]] *= 10
    return data


def test_a_plain_network_of_that_form_uses_gram_space():
    assert engines(Net(), outlying()).choose(small(), "auto") == "gram_onednn"


@pytest.mark.parametrize("misfit", MISFITS)
def test_modules_outside_of_gram_space_are_refused(misfit):
    steps = {"adapt_lr": 0.01, "meta_lr": 0.01, "local_steps": 1, "batch_size": 20}
    data, method = outlying(), GMeta(1, Exact(), **steps)
    these = engines(MISFITS[misfit](), data)
    with pytest.raises(InputError, match=r'^engine = "gram": .*; use "direct" or "auto"$') as told:
        these.choose(method, "gram")
    assert "\n" not in str(told.value) and ". " not in str(told.value)
    name = these.choose(method, "auto")
    assert name not in GRAM
    models = []
    for engine in (these.get(name), DirectEngine(these.objective, data, 0)):
        *_, last = train(method, engine, these.objective.initial(), rounds=1, participation=1.0)
        models.append(last.server["model"])
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-6)
    if name == "direct":
        assert torch.equal(*models)


@pytest.mark.parametrize(
    ("wanted", "method", "module", "message"),
    [
        (
            "batched",
            Alone(),
            Net,
            "Alone does not declare that its agents may be stacked",
        ),
        (
            "gram",
            Alone(),
            Net,
            "Alone does not declare that its agents may be stacked",
        ),
        ("gram", small(), lambda: nn.Sequential(nn.Tanh(), Net()), "does not begin with a linear"),
        (
            "batched",
            small(),
            lambda: nn.Sequential(nn.Dropout(0.5), Net()),
            "can't be stacked over agents",
        ),
    ],
)
def test_a_requested_engine_that_cannot_run_is_refused(wanted, method, module, message):
    with pytest.raises(InputError, match=f'^engine = "{wanted}": .*{message}.*; use "direct"'):
        engines(module(), outlying()).choose(method, wanted)


def test_a_requested_engine_that_can_run_is_used():
    these = engines(net(outlying()), outlying())
    for name in ENGINES:
        assert these.choose(small(), name) == name
        assert these.get(name) is these.get(name)
    assert these.choose(Scaffold(meta_lr=0.1, batch_size=6), "direct") == "direct"
