"""The bits of gMeta's models, recorded before the code moved to its rooms (commit 42f824d).

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
        "exact": {"curvature": "exact"},
        "fo": {"curvature": "first_order"},
        "hf": {"curvature": "hessian_free"},
        "rates": {"rates_lr": 0.01},
        "fedavg": {"algorithm": "fedavg"},
    },
}
TORCH, PLAIN = "2.13.0", "a0a0a3f45cbe63c3e34aa66f92a31a6dd7954d64f06778ee60120f3e91405744"
RECORDED = {
    "direct": {
        "exact": "80e5ddb552e099e0740cce878e2faf3cf64cfe2c58892fee0032003a5b48c1b6",
        "fo": "1f2538d504a54fe7b1dfd3081c4fdf82da0d2260f5efb2a0ecd720e44feb522e",
        "hf": "06ee667762a154a7d8fb754900ff03a0981fb83ae4de3b62e5d5bc538e4efd44",
        "rates": "a8ab27ecf5596eb1411cf01a86a9de0bad15e0c4c96cdb7ed5fecd36950f84ef",
        "fedavg": "4d763e52fd580594b8a357f4a505960961dd2d610a7ad118fceeb22156f39044",
    },
    "batched": {
        "exact": "3567c983b437f20a4213f62e1815dfa5f62211528a55139727b4799217c21491",
        "fo": "6ffefc328eb8ff2c5476ef5f82eb94038a850978169b169897645f1936d2f06f",
        "hf": "2ea6d334ec9e618a8c9539b450f9e26b3ef468348f27b7dd9e8d65cc6846acb0",
        "rates": "eb1b7e28e08730aaea412725ef7160cf48cd13ccee3d95d8eeaf75b1cb955fde",
        "fedavg": "ca21bbe2a0f6d1c0e4f05b047824b0d4416b038369a090e5a18ea3ef847cfdb3",
    },
    "gram": {
        "exact": "c3069a91ce58a555ec304ea45606bc63336f364c5bda5a5fc9d45b97aacd773c",
        "fo": "670698b256015c3ba72c56ac529bdb43a1012113afcd9ae0fd10f71c3a9ea6b4",
        "hf": "45400b89e48b5d6175328e6ecf9ec5f430997ee78e124c4af4274f9f465ab862",
        "fedavg": "d71b6bfe50b400b9bec5f8c3a63edcd3f39efa38efc26438fdd3990d9226e118",
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
def test_models_have_the_bits_from_before_the_move(tmp_path, engine):
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
