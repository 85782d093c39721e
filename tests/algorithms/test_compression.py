"""Codecs: bounded errors, error feedback, sizes, and codes that can't be decoded."""

import math

import pytest
import torch

from nufed.algorithms.compression import (
    BLOCK,
    CODECS,
    Bfloat16,
    CodeError,
    Int8,
    TopK,
    compress,
    decompress,
    initial_residuals,
    update_bytes,
    without_residuals,
)

SIZE = 2 * BLOCK + 100


def vectors(seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    w = torch.randn(SIZE, generator=rng, dtype=dtype)
    return w, w + 0.01 * torch.randn(SIZE, generator=rng, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("codec", [Bfloat16(), Int8(), TopK(0.1)])
def test_the_server_decodes_what_the_agent_knows_it_decodes(codec, dtype):
    w, y = vectors(dtype=dtype)
    sent = compress(codec, {"model": y}, {"model": w}, {})
    found = decompress(codec, sent.codes, {"model": w})["model"]
    assert torch.equal(found, sent.vectors["model"]) and found.dtype == dtype
    assert sum(code.nbytes for code in sent.codes.values()) == update_bytes(codec, {"model": w})


def test_the_errors_are_bounded():
    w, y = vectors(dtype=torch.float64)
    change = y - w
    lost = change - Bfloat16().decode(Bfloat16().encode(change), change)
    assert (lost.abs() <= 2.0**-8 * change.abs()).all() and lost.abs().max() > 0
    codes = Int8().encode(change)
    lost = (change - Int8().decode(codes, change)).abs()
    half = (codes["scales"] / 2).repeat_interleave(BLOCK)[:SIZE]
    assert (lost <= half * (1 + 1e-12)).all() and lost.max() > 0.9 * half.min()
    kept = TopK(0.1).decode(TopK(0.1).encode(change), change)
    number = math.ceil(0.1 * SIZE)
    assert int((kept != 0).sum()) == number
    # the largest are sent exactly: what is lost has at most 1 − share of the squared norm
    assert torch.equal(kept[kept != 0], change[kept != 0])
    assert change[kept == 0].abs().max() <= kept[kept != 0].abs().min()
    assert (change - kept).norm() ** 2 <= 0.9 * change.norm() ** 2
    zero = torch.zeros(SIZE)
    assert all(not codec().decode(codec().encode(zero), zero).any() for codec in CODECS.values())


def test_the_error_of_bfloat16_has_no_bias():
    change = torch.rand(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    lost = change - Bfloat16().decode(Bfloat16().encode(change), change)
    assert abs(float(lost.mean())) < 5 * float(lost.std()) / 10**3


@pytest.mark.parametrize("codec", [Int8(), TopK(0.05)])
def test_what_was_sent_and_the_residual_are_all_changes(codec):
    state, wanted, decoded = {}, torch.zeros(SIZE).double(), torch.zeros(SIZE).double()
    for round in range(30):
        w, y = vectors(round, torch.float64)
        sent = compress(codec, {"model": y}, {"model": w}, state)
        wanted += y - w
        decoded += sent.vectors["model"] - w
        state = sent.residuals
    residual = state["residual/model"]
    assert torch.allclose(decoded + residual, wanted, rtol=0, atol=1e-12)
    assert residual.norm() > 0
    assert without_residuals({**state, "control": residual}).keys() == {"control"}
    assert without_residuals(state) is None
    assert initial_residuals(codec, {"model": w}).keys() == state.keys()
    assert initial_residuals(Bfloat16(), {"model": w}) == {} == initial_residuals(None, {})


def test_residuals_of_vectors_that_are_not_sent_in_this_round_are_kept():
    w, y = vectors()
    kept = {"residual/head": torch.ones(2)}
    assert compress(Int8(), {"model": y}, {"model": w}, kept).residuals.keys() == {
        "residual/head",
        "residual/model",
    }


@pytest.mark.parametrize("places", [[1, 0], [0, 0], [-1, 0], [0, 3]])
def test_places_that_do_not_ascend_within_the_vector_are_refused(places):
    codes = {"model/places": torch.tensor(places).int(), "model/values": torch.ones(2)}
    with pytest.raises(CodeError, match="must ascend within 0 … 2"):
        decompress(TopK(), codes, {"model": torch.zeros(3)})


def test_sizes():
    before = {"model": torch.zeros(10 * BLOCK)}
    assert update_bytes(None, before) == 40 * BLOCK
    assert update_bytes(Bfloat16(), before) == 20 * BLOCK
    assert update_bytes(Int8(), before) == 10 * BLOCK + 40
    assert update_bytes(TopK(0.01), before) == 8 * math.ceil(0.1 * BLOCK)
