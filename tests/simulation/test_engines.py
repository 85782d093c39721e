"""Every engine gives the direct engine's models and scores, up to rounding.

Differences are relative to how far training moved the model. The agents have 9 to 30 training
samples and batches of 12: batches share samples, and small agents have smaller batches.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Exact, Federation, FirstOrder, GMeta, HessianFree, Objective, Samples
from nufed.algorithms.protocol import BatchSource, Draw
from nufed.data.federation import AgentBatches
from nufed.evaluate import Measure
from nufed.lab.config.problem import squared_error
from nufed.models import fcnn, logistic
from nufed.objective.fast import onednn
from nufed.objective.fast.gram_space import first_layer
from nufed.objective.fast.onednn import OneDNNFirstLayer, closed_form, with_onednn
from nufed.simulation import BatchedEngine, DirectEngine, GramEngine, train
from nufed.simulation.batched_engine import StackedBatches
from nufed.simulation.gram_engine import IndexedBatches
from support import cnn, context, uneven_federation


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc2(F.softplus(self.fc1(x)))


class FirstLayerLast(nn.Module):
    """Other parameters come before those of the first layer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 3)
        self.body = nn.Linear(5, 6)

    def forward(self, x):
        return self.head(self.gain * torch.tanh(self.body(x)))


MODULES = {
    "tanh": lambda: fcnn((5,), 3, hidden=(6, 4), activation="tanh"),
    "relu": lambda: fcnn((5,), 3, hidden=(6, 4)),
    "logistic": lambda: logistic((5,), 3),
    "logistic without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 3, bias=False)),
    "linear": lambda: nn.Linear(5, 3),
    "custom": Custom,
    "first layer last": FirstLayerLast,
}
CURVATURES = {"fo": FirstOrder(), "exact": Exact(), "hf": HessianFree()}
STEPS = {"adapt_lr": 0.2, "meta_lr": 0.3, "local_steps": 2, "batch_size": 12}
METHODS = {
    "fedavg": GMeta(0, FirstOrder(), **STEPS),
    **{
        f"{how} {nu}": GMeta(nu, curvature, **STEPS)
        for how, curvature in CURVATURES.items()
        for nu in (1, 2, 3, 4)
    },
    "resampled": GMeta(2, Exact(), outer_samples="resampled", **STEPS),
    "disjoint": GMeta(2, HessianFree(), outer_samples="disjoint", **STEPS),
    "disjoint, one": GMeta(3, Exact(), outer_samples="disjoint", inner_batches="one", **STEPS),
}
ROUNDING = 1e-12  # a few 1e-16 are measured
OF_DIFFERENCES = 1e-7  # a difference over √ε keeps half the digits of float64; 1e-9 is measured
ROUNDING_32 = 1e-5  # ε is 1e-7, and errors of many steps add up; 6e-7 is measured


def objective_of(module, dtype=torch.float64, loss=F.cross_entropy):
    return Objective(module().to(dtype), loss)


def batched(objective, federation):
    return BatchedEngine(objective, federation, seed=5, most=2)


def gram(objective, federation):
    layer = first_layer(objective, federation.samples.input_shape)
    return GramEngine(objective, federation, 5, layer, most=2)


def gram_onednn(objective, federation):
    layer = first_layer(objective, federation.samples.input_shape, OneDNNFirstLayer)
    return GramEngine(objective, federation, 5, layer, most=2)


def direct_onednn(objective, federation):
    return DirectEngine(with_onednn(objective), federation, seed=5)


def closed(objective, federation):
    return DirectEngine(closed_form(objective), federation, seed=5)


def direct(objective, federation):
    return DirectEngine(objective, federation, seed=5)


ACCELERATED = (batched, gram, gram_onednn, direct_onednn, closed)


def empty_states(federation):
    """The states of all agents for algorithms that keep none."""
    return {agent: {} for agent in federation.split.agents}


def trained(make, algorithm, objective, federation, rounds):
    """The model, and every agent's scores."""
    engine, measure = make(objective, federation), Measure("accuracy")
    if federation.samples.targets.is_floating_point():
        measure = Measure("loss", None)
    w = objective.initial()
    share = 0.8 if rounds < 50 else 0.4
    *_, last = train(algorithm, engine, w, rounds=rounds, participation=share)
    states = empty_states(federation)
    return last.server["model"], engine.evaluate(
        algorithm, last.server, states, steps=2, measure=measure
    )


def distances(algorithm, objective, federation, makes, rounds):
    """Distances of the engines' models from the direct engine's; their scores must agree."""
    right, scores = trained(direct, algorithm, objective, federation, rounds)
    moved = float((right - objective.initial()).norm())
    assert moved > 0.01
    for make in makes:
        model, others = trained(make, algorithm, objective, federation, rounds)
        yield float((model - right).norm()) / moved
        assert len(others) == len(scores) == len(federation.split.agents)
        close = 1e-6 if objective.dtype == torch.float64 else 1e-3
        for score, other in zip(scores, others, strict=True):
            assert other.loss == pytest.approx(score.loss, rel=close)
            assert other.score == pytest.approx(score.score, rel=close)
            rest = ("agent", "name", "seen", "train_samples", "test_samples")
            assert [getattr(other, k) for k in rest] == [getattr(score, k) for k in rest]


def tolerance(algorithm):
    return OF_DIFFERENCES if isinstance(algorithm.curvature, HessianFree) else ROUNDING


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("module", MODULES)
def test_engines_agree_with_the_direct_engine(module, method):
    algorithm, objective = METHODS[method], objective_of(MODULES[module])
    makes = (batched, gram, closed) if closed_form(objective) else (batched, gram)
    for distance in distances(algorithm, objective, uneven_federation(), makes, 1):
        assert distance < tolerance(algorithm)


@pytest.mark.parametrize("how", CURVATURES)
@pytest.mark.parametrize("rates", ["tensor", "coordinate", "step"])
def test_learned_step_sizes_are_the_same_in_a_stack(rates, how):
    """Of two local updates, in the second of which every agent has step sizes of its own."""
    algorithm = GMeta(3, CURVATURES[how], rates_lr=1.0, rates=rates, **STEPS)
    objective, data = objective_of(MODULES["first layer last"]), uneven_federation()
    server = algorithm.server_init(objective, objective.initial())
    (right, scores), (got, others) = (
        (
            engine.agent_updates(algorithm, server, empty_states(data), context(1))[2].vectors,
            engine.evaluate(
                algorithm, server, empty_states(data), steps=2, measure=Measure("accuracy")
            ),
        )
        for engine in (direct(objective, data), batched(objective, data))
    )
    assert (right["log_rates"] - server["log_rates"]).std() > 0.001
    for name, vector in right.items():
        change = vector - server[name]
        assert (got[name] - vector).norm() <= tolerance(algorithm) * change.norm()
    assert [s.loss for s in others] == [pytest.approx(s.loss, rel=1e-12) for s in scores]


@pytest.mark.parametrize(
    ("module", "dtype", "method"),
    [
        ("tanh", "float64", "exact 2"),
        ("relu", "float64", "fedavg"),
        ("relu", "float32", "fo 2"),
        ("tanh", "float32", "exact 1"),
        ("relu", "float32", "hf 1"),
    ],
)
def test_engines_still_agree_after_fifty_rounds(module, dtype, method, monkeypatch):
    monkeypatch.setattr(onednn, "LARGE", 1)  # products by oneDNN, where they are in float32
    algorithm = METHODS[method]
    objective = objective_of(MODULES[module], getattr(torch, dtype))
    bound = tolerance(algorithm) if dtype == "float64" else ROUNDING_32
    for distance in distances(algorithm, objective, uneven_federation(), ACCELERATED, 50):
        assert distance < bound


@pytest.mark.parametrize("most_rows", [13, 40, 10_000])
def test_long_local_training_in_gram_space(most_rows, monkeypatch):
    """Also where the rows of a sample are added up on the way."""
    monkeypatch.setattr("nufed.objective.fast.gram_space.MOST_ROWS", most_rows)
    alone = GMeta(
        adapt_steps=0,
        adapt_lr=0.2,
        meta_lr=0.1,
        local_steps=60,
        batch_size=12,
        curvature=FirstOrder(),
    )
    objective, federation = objective_of(MODULES["tanh"]), uneven_federation()
    states = empty_states(federation)
    received = {"model": objective.initial()}
    got, right = (
        make(objective, federation).agent_updates(alone, received, states, context(1))
        for make in (gram, direct)
    )
    for agent in federation.split.agents:
        a, b = got[agent].vectors["model"], right[agent].vectors["model"]
        assert (a - b).norm() <= ROUNDING * (b - received["model"]).norm()


@pytest.mark.parametrize("make", ["direct", "batched", "gram"])
def test_units_exactly_at_their_kinks(make):
    """Without biases, samples that are 0 bring every unit of the first layer to its kink."""
    objective, federation = objective_of(MODULES["relu"]), uneven_federation()
    federation.samples.inputs[::3] = 0
    w = objective.initial()
    w[5 * 6 : 5 * 6 + 6] = 0
    engine = {"direct": direct, "batched": batched, "gram": gram}[make](objective, federation)
    found = {}
    for how in (Exact(), HessianFree()):
        algorithm = GMeta(
            adapt_steps=2, adapt_lr=0.2, meta_lr=0.3, local_steps=1, batch_size=12, curvature=how
        )
        results = engine.agent_updates(
            algorithm, {"model": w}, empty_states(federation), context(1)
        )
        found[type(how)] = torch.stack([r.vectors["model"] for r in results.values()])
    # at a kink there are several subgradients; a naive difference is off by 10⁵ times the change
    assert (found[HessianFree] - found[Exact]).norm() < 0.5 * (found[Exact] - w).norm()


def test_chunks_hold_agents_with_batches_of_one_size():
    data, algorithm = uneven_federation(), METHODS["fo 2"]
    sizes = [len(rows) for rows in data.split.train]
    assert sizes == [9, 12, 30, 18, 9, 30]
    objective = objective_of(MODULES["tanh"])
    for engine in (batched(objective, data), gram(objective, data)):
        chunks = engine.chunks(algorithm, [5, 4, 3, 2, 1, 0])
        assert sorted(map(sorted, chunks)) == [[0, 4], [1, 2], [3, 5]]
    assert direct(objective, data).chunks(algorithm, [5, 2]) == [[5], [2]]


def test_evaluation_without_fine_tuning():
    data, objective = uneven_federation(), objective_of(MODULES["tanh"])
    server, states = {"model": objective.initial()}, empty_states(data)
    right, *others = (
        make(objective, data).evaluate(
            METHODS["fo 2"], server, states, steps=0, measure=Measure("accuracy")
        )
        for make in (direct, batched, gram)
    )
    for scores in others:
        assert [s.score for s in scores] == [s.score for s in right]
        for score, other in zip(right, scores, strict=True):
            assert other.loss == pytest.approx(score.loss, rel=1e-12) and len(other.loss) == 1


def test_evaluation_of_other_numbers_of_steps_one_after_another():
    """The Gram engine must not reuse its cache for another number of steps."""
    data, objective = uneven_federation(), objective_of(MODULES["tanh"])
    engines = [make(objective, data) for make in (direct, gram)]
    server, states = {"model": objective.initial()}, empty_states(data)
    for method, steps in [("fo 2", 1), ("fo 2", 4), ("fo 2", 1)]:
        right, scores = (
            engine.evaluate(
                METHODS[method], server, states, steps=steps, measure=Measure("accuracy")
            )
            for engine in engines
        )
        for score, other in zip(right, scores, strict=True):
            assert other.loss == pytest.approx(score.loss, rel=1e-12)
            assert len(other.loss) == steps + 1


def with_inputs(inputs, targets=None, scale=1.0):
    """The agents of the uneven federation with other data."""
    data = uneven_federation()
    x = data.samples.inputs
    targets = data.samples.targets if targets is None else targets(x)
    classes = () if targets.is_floating_point() else ("a", "b", "c")
    samples = Samples(inputs(x), targets, classes, scale=scale)
    return Federation(samples, data.split, small_agents="use_all")


@pytest.mark.parametrize("method", ["exact 2", "hf 2"])
def test_bytes_are_scaled_in_every_engine(method):
    data = with_inputs(lambda x: ((x + 4) * 30).clamp(0, 255).to(torch.uint8), scale=1 / 255)
    algorithm, objective = METHODS[method], objective_of(MODULES["tanh"])
    for distance in distances(algorithm, objective, data, (batched, gram), 2):
        assert distance < tolerance(algorithm)


def test_images_are_flattened_in_every_engine():
    data = with_inputs(lambda x: x[:, :4].view(-1, 2, 2).double())
    objective = objective_of(lambda: fcnn((2, 2), 3, hidden=(6,), activation="tanh"))
    for distance in distances(METHODS["exact 2"], objective, data, (batched, gram, closed), 2):
        assert distance < ROUNDING


@pytest.mark.parametrize("method", ["fedavg", "fo 2", "exact 2", "hf 2"])
def test_convolutions_in_a_stack(method):
    algorithm, objective = METHODS[method], objective_of(cnn)
    for distance in distances(algorithm, objective, uneven_federation(), [batched], 2):
        assert distance < tolerance(algorithm)


@pytest.mark.parametrize("loss", [squared_error, nn.HuberLoss()], ids=["squared", "huber"])
@pytest.mark.parametrize("method", ["fedavg", "exact 2", "hf 2"])
def test_regression_in_every_engine(method, loss):
    data = with_inputs(lambda x: x, lambda x: x[:, :1] - x[:, 1:2] ** 2)
    objective = objective_of(lambda: fcnn((5,), 1, hidden=(6,), activation="tanh"), loss=loss)
    for distance in distances(METHODS[method], objective, data, (batched, gram), 2):
        assert distance < tolerance(METHODS[method])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 6), nn.Linear(3, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, a, b):
        return self.head(torch.tanh(self.left(a) + self.right(b)))


@pytest.mark.parametrize(
    "inputs",
    [lambda x: (x[:, :2], x[:, 2:]), lambda x: {"b": x[:, 2:], "a": x[:, :2]}],
    ids=["tuple", "mapping"],
)
def test_modules_of_several_inputs_in_a_stack(inputs):
    objective = objective_of(TwoInputs)
    for distance in distances(METHODS["exact 2"], objective, with_inputs(inputs), [batched], 2):
        assert distance < ROUNDING


@pytest.mark.parametrize("curvature", CURVATURES)
def test_step_sizes_per_coordinate_in_a_stack(curvature):
    objective = objective_of(MODULES["tanh"])
    rates = torch.rand(objective.size, dtype=torch.float64) * 0.4
    algorithm = GMeta(2, CURVATURES[curvature], **{**STEPS, "adapt_lr": rates})
    (distance,) = distances(algorithm, objective, uneven_federation(), [batched], 2)
    assert distance < tolerance(algorithm)
    single = GMeta(2, CURVATURES[curvature], **STEPS)
    models = [
        trained(batched, a, objective, uneven_federation(), 1)[0] for a in (algorithm, single)
    ]
    assert not torch.allclose(*models, rtol=1e-3)  # the rates do something


def test_costs_and_states_are_those_of_the_direct_engine():
    data, objective = uneven_federation(), objective_of(MODULES["tanh"])
    for algorithm in METHODS.values():
        received = {"model": objective.initial()}
        right, *others = (
            make(objective, data).agent_updates(algorithm, received, {2: {}, 0: {}}, context(1))
            for make in (direct, batched, gram)
        )
        for results in others:
            assert results.keys() == right.keys()
            for agent, result in results.items():
                assert result.cost == right[agent].cost and result.state == {}


def test_an_engine_does_not_modify_its_arguments():
    data, objective = uneven_federation(), objective_of(MODULES["tanh"])
    w = objective.initial()
    before, inputs = w.clone(), data.samples.inputs.clone()
    for make in (batched, gram):
        engine, algorithm = make(objective, data), METHODS["exact 2"]
        first = engine.agent_updates(algorithm, {"model": w}, {2: {}, 5: {}}, context(1))
        kept = {agent: result.vectors["model"].clone() for agent, result in first.items()}
        engine.agent_updates(algorithm, {"model": w + 1}, {2: {}, 3: {}}, context(2))
        assert torch.equal(w, before) and torch.equal(data.samples.inputs, inputs)
        assert all(torch.equal(kept[a], first[a].vectors["model"]) for a in first)


def test_an_agents_update_does_not_depend_on_the_others():
    """Engines do not guarantee equal bits, but that no agent uses another's data."""
    data, objective = uneven_federation(), objective_of(MODULES["tanh"])
    received, algorithm = {"model": objective.initial()}, METHODS["exact 2"]
    for make in (batched, gram):
        together = make(objective, data).agent_updates(
            algorithm, received, empty_states(data), context=context(1)
        )
        for agent in data.split.agents:
            alone = make(objective, data).agent_updates(
                algorithm, received, {agent: {}}, context(1)
            )
            torch.testing.assert_close(
                alone[agent].vectors["model"],
                together[agent].vectors["model"],
                rtol=1e-12,
                atol=1e-14,
            )


@pytest.mark.parametrize(
    "source",
    [BatchSource, AgentBatches, StackedBatches, IndexedBatches],
    ids=lambda it: it.__name__,
)
def test_a_draw_names_its_parts_as_the_call_names_its_arguments(source):
    assert tuple(inspect.signature(source.draw).parameters)[1:] == Draw._fields
