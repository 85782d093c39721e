"""Compressed updates: on Flower the bits of the simulator, resumed ones too; where refused."""

from dataclasses import replace

import pytest

from flower.app.in_memory import agents_data, federate, plan_of
from flower.app.test_apps import TEXT, app_of
from flower.app.test_parity import METHODS, simulated
from nufed.algorithms.compression import Bfloat16, Int8, TopK
from nufed.errors import InputError
from nufed.flower.app.payload import size_of
from nufed.lab.config.schema import CompressionConfig
from nufed.lab.runs.records import round_line
from nufed.server import MemoryStates, Rules
from nufed.simulation import DirectEngine, train
from support import federation, same

CODECS = {"bfloat16": Bfloat16(), "int8": Int8(), "top_k": TopK(0.1)}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD"])
def test_compressed_updates_give_the_simulators_bits(method, codec):
    data, rules = agents_data(5), Rules(max_update_norm=100.0, codec=CODECS[codec])
    plan = plan_of(METHODS[method], agents=5, rounds=4, participation=0.6, rules=rules)
    right, _ = simulated(plan, data)
    up = []

    def seen(agent, message, reply):
        if message.metadata.message_type == "train":
            up.append(size_of(reply.content))
        return reply

    rounds, _, _ = federate(plan, data, seen)
    plain, _ = simulated(replace(plan, rules=Rules()), data)
    assert not same(right[-1].server, plain[-1].server)
    for one, other in zip(rounds, right, strict=True):
        assert same(one.server, other.server) and not one.rejected
        assert round_line(plan.algorithm, one) == round_line(plan.algorithm, other)
    line, whole = (round_line(plan.algorithm, rounds[-1]) for rounds in (right, plain))
    assert line["bytes_up"] < whole["bytes_up"] and line["bytes_down"] == whole["bytes_down"]
    per_update = line["bytes_up"] / len(rounds[-1].cohort)
    assert per_update < up[-1] < per_update + 2000  # and the headers of arrays


@pytest.mark.parametrize("codec", ["int8", "top_k"])
def test_a_simulation_resumes_to_the_same_bits(codec):
    data, plan = federation(), plan_of(METHODS["FedAvg"])
    engine = DirectEngine(plan.objective, data, seed=5)
    rules = Rules(codec=CODECS[codec])

    def trained(**more):
        w = plan.objective.initial()
        how = {"rounds": 4, "participation": 0.6, "rules": rules}
        return train(plan.algorithm, engine, w, **how, **more)

    half = None
    for progress in trained():
        if progress.round == 2:
            half = replace(progress, states=MemoryStates(progress.states._states))
    *_, resumed = trained(start=half)
    assert same(resumed.server, progress.server)
    *_, forgotten = trained(start=replace(half, states=MemoryStates()))
    assert not same(forgotten.server, progress.server)  # residuals matter


def test_the_configuration_names_the_codec(tmp_path):
    assert CompressionConfig().make() is None
    assert CompressionConfig(codec="top_k", share=0.1).make() == TopK(0.1)
    app = app_of(tmp_path, TEXT + '[compression]\ncodec = "int8"\n')
    assert app.plan().rules.codec == Int8() and app.plan().keeps_state
    private = '[compression]\ncodec = "int8"\n[privacy]\nclip = 0.5\n'
    with pytest.raises(InputError, match=r"epsilon does not hold with \[compression\]"):
        app_of(tmp_path, TEXT + private).plan()
