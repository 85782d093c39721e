"""Data sets that are read from files: small ones made here, and the real ones where they are."""

import dataclasses
import hashlib
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from nufed import InputError
from nufed.lab.readers import sources
from nufed.lab.readers.sources import CIFAR10, CIFAR100, MNIST_WRITERS, SOURCES, data_directory

CIFAR = [("CIFAR10", sources.cifar10, 1, 10), ("CIFAR100", sources.cifar100, 2, 100)]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("NUFED_DATA", str(tmp_path))
    return tmp_path


def write_cifar(name, label_bytes, classes, directory, monkeypatch):
    """Three records in each file of a CIFAR, and the right SHA-256 for them."""
    stored = {"CIFAR10": CIFAR10, "CIFAR100": CIFAR100}[name]
    rng = np.random.default_rng(0)
    records, sha256 = [], {}
    for file in stored.files:
        block = rng.integers(0, 256, (3, label_bytes + 3072), np.uint8)
        block[:, label_bytes - 1] = rng.integers(0, classes, 3)
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_bytes(block.tobytes())
        sha256[file] = hashlib.sha256(block.tobytes()).hexdigest()
        records.append(block)
    monkeypatch.setattr(sources, name, dataclasses.replace(stored, files=sha256))
    return np.concatenate(records)


@pytest.mark.parametrize(("name", "source", "label_bytes", "classes"), CIFAR)
def test_cifar_records(name, source, label_bytes, classes, directory, monkeypatch):
    records = write_cifar(name, label_bytes, classes, directory, monkeypatch)
    samples = source()
    assert samples.inputs.dtype == torch.uint8 and samples.inputs.shape == (len(records), 3, 32, 32)
    assert samples.targets.tolist() == records[:, label_bytes - 1].tolist()
    for channel, row, column in [(0, 0, 0), (0, 0, 5), (1, 7, 3), (2, 31, 31)]:
        place = label_bytes + 1024 * channel + 32 * row + column
        assert (samples.inputs[:, channel, row, column].numpy() == records[:, place]).all()


@pytest.mark.parametrize(
    ("pixels", "of_0", "of_255"),
    [("unit", 0, 1), ("symmetric", -1, 1), ("standardised", -1.9, 2.1)],
)
def test_pixels(pixels, of_0, of_255, directory, monkeypatch):
    write_cifar("CIFAR100", 2, 100, directory, monkeypatch)
    samples = sources.cifar100(pixels=pixels)
    flat = samples.inputs.flatten()
    flat[0], flat[1] = 0, 255
    inputs, _ = samples.take(np.array([0]))
    assert inputs.dtype == torch.float32
    assert inputs.flatten()[:2].tolist() == pytest.approx([of_0, of_255], abs=1e-6)


def test_unreadable_files_are_named(directory, monkeypatch):
    with pytest.raises(InputError, match=r"cifar10 is not here .*`nufed data get cifar10`"):
        sources.cifar10()
    with pytest.raises(InputError, match="must be one of unit, symmetric, standardised"):
        sources.cifar10(pixels="raw")
    write_cifar("CIFAR100", 2, 100, directory, monkeypatch)
    path = directory / "cifar-100-binary/train.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"its SHA-256 differs.*`nufed data get cifar100`"):
        sources.cifar100()


def test_class_names(directory, monkeypatch):
    for name, source, label_bytes, classes in CIFAR:
        write_cifar(name, label_bytes, classes, directory, monkeypatch)
        names = source().classes
        assert len(names) == len(set(names)) == classes


def test_the_data_directory(monkeypatch):
    monkeypatch.setenv("NUFED_DATA", "/data")
    assert data_directory() == Path("/data")
    monkeypatch.delenv("NUFED_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_directory() == Path("/cache/nufed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/a")
    assert data_directory() == Path("/home/a/.cache/nufed")


def writers(**changed):
    """An archive of 4 training and 2 test images, with some arrays changed or left out (None)."""
    arrays = {
        "x_train": np.arange(4 * 784).reshape(4, 28, 28).astype(np.uint8),
        "y_train": np.array([3, 0, 9, 3], np.uint8),
        "writer_train": np.array([7, 7, 0, 7], np.int16),
        "x_test": np.ones((2, 28, 28), np.uint8),
        "y_test": np.array([1, 2], np.uint8),
        "writer_test": np.array([7, 8], np.int16),
    } | changed
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in arrays.items() if array is not None})
    return buffer.getvalue()


def test_writers_are_the_owners_and_those_of_the_parts_are_different_people(directory):
    (directory / "mnist_by_writer.npz").write_bytes(writers())
    samples = sources.mnist_writers()
    assert samples.inputs.dtype == torch.uint8 and samples.input_shape == (28, 28)
    assert samples.owners.tolist() == ["train-7", "train-7", "train-0", "train-7"]
    assert samples.targets.tolist() == [3, 0, 9, 3]
    everyone = sources.mnist_writers("all")
    assert len(everyone) == 6 and set(everyone.owners) == {"train-7", "train-0", "test-7", "test-8"}
    with pytest.raises(InputError, match="must be train, test or all"):
        sources.mnist_writers("both")


@pytest.mark.parametrize(
    "content",
    [
        writers(x_train=None),
        writers(x_train=np.zeros((4, 28, 28))),
        writers(x_train=np.zeros((4, 784), np.uint8)),
        writers(x_train=np.uint8(1)),
        writers(y_train=np.array([3, 0, 9], np.uint8)),
        writers(y_train=np.array([3, 0, 9, 10], np.uint8)),
        writers(y_train=np.array([3, 0, 9, 1.5])),
        writers(writer_train=np.zeros((4, 1), np.int16)),
        writers(writer_train=np.array(["a", {}, None, 1], object)),
        writers()[:-30],
        writers().replace(b"descr", b"d#scr"),
        pickle.dumps({"x_train": 1}),
        b"",
    ],
)
def test_other_layouts_and_pickles_are_refused(content, directory):
    (directory / "mnist_by_writer.npz").write_bytes(content)
    with pytest.raises(
        InputError, match=r"mnist_by_writer.npz does not have the layout.*docs/data"
    ):
        sources.mnist_writers()


def test_an_array_alone_is_refused(directory):
    np.save(directory / "array.npy", np.zeros(3))
    (directory / "array.npy").rename(directory / "mnist_by_writer.npz")
    with pytest.raises(InputError, match="does not have the layout"):
        sources.mnist_writers()


def _needs(stored):
    if stored.missing():
        pytest.skip(f"set NUFED_DATA to a directory made by `nufed data get {stored.name}`")


@pytest.mark.parametrize(("stored", "per_class"), [(CIFAR10, 5000), (CIFAR100, 500)])
def test_the_real_cifar(stored, per_class, real_data):
    _needs(stored)
    samples = SOURCES[stored.name]()
    assert samples.inputs.dtype == torch.uint8 and samples.inputs.shape == (50_000, 3, 32, 32)
    assert samples.inputs.is_contiguous()
    assert set(samples.targets.bincount().tolist()) == {per_class}
    if stored is CIFAR10:
        first = [samples.classes[target] for target in samples.targets[:4]]
        assert first == ["frog", "truck", "truck", "deer"]


def test_the_real_mnist_by_writer(real_data):
    _needs(MNIST_WRITERS)
    for part, images, people in (("train", 60_000, 539), ("test", 10_000, 297)):
        samples = sources.mnist_writers(part)
        assert len(samples) == images and len(set(samples.owners)) == people
