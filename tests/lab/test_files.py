"""Tensors are written without a copy, to the same bytes as safetensors; a seal covers all bytes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save

from nufed.errors import RunError
from nufed.lab.files import (
    read_sealed,
    seal,
    sha256,
    sha256_of,
    tensor_pieces,
    unseal,
    write_durably,
    write_sealed,
)

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
    about.pop("__metadata__", None)  # reserved by the format
    tensors = {name: torch.randint(0, 9, shape).to(dtype) for name, (dtype, shape) in about.items()}
    assert b"".join(tensor_pieces(tensors)) == save(tensors)


@pytest.mark.parametrize("size", [0, 1])
def test_a_stride_of_zero_is_written_where_it_does_not_matter(size):
    odd = torch.tensor([7]).as_strided((size,), (0,))
    assert b"".join(tensor_pieces({"odd": odd})) == save({"odd": odd.clone()})


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


EMPTY = {"rows": torch.from_numpy(np.concatenate([np.array([], np.int64)]))}


@pytest.mark.parametrize(
    "tensors", [None, {}, {"w": torch.arange(5.0), "n": torch.tensor(3)}, EMPTY]
)
def test_every_byte_of_a_sealed_file_is_covered(tmp_path, tensors):
    path = tmp_path / "file"
    write_sealed(path, {"round": 3, "text": "\ud7ff\n"}, tensors)
    found = read_sealed(path)
    assert found.about == {"round": 3, "text": "\ud7ff\n"}
    assert found.tensors.keys() == (tensors or {}).keys()
    assert all(torch.equal(found.tensors[name], own) for name, own in (tensors or {}).items())
    good = path.read_bytes()
    for content in [good[:-1], good + b"\0", *(flipped(good, place) for place in range(len(good)))]:
        path.write_bytes(content)
        with pytest.raises(RunError, match=f"{path} is damaged"):
            read_sealed(path)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_a_sealed_file_with_tensors_is_a_safetensors_file(tmp_path):
    write_sealed(tmp_path / "file", {"round": 3}, {"w": torch.arange(5.0)})
    with safe_open(tmp_path / "file", "pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.arange(5.0))
        assert json.loads(file.metadata()["about"]) == {"round": 3}


@pytest.mark.parametrize("about", [None, [], "x", 3])
def test_a_crafted_file_without_a_mapping_is_refused(about):
    with pytest.raises(RunError, match="is damaged"):
        unseal(b"".join(seal(about)))
