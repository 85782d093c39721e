"""The bits of gMeta's models, recorded when the uniform mean became a fixed-point sum.

Bits depend on torch and on the kernels that it selects for a CPU: the digests were recorded with
torch 2.13.0 on an x86-64 CPU with AVX-512. Where plain torch code gives other bits than it did
there, the comparison is skipped.
"""

import hashlib
import platform

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import nufed as library

pytestmark = pytest.mark.usefixtures("no_report")
CONFIG = {
    "rounds": 3,
    "participation": 0.5,
    "eval_every": 3,
    "baselines": [],
    "eval_lr": "as_trained",
    "workers": 1,
    "data": {"agents": 8, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "model": {"args": {"hidden": [8], "activation": "tanh"}},
    "method": {
        "adapt_steps": 2,
        "adapt_lr": 0.05,
        "meta_lr": 0.3,
        "local_steps": 2,
        "batch_size": 6,
    },
    "methods": {
        "exact": {"algorithm": "gmeta", "curvature": "exact"},
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
        "hf": {"algorithm": "gmeta", "curvature": "hessian_free"},
        "rates": {"algorithm": "gmeta", "rates_lr": 0.01},
        "fedavg": {"algorithm": "fedavg"},
    },
}
TORCH, PLAIN = "2.13.0", "a0a0a3f45cbe63c3e34aa66f92a31a6dd7954d64f06778ee60120f3e91405744"
RECORDED = {
    "direct": {
        "exact": "81a894796faf95a56c01171b224d8e8ae8bb3e054c5f95ca7597a9a407ce5886",
        "fo": "9767472e8763eb954daced10d11caee6877a33c238b4cdb70d8ef2a4e9ffb711",
        "hf": "e2c4c67daa7e565538f1fa49efdc71e9cf91ef2c4572fd1ec214e0fb099b6a1a",
        "rates": "a26f98ee8fe86b0458cf803e438a6cba6d5dad18248db440813b3bd0c5b6bdc1",
        "fedavg": "86c49b26ccf8a46eb654e52471b2249a945a38248bba60c6e66c022d8320bff9",
    },
    "batched": {
        "exact": "393a4dc36247c7379c272fa5fd6add75d371e4e11bfe973b97fa4e820ce88644",
        "fo": "401812f312a102d96e036d58aa7b835edfe21a456cda7c72b6ce1cce045e1074",
        "hf": "44abbd62cd5d32e7980a80b107d56a44d821f3f493cb15b4fd607eda5a1df195",
        "rates": "99874b23e16d931a4d17422696a17b50541e9d576f0087b300149b35968cd6f3",
        "fedavg": "811124404d0ddc9f7508cbba9365ee47f437689be8c56f86ca10695ff8fb782b",
    },
    "gram": {
        "exact": "c96b2d96ebff1f3170a5342e6a8e0e0e6457b267cf68d0c2ab5a6237ebea06bd",
        "fo": "337777f0e3f3d2e054974938c13f92e58844de12d2cc87f2d4920762345c3104",
        "hf": "866d5c08ade19e13d3724647573147901b142285ec557690d29ca449ddbcbcad",
        "fedavg": "40318b3c3e72fbc61a16b0c41d052ab88e786e8b09d0b6f55b4daa8efdca79a5",
    },
}


def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def plain_bits():
    """The digest of a perceptron's gradients and Hessian-vector products in plain torch."""
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.rand(24, 64, generator=numbers), torch.arange(24) % 10
    w = [(torch.rand(s, generator=numbers) - 0.5).requires_grad_() for s in ((8, 64), (10, 8))]
    found = [x[:6] @ x.T, torch.stack([x[:6], x[6:12]]) @ torch.stack([w[0].T, w[0].T])]
    for rows in (6, 18, 24):
        loss = F.cross_entropy(torch.tanh(x[:rows] @ w[0].T) @ w[1].T, y[:rows])
        gradients = torch.autograd.grad(loss, w, create_graph=True)
        products = torch.autograd.grad(sum((g * g).sum() for g in gradients), w)
        found += [*gradients, *products]
    return digest(*(tensor.detach() for tensor in found))


@pytest.mark.parametrize("engine", ["direct", "batched", "gram"])
def test_models_have_the_recorded_bits(tmp_path, engine):
    here = torch.__version__.partition("+")[0]
    if here != TORCH or platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip(f"recorded with torch {TORCH} on x86-64; this is {here}, {platform.machine()}")
    if plain_bits() != PLAIN:
        pytest.skip("torch selects other kernels for this CPU, with other bits, than for AVX-512")
    methods = {name: CONFIG["methods"][name] for name in RECORDED[engine]}
    run = library.run(CONFIG | {"methods": methods, "engine": engine}, out=tmp_path / "run").path
    found = {}
    for name in methods:
        model = load_file(run / "methods" / name / "seed-0" / "model.safetensors")
        found[name] = digest(*(model[key] for key in sorted(model)))
    assert found == RECORDED[engine]
