"""Which engine runs a method, and that no choice changes the model."""

import os

import pytest
import torch
from torch import nn

from nufed import Exact, Federation, FirstOrder, GMeta, InputError, Objective, Samples
from nufed.models import cnn, fcnn, logistic
from nufed.runs import load_config
from nufed.runs.build import build_federation, build_samples
from nufed.simulation import DirectEngine, Engines, choose, train
from support import Scaffold, federation

METHOD = GMeta(2, 0.01, 0.01, 4, 40, Exact())


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
    method = GMeta(3, 0.05, 0.3, 4, 10, Exact())
    assert engines(fcnn((8, 8), 10, hidden=(32,)), data).choose(method, "auto") == "batched"


def test_wide_first_layers_go_to_gram_space_if_agents_return_often_enough():
    data = wide()
    for visits, right in ((20, "gram"), (1e-3, "batched")):
        chosen = engines(net(data), data, visits).choose(METHOD, "auto")
        assert chosen == right
    big = wide(inputs=4000)  # two models are more than a small stack
    assert engines(net(big), big, 1e-3).choose(METHOD, "auto") == "direct"
    assert engines(net(big), big).choose(METHOD, "auto") == "gram"


def test_an_agent_with_many_samples_and_few_batches_is_not_worth_a_matrix():
    data = wide(agents=2, samples=1200)
    once = GMeta(0, 0.01, 0.01, 1, 40, FirstOrder())
    assert engines(net(data), data).choose(once, "auto") != "gram"
    assert engines(net(data), data).choose(METHOD, "auto") == "gram"


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
    return GMeta(2, 0.05, 0.1, 2, batch_size, Exact())


def test_convolutions_and_random_layers_are_run_directly():
    data = images()
    assert engines(cnn((8, 8), 3), data).choose(small(), "auto") == "direct"
    assert engines(Drops(), data).choose(small(), "auto") == "direct"
    still = Drops()
    still.layers[1].p = 0.0
    assert engines(still, data).choose(small(), "auto") == "batched"


def test_algorithms_that_do_not_say_how_they_combine_are_run_directly():
    data = federation()
    these = engines(logistic((5,), 3), data)
    assert these.choose(Scaffold(), "auto") == "direct"
    assert these.choose(GMeta(1, 0.1, 0.1, 1, 6), "auto") == "batched"


def test_step_sizes_per_coordinate_are_not_for_gram_space():
    data = wide()
    objective = Objective(net(data))
    method = GMeta(2, torch.full((objective.size,), 0.01), 0.01, 4, 40, Exact())
    assert Engines(objective, data, 0, visits=20).choose(method, "auto") == "batched"


def test_learned_step_sizes_are_not_for_gram_space():
    data = wide()
    learned = GMeta(2, 0.01, 0.01, 4, 40, Exact(), rates_lr=0.1)
    assert engines(net(data), data).choose(learned, "auto") == "batched"
    with pytest.raises(InputError, match="one step size for all weights"):
        engines(net(data), data).choose(learned, "gram")


def test_matrices_that_take_too_much_memory_are_not_made(monkeypatch):
    data = wide(inputs=4000)
    size = 3 * 60**2 * 4  # three agents, 60 training samples, float32
    for allowed, seeds, right in (
        (size, 1, "gram"),
        (size - 1, 1, "direct"),
        (size, 2, "direct"),
        (2 * size, 2, "gram"),
    ):
        monkeypatch.setattr(choose, "GRAM_BYTES", allowed)
        these = engines(net(data), data, seeds=seeds)
        assert these.choose(METHOD, "auto") == right
        if right == "direct":
            with pytest.raises(InputError, match=r"matrices would take 0\.0 GiB"):
                these.choose(METHOD, "gram")


@pytest.mark.parametrize("cores", [1, 64])
def test_the_number_of_cores_does_not_matter(cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    for data, right in ((wide(), "gram"), (federation(samples=60), "batched")):
        assert engines(net(data), data).choose(small(), "auto") == right


WIDTH = 1200


class Net(nn.Module):
    """A first layer, what is done before it, and what follows it."""

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
    """The same as no change for most samples."""

    def forward(self, x):
        return super().forward(x.clamp(-8, 8))


class Residual(Net):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + x)


class Peeking(Residual):
    """A way past the first layer that is open for few samples."""

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + torch.relu(x - 8))


class Gated(Residual):
    """A way past the first layer that is closed at the start."""

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


def test_a_plain_network_of_that_form_goes_to_gram_space():
    assert engines(Net(), outlying()).choose(small(), "auto") == "gram"


@pytest.mark.parametrize("misfit", MISFITS)
def test_modules_that_gram_space_cannot_stand_for_are_not_put_there(misfit):
    data, method = outlying(), GMeta(1, 0.01, 0.01, 1, 20, Exact())
    these = engines(MISFITS[misfit](), data)
    with pytest.raises(InputError, match=r'^engine = "gram": .*; use "direct" or "auto"$') as told:
        these.choose(method, "gram")
    assert "\n" not in str(told.value) and ". " not in str(told.value)
    name = these.choose(method, "auto")
    assert name in ("direct", "batched")
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
        ("batched", Scaffold(), Net, "Scaffold does not say that its agents may be run together"),
        ("gram", Scaffold(), Net, "Scaffold does not say that its agents may be run together"),
        ("gram", small(), lambda: nn.Sequential(nn.Tanh(), Net()), "does not begin with a linear"),
        (
            "batched",
            small(),
            lambda: nn.Sequential(nn.Dropout(0.5), Net()),
            "can't be run for several agents at once",
        ),
    ],
)
def test_an_engine_that_is_asked_for_and_cannot_be_is_refused(wanted, method, module, message):
    with pytest.raises(InputError, match=f'^engine = "{wanted}": .*{message}.*; use "direct"'):
        engines(module(), outlying()).choose(method, wanted)


def test_an_engine_that_is_asked_for_and_can_be_is_taken():
    these = engines(Net(), outlying())
    for name in ("direct", "batched", "gram"):
        assert these.choose(small(), name) == name
        assert these.get(name) is these.get(name)
    assert these.choose(Scaffold(), "direct") == "direct"
