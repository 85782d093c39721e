"""`make bench`: every job at a tiny size, and PyTorch loops that compute what nufed computes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nufed import Exact, Federation, FirstOrder, HessianFree
from nufed.algorithms import ALGORITHMS
from nufed.algorithms.protocol import Cost
from nufed.data import as_samples, make_split
from nufed.models import lenet5
from nufed.seeding import torch_seed
from nufed.server import Progress, initial_server
from nufed.simulation import DirectEngine, Training, start_method

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from floor import ConvolutionFloor  # noqa: E402
from method_rows import LOOPS, markdown, module_of, objective_of, unmeasured  # noqa: E402
from plain import DELTA  # noqa: E402

AGENTS, INPUTS, BATCH, ROUNDS = 4, 5, 6, 3
COMMON = {"meta_lr": 0.1, "adapt_lr": 0.2, "local_steps": 2, "batch_size": BATCH}
MOVING = {  # settings that make all parts of a method move
    "anil": {"adapt_steps": 2},
    "ditto": {"weight": 0.5, "personal_lr": 0.2, "personal_steps": 3},
    "pfedme": {"weight": 4.0, "inner_lr": 0.1, "inner_steps": 3, "server_lr": 0.9},
    "apfl": {"mixing": 0.4, "mixing_lr": 5.0},
    "reptile": {"server_lr": 0.7},
    "fedprox": {"weight": 0.5},
    "scaffold": {"server_lr": 0.8},
    "feddyn": {"weight": 0.5},
    "moon": {"weight": 2.0},
    "feddbe": {"weight": 2.0, "mean_momentum": 0.6},
    "fedproto": {"weight": 2.0},
    "fedrep": {"head_steps": 3},
    "fedala": {"first_passes": 4, "weights_lr": 20.0, "layers": 2},
    "fedrod": {"personal_lr": 0.2},
    "fedl2p": {"pretrain_rounds": 0, "net_lr": 0.1, "base_lr": 0.1, "net_width": 7},
    "scalefl": {"distill_weight": 0.5},
}
CURVATURES = {"exact": Exact(), "fo": FirstOrder(), "hf": HessianFree(DELTA, check=False)}
CASES = {
    **{name: (name, MOVING.get(name, {})) for name in LOOPS if name != "gmeta"},
    **{
        f"gmeta-{how}": ("gmeta", {"adapt_steps": 2, "curvature": each})
        for how, each in CURVATURES.items()
    },
}


class SameBatches:
    """The draws of nufed's agents in a round, in place of those of :class:`plain.Samples`."""

    def __init__(self, data):
        self.data, self.train, self.targets = data, data.split.train, data.samples.targets
        self.take, self.round = data.samples.take, 0

    def of(self, agent):
        return self.data.batches(agent, 0, "train", self.round)

    def draw(self, agent, purpose="outer", number=1, step=0):
        return [batch[:2] for batch in self.of(agent).draw(purpose, BATCH, number, step)]

    def epoch(self, agent, share):
        return [batch[:2] for batch in self.of(agent).epoch("weights", BATCH, share=share)]

    def halves(self, agent, held):
        rows = self.train[agent]
        rows = rows[self.of(agent).stream("fedl2p/split").permutation(len(rows))]
        number = max(1, round(held * len(rows)))
        return rows[number:], rows[:number]

    def picks(self, agent, step, halves, number):
        rng, found = self.of(agent).stream("fedl2p", step), []
        for place, rows in enumerate([halves[0]] * number + [halves[1]]):
            chosen = rng.choice(len(rows), min(BATCH, len(rows)), replace=False)
            found.append(self.take(rows[chosen]))
            if place < number:
                torch_seed(rng)  # of dropout
        return found


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(AGENTS * 30, INPUTS))
    rows = np.split(rng.permutation(len(inputs)), AGENTS)
    split = make_split(rows, 0, validation=0, test=0.2)
    return Federation(as_samples((inputs, rng.integers(0, 10, len(inputs)))), split)


@pytest.mark.parametrize("case", CASES)
def test_a_plain_loop_gives_the_models_states_and_evaluations_of_nufed(case, data):
    name, settings = CASES[case]
    algorithm = ALGORITHMS[name](**COMMON, **settings)
    module = module_of(name, INPUTS).double()
    objective = objective_of(module)
    engine = DirectEngine(objective, data, 0)
    samples = SameBatches(data)
    loop = LOOPS[name](module, samples, algorithm)
    progress = Progress(0, initial_server(algorithm, objective, objective.initial()))
    if name == "fedl2p":  # it starts from a random meta-net
        for own, part in zip(loop.w, _split(_server(name, progress.server), loop.w), strict=True):
            own.copy_(part)
    start, cost = _server(name, progress.server), Cost()
    for samples.round in range(1, ROUNDS + 1):
        progress = Training(algorithm, engine, 1.0).round(progress)
        loop.round(range(AGENTS))
        cost += progress.cost
    assert Cost(loop.gradients, loop.products) == cost
    right = _server(name, progress.server)
    moved = float((right - start).norm())
    assert moved > 1e-3
    tolerance = 1e-8 if case == "gmeta-hf" else 1e-12
    assert float((_flat(loop.w) - right).norm()) <= tolerance * moved
    assert set(loop.states) == set(progress.states.agents())
    for agent, state in loop.states.items():
        right = torch.cat([vector.flatten() for vector in progress.states.get(agent).values()])
        assert torch.allclose(_state(name, state), right, rtol=1e-10, atol=1e-12)


def test_every_plain_loop_is_that_of_an_algorithm(monkeypatch):
    assert set(LOOPS) <= set(ALGORITHMS)
    assert unmeasured() == sorted(set(ALGORITHMS) - set(LOOPS))
    monkeypatch.delitem(LOOPS, "ditto")
    assert "ditto" in unmeasured()


@pytest.mark.skipif(start_method() != "fork", reason="needs Linux")
def test_every_job_of_the_benchmark_runs_to_its_end(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bench.json").read_text())
    kept = json.loads((ROOT / "benchmarks/results/bench.json").read_text())
    assert results.keys() == kept.keys()  # the committed results come from the same jobs
    kept_files = {path.name for path in (ROOT / "benchmarks/results").iterdir()}
    others = {"peers.json", "short_runs.json", "growth.json", "growth.png", "growth.svg"}
    assert {path.name for path in tmp_path.iterdir()} == kept_files - others
    assert results["large"].keys() <= kept["large"].keys()
    # an algorithm may be unmeasured, but one that was measured stays so
    assert kept["methods"].keys() <= results["methods"].keys() == set(LOOPS)


@pytest.mark.skipif(start_method() != "fork", reason="needs Linux")
def test_peers_are_compared_in_turns_and_skipped_where_not_installed(tmp_path):
    script, out = ROOT / "benchmarks/peers/compare.py", tmp_path / "peers.json"
    names = ["nufed", "PyTorch loop", "JAX, scan"]
    done = subprocess.run(
        [sys.executable, script, "--quick", "--out", out, "--only", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    jobs = ["FedAvg", "FO nu=1", "FO nu=3", "HF nu=3", "exact nu=3", "evaluation"]
    for name in names[:2]:
        assert list(found[name]["times"]) == list(found[name]["first"]) == jobs
        assert f"| {name} | " in done.stdout
    if find_spec("jax") is None:
        assert found["JAX, scan"] == {"skipped": "ModuleNotFoundError: No module named 'jax'"}


def test_the_convolution_floor_computes_a_layer_and_its_derivatives():
    module = lenet5((3, 12, 12), 10).double()
    x = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    floor = ConvolutionFloor(module, x, local_steps=2)
    own = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [tuple(each.w.shape) for each in floor.layers] == [
        tuple(each.weight.shape) for each in own
    ]
    calls = []
    for place, layer in enumerate(floor.layers):
        layer.forward = lambda place=place: calls.append((place, "forward"))
        layer.backward = lambda place=place, **wanted: calls.append((place, *wanted.values()))
    floor.round(range(3), 1, "exact")
    # 3 agents x 2 steps: 2 gradients and a product, of which the first layer needs fewer
    assert calls.count((0, "forward")) == 6 * (2 + 2) and calls.count((0, False, True)) == 6 * 3
    assert calls.count((1, "forward")) == 6 * (2 + 3) and calls.count((1, True, True)) == 6 * 4
    assert calls.count((1, True, False)) == 6


def test_the_table_of_methods_in_the_docs_is_that_of_the_results():
    kept = json.loads((ROOT / "benchmarks/results/bench.json").read_text())
    assert markdown(kept["methods"]) in (ROOT / "docs/performance.md").read_text()


def _server(name, server):
    """What a loop holds at the server, as one vector."""
    others = {"fedl2p": ("meta_net", "rates"), "fedproto": ("weighted", "shares")}
    names = others.get(name, ("model",))
    names = names if names[0] in server else ("shared",)
    return torch.cat([server[each] for each in names])


def _state(name, state):
    if name == "fedbn":  # statistics are behind parameters in nufed's vectors
        state = [t for i, t in enumerate(state) if i % 4 < 2] + [
            t for i, t in enumerate(state) if i % 4 >= 2
        ]
    return _flat(state)


def _flat(found):
    """All numbers of nested lists of tensors, in order."""
    if isinstance(found, list | tuple):
        return torch.cat([_flat(each) for each in found])
    return torch.as_tensor(found, dtype=torch.float64).detach().flatten()


def _split(vector, like):
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
