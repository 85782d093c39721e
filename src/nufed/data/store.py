"""Storage of data sets that are too large to ship, and their verification before use.

The data directory is ``NUFED_DATA``, else in the user's cache directory. Files with a known SHA-256
are verified each time they are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nufed.errors import InputError


@dataclass(frozen=True)
class Stored:
    """A data set that is stored as files.

    Args:
        name: its name in a configuration.
        files: paths under the data directory, with their SHA-256 ("" if unknown).
        url: the official archive that holds them or, with a "/" at its end, the official address
            under which they are single files; "" if there is none.
        size: of the download in bytes, approximate for an archive.
    """

    name: str
    files: Mapping[str, str] = field(repr=False)
    url: str = ""
    size: int = 0

    @property
    def single_files(self) -> bool:
        """Whether the official source has single files, not an archive."""
        return self.url.endswith("/")

    def missing(self) -> list[str]:
        """The missing files."""
        return [file for file in self.files if not (data_directory() / file).is_file()]

    def complete(self) -> bool:
        """Whether all files are there and valid."""
        try:
            for file in self.files:
                self.read(file)
        except InputError:
            return False
        return True

    def read(self, file: str) -> bytes:
        """The verified bytes of one of its files."""
        path = data_directory() / file
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise InputError(
                f"the data set {self.name} is not here ({path} is missing): run `nufed data get "
                f"{self.name}`, or set NUFED_DATA to the directory that holds {file}"
            ) from None
        except OSError as error:
            raise InputError(f"{path} can't be read ({error.strerror})") from error
        if not is_valid(content, self.files[file]):
            raise InputError(
                f"{path} is not the official file (its SHA-256 differs): remove it and run "
                f"`nufed data get {self.name}`"
            )
        return content


def is_valid(content: bytes, sha256: str) -> bool:
    """Whether bytes have this SHA-256; without one all are valid."""
    return not sha256 or hashlib.sha256(content).hexdigest() == sha256


def data_directory() -> Path:
    """``NUFED_DATA``, or ``nufed`` in the user's cache directory."""
    given = os.environ.get("NUFED_DATA")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nufed"


CIFAR10 = Stored(
    "cifar10",
    {
        "cifar-10-batches-bin/data_batch_1.bin": (
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
        ),
        "cifar-10-batches-bin/data_batch_2.bin": (
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
        ),
        "cifar-10-batches-bin/data_batch_3.bin": (
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
        ),
        "cifar-10-batches-bin/data_batch_4.bin": (
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
        ),
        "cifar-10-batches-bin/data_batch_5.bin": (
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
        ),
    },
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_000_000,
)
CIFAR100 = Stored(
    "cifar100",
    {
        "cifar-100-binary/train.bin": (
            "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"
        ),
    },
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    169_000_000,
)
# SHA-256 and sizes: tensorflow/datasets, url_checksums/fashion_mnist.txt, which names the same
# addresses as the README of zalandoresearch/fashion-mnist
FASHION_MNIST = Stored(
    "fashion-mnist",
    {
        "fashion-mnist/train-images-idx3-ubyte.gz": (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        "fashion-mnist/train-labels-idx1-ubyte.gz": (
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        "fashion-mnist/t10k-images-idx3-ubyte.gz": (
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        "fashion-mnist/t10k-labels-idx1-ubyte.gz": (
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    },
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    26_421_880 + 29_515 + 4_422_102 + 5_148,
)
MNIST_WRITERS = Stored("mnist-writers", {"mnist_by_writer.npz": ""})
OMNIGLOT = Stored("omniglot", {"omniglot_8_alphabets.npz": ""})

STORED = {each.name: each for each in (CIFAR10, CIFAR100, FASHION_MNIST, MNIST_WRITERS, OMNIGLOT)}
