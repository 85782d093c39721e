"""Users' data files: sizes are checked before unpacking, and bounded while reading."""

import io
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nufed import InputError
from nufed.lab.readers import files as limits, files as parquet_file
from nufed.lab.readers.files import LIMIT, from_cell, read_data, read_npz, to_cell

MB = 10**6


def npy(shape, dtype="<f8", content=b"", order=False):
    """An NPY file with an arbitrary header."""
    file = io.BytesIO()
    described = {"descr": dtype, "fortran_order": order, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue() + content


def npz(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def most_memory(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(path):
    """The sentence, and the memory that it took."""
    said = []

    def read():
        with pytest.raises(InputError) as caught:
            read_data(path)
        said.append(str(caught.value))

    memory = most_memory(read)
    assert str(path) in said[0] and "\n" not in said[0]
    return said[0], memory


def test_an_npz_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_BYTES", 10 * MB)
    bomb = npz(tmp_path / "bomb.npz", inputs=npy((50 * MB // 8,), content=bytes(50 * MB)))
    assert bomb.stat().st_size < MB
    said, memory = refused(bomb)
    assert "inputs unpacks to 50,000,000 bytes, and 10,000,000 is the limit" in said
    assert LIMIT in said and memory < 5 * MB
    targets = npy((1, 1), "|i1", b"\0")
    two = npz(tmp_path / "two.npz", inputs=npy((6 * MB,), "|i1", bytes(6 * MB)), targets=targets)
    monkeypatch.setenv(LIMIT, str(6 * MB))
    assert "targets unpacks to 1 bytes, and 0 is the limit" in refused(two)[0]
    monkeypatch.setenv(LIMIT, str(6 * MB + 1))
    assert read_data(two).inputs.shape == (6 * MB,)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (npy((10**18,)), "inputs unpacks to 8,000,000,000,000,000,000 bytes"),
        (npy((2**62, 2**62)), "inputs unpacks to"),
        (npy((10**9,), "<U1000"), "inputs unpacks to 4,000,000,000,000 bytes"),
        (npy((-1,), content=bytes(80)), "not of numbers or strings"),
        (npy((3,), content=bytes(16)), "does not have the size that its header states"),
        (npy((3,), content=bytes(32)), "does not have the size that its header states"),
        (npy((1,), "|O", bytes(8)), "not of numbers or strings"),
        (npy((1,), "<M8[s]", bytes(8)), "not of numbers or strings"),
        (npy((1,), "<c16", bytes(16)), "not of numbers or strings"),
        (b"\x93NUMPY\x03\x00" + bytes(100), "version (3, 0) of the NPY format"),
        (b"", "not an NPZ file"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, member, words):
    said, memory = refused(npz(tmp_path / "bad.npz", inputs=member, targets=npy((0,))))
    assert words in said and memory < 5 * MB


def test_a_member_that_is_larger_than_the_directory_says_is_not_unpacked(tmp_path):
    path = npz(tmp_path / "lie.npz", inputs=npy((2 * MB,), "|i1", bytes(50 * MB)))
    with zipfile.ZipFile(path) as archive:
        told = archive.getinfo("inputs.npy").file_size
    content = path.read_bytes().replace(struct.pack("<L", told), struct.pack("<L", 2 * MB + 200))
    path.write_bytes(content)
    said, memory = refused(path)
    assert "not an NPZ file" in said and memory < 20 * MB


def text(length, distinct, rows=30_000):
    return pa.array([f"{row % distinct:0{length}d}" for row in range(rows)])


@pytest.mark.parametrize(
    ("label", "owner"),
    [
        (text(7, 10), None),
        (text(12, 30_000), text(12, 30_000)),
        (text(2000, 3), None),  # 60 MB, if rows did not share their text
        (text(200, 30_000), None),
        (pa.array(range(30_000)), pa.array(range(10**6, 10**6 + 30_000))),
        (pa.array(np.linspace(0, 1, 30_000)), None),
    ],
    ids=["classes", "texts", "long and few", "long and many", "numbers", "regression"],
)
@pytest.mark.parametrize("features", [1, 20])
def test_a_parquet_file_takes_no_more_memory_than_is_counted(
    tmp_path, monkeypatch, label, owner, features
):
    columns = {f"f{place}": np.zeros(30_000) for place in range(features)} | {"label": label}
    path, counted = tmp_path / "a.parquet", []
    pq.write_table(pa.table(columns | ({"who": owner} if owner is not None else {})), path)
    check = parquet_file.check_size
    monkeypatch.setattr(
        parquet_file, "check_size", lambda size, *rest: counted.append(size) or check(size, *rest)
    )
    own_pool = pa.proxy_memory_pool(pa.system_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(own_pool)
    try:
        read = most_memory(lambda: read_data(path, owner="who" if owner is not None else None))
    finally:
        pa.set_memory_pool(before)
    assert read + own_pool.max_memory() - path.stat().st_size < max(counted)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_without_a_size_bound_are_refused(tmp_path, compression):
    path = npz(tmp_path / "b.npz", compression, inputs=npy((9,), "|i1", bytes(9)))
    assert "np.savez does not use" in refused(path)[0]


def test_whatever_numpy_saves_is_read_back(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(5, 4)),
        np.asfortranarray(rng.normal(size=(5, 4))),
        rng.normal(size=(5, 2, 2)).astype(">f4"),
        rng.integers(0, 9, (5, 4)).astype(np.uint8),
        rng.random((5, 4)) > 0.5,
        np.zeros((0, 4)),
    ]
    targets = np.array(["a", "bb", "a", "é", "="])
    for save in (np.savez, np.savez_compressed):
        for given in arrays:
            save(tmp_path / "good.npz", inputs=given, targets=targets)
            found = read_npz((tmp_path / "good.npz").read_bytes(), ("inputs", "targets", "none"))
            assert found.keys() == {"inputs", "targets"}
            assert np.array_equal(found["inputs"], given) and found["inputs"].dtype == given.dtype
            assert np.array_equal(found["targets"], targets)


def test_a_large_csv_and_special_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "large.csv"
    path.write_text("a,label\n" + "1,x\n" * 100)
    monkeypatch.setenv(LIMIT, "3000")
    assert "it has 408 bytes, and 375 is the limit" in refused(path)[0]
    monkeypatch.setenv(LIMIT, "4000")
    assert read_data(path).inputs.shape == (100, 1)
    monkeypatch.setenv(LIMIT, "much")
    assert "NUFED_DATA_LIMIT = 'much': must be a number of bytes" in refused(path)[0]
    monkeypatch.delenv(LIMIT)
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "endless.csv").symlink_to("/dev/zero")
    for name in ("fifo.csv", "endless.csv"):
        assert "not a regular file" in refused(tmp_path / name)[0]


def test_one_long_label_does_not_widen_the_others(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text("a,label\n" + "1,x\n" * 20_000 + f"1,{'y' * 100_000}\n")
    assert most_memory(lambda: read_data(path)) < 10 * MB  # an array of text would take 8 GB


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+x", "'+x"),
        ("-x", "'-x"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=x", "'\t=x"),
        ("\r=x", "'\r=x"),
        ("-0.5", "-0.5"),
        ("+1e-3", "+1e-3"),
        ("-1+2", "'-1+2"),
        ("-inf", "'-inf"),
        ("'=x", "''=x"),
        ("'tis", "'tis"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_class_names_are_no_formulas_in_a_csv_file_and_are_read_back(name, cell):
    assert to_cell(name) == cell and from_cell(cell) == name
