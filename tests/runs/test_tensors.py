"""Tensors are written in pieces, as the bytes that safetensors gives."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from nufed.runs.durable import sha256, sha256_of, write_durably
from nufed.runs.tensors import tensor_pieces

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
    max_size=5,
)


@given(TENSORS)
def test_pieces_are_the_bytes_of_safetensors(about):
    about.pop("__metadata__", None)  # means something else there
    tensors = {name: torch.randint(0, 9, shape).to(dtype) for name, (dtype, shape) in about.items()}
    assert b"".join(tensor_pieces(tensors)) == save(tensors)


def test_tensors_may_share_memory_and_are_not_copied(tmp_path):
    whole = torch.arange(12.0)
    tensors = {"rows": whole.view(3, 4), "columns": whole.view(3, 4).T, "end": whole[8:]}
    pieces = tensor_pieces(tensors)
    assert b"".join(pieces) == save({name: t.contiguous().clone() for name, t in tensors.items()})
    write_durably(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert sha256(pieces) == sha256_of(tmp_path / "file") == sha256(b"".join(pieces))
    whole += 1
    assert pieces[3] == tensor_pieces({"end": whole[8:]})[2]  # "end" is a view, not a copy
