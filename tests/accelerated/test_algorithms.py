"""Every algorithm and engine gives the CPU's bits on the test accelerator."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import accelerator
from accelerator import NAME
from conformance.cases import CASES, THOROUGH
from conformance.test_algorithms import MODULES, evaluate, history
from nufed import Objective
from nufed.algorithms import fixed_point
from nufed.algorithms.aggregation import AGGREGATIONS
from nufed.simulation import Engines
from support import batches, federation, same, states_of

PAIRS = [(c, m) for c in CASES for m in MODULES if m == "float64" or c in THOROUGH]


def on_host(state):
    return {name: vector.cpu() for name, vector in (state or {}).items()}


def outcome(algorithm, make, engine, device):
    """Server's states, agents' states and scores of a training on a device."""
    torch.manual_seed(0)
    with torch.device(device):  # Module.to() would untie weights
        objective = Objective(make())
    own = Engines(objective, federation(unseen=1), seed=5).get(engine)
    rounds = history(algorithm, own, rounds=3)
    last = rounds[-1]
    assert not last.rejected and len(last.taken) == 3
    vectors = [
        v for state in (last.server, *states_of(own, last).values()) for v in (state or {}).values()
    ]
    assert {vector.device.type for vector in vectors} == {device}
    states = {agent: on_host(state) for agent, state in states_of(own, last).items()}
    return [on_host(each.server) for each in rounds], states, evaluate(algorithm, own, last)


def check(algorithm, make, engine):
    right = outcome(algorithm, make, engine, "cpu")
    assert_same(outcome(algorithm, make, engine, NAME), right)


def assert_same(found, right):
    servers, states, scores = right
    assert all(same(*pair) for pair in zip(found[0], servers, strict=True))
    assert all(same(found[1][agent], state) for agent, state in states.items())
    assert found[2] == scores


@pytest.mark.parametrize("case, module", PAIRS, ids=[f"{c}-{m}" for c, m in PAIRS])
def test_direct(case, module):
    check(CASES[case], MODULES[module], "direct")


@pytest.mark.parametrize("module", ["float64", "float32"])
@pytest.mark.parametrize("case", [c for c, a in CASES.items() if a.combines])
def test_batched(case, module):
    check(CASES[case], MODULES[module], "batched")


@pytest.mark.parametrize("rule", list(AGGREGATIONS))
def test_sums_run_on_the_cpu_where_the_device_lacks_float64(rule, monkeypatch):
    algorithm = replace(CASES["scaffold"], aggregation=AGGREGATIONS[rule]())
    right = outcome(algorithm, MODULES["float32"], "direct", "cpu")
    monkeypatch.setattr(accelerator, "refused", {torch.float64})
    with pytest.raises(TypeError, match="no torch"):
        torch.ones(2, device=NAME).double()
    with pytest.raises(TypeError, match="no torch"):
        outcome(algorithm, MODULES["float32"], "direct", NAME)
    monkeypatch.setattr(fixed_point, "WITHOUT_FLOAT64", {NAME})
    assert_same(outcome(algorithm, MODULES["float32"], "direct", NAME), right)


def test_channels_last():
    """Gradients of convolutions, in the layout that the configuration names."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        nn.Conv2d(1, 4, (1, 3), padding=(0, 1)),
        nn.Tanh(),
        nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
        nn.Flatten(),
        nn.Linear(20, 3),
    )
    (batch,) = batches(1, dtype=torch.float32)
    last, plain, there = (
        Objective(made, memory_format=layout)
        for made, layout in (
            (module, "channels_last"),
            (module, "contiguous"),
            (copy.deepcopy(module).to(NAME), "channels_last"),
        )
    )
    w = last.initial()
    for compute in (
        lambda o, w: o.grad(w, batch),
        lambda o, w: o.hvp(w, batch, w),
        lambda o, w: o.predict(w, batch.inputs),
    ):
        found, right = compute(there, there.initial()), compute(last, w)
        assert found.device.type == NAME and torch.equal(found.cpu(), right)
        torch.testing.assert_close(right, compute(plain, w), rtol=1e-4, atol=1e-6)
