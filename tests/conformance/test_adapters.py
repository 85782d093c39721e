"""Every algorithm on low-rank adapters of a tiny transformer: engines, workers, resume, Flower."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance.cases import CASES, SETTINGS
from conformance.test_algorithms import (
    assert_near,
    evaluate,
    history,
    killed_and_resumed,
    same_states,
)
from flower.app.in_memory import RUN, agents_data, federation_of, plan_of, site_state, sites_of
from nufed import Objective
from nufed.algorithms import ALGORITHMS
from nufed.flower.app.server_app import Server
from nufed.lab.pretrained import add_adapters
from nufed.simulation import BatchedEngine, DirectEngine, WorkerEngine, train
from support import same, states_of

transformers = pytest.importorskip("transformers", reason='needs pip install "nufed[hf]"')
pytest.importorskip("peft", reason='needs pip install "nufed[peft]"')
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 4}
SIZES |= {"intermediate_size": 8, "max_position_embeddings": 8, "num_labels": 3}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # stacks take none
TRAINED = 2 * 2 * (2 * 8) + 8 * 3 + 3  # rank 2 at query and value, and the head
LORA = {
    **{name: case for name, case in CASES.items() if name != "scalefl"},  # which has no subnets
    "fedsa_lora": ALGORITHMS["fedsa_lora"](**SETTINGS),
    "fedrep": ALGORITHMS["fedrep"](private="head", head_steps=3, **SETTINGS),
}
THOROUGH = {"gmeta-exact", "gmeta-fo", "gmeta-hf", "fedrep", "ditto", "fedsa_lora"}
"""Cases that are run on workers and in stacks, too; the others are slow, 3 seconds each."""


class Sentences(nn.Module):
    """A transformer that reads five numbers as five tokens."""

    def __init__(self):
        super().__init__()
        config = transformers.BertConfig(**SIZES)
        self.bert = transformers.BertForSequenceClassification(config)
        self.register_buffer("direction", torch.randn(8))

    def forward(self, x):
        return self.bert(inputs_embeds=x.unsqueeze(-1) * self.direction)


@pytest.fixture(scope="module")
def objective():
    torch.manual_seed(0)
    module = add_adapters(Sentences(), 2, 4.0, ["query", "value"]).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:  # else A has no gradient at first
                parameter.normal_(0, 0.5)
    return Objective(module)


@pytest.mark.parametrize(
    "case", [c if c in THOROUGH else pytest.param(c, marks=pytest.mark.slow) for c in LORA]
)
def test_every_method_trains_adapters_with_the_same_bits_everywhere(case, objective, tmp_path):
    algorithm, data = LORA[case], agents_data(4)
    plan = plan_of(algorithm, rounds=4, participation=0.6, unseen_agents=1)
    plan = replace(plan, objective=objective)
    engine = DirectEngine(objective, federation_of(data, plan.seed, 1), plan.seed)
    right = history(algorithm, engine)
    states = states_of(engine, right[-1]).values()
    vectors = [v for state in (right[-1].server, *states) for v in (state or {}).values()]
    assert objective.size == TRAINED >= max(v.numel() for v in vectors)
    scores = evaluate(algorithm, engine, right[-1])
    resumed = killed_and_resumed(algorithm, engine, tmp_path / "run")
    assert same(resumed[-1].server, right[-1].server)
    assert same_states(resumed[-1], right[-1], engine)
    rounds = list(train(algorithm, engine, objective.initial(), rounds=4, participation=0.6))
    server = Server(plan, sites_of(plan, data, tmp_path / "sites"), RUN)
    for one, other in zip(server.train(), rounds, strict=True):
        assert same(one.server, other.server) and one.cost == other.cost
    for agent in range(4):
        state = right[-1].states.get(agent) or {}
        assert same(site_state(tmp_path / "sites", server, agent, state) or {}, state)
    assert server.scoring.evaluate(rounds[-1]).scores == scores
    if case in THOROUGH:
        with WorkerEngine(engine, 2) as workers:
            spread = history(algorithm, workers)
            assert same(spread[-1].server, right[-1].server)
            assert same_states(spread[-1], right[-1], engine)
        batched = BatchedEngine(objective, engine.federation, engine.seed)
        assert_near(history(algorithm, batched)[-1].server, right[-1].server)
