"""Where data sets that are too large to ship are kept, and how they are checked before use.

A data set is looked for in the directory that ``NUFED_DATA`` names, else in the cache directory.
Files whose bytes are known are compared with their SHA-256 each time they are read.
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
    """A data set that is kept as files.

    Args:
        name: what it is called in a configuration.
        files: paths under the data directory, with the SHA-256 of their bytes ("" if any will do).
        url: the official archive that holds them; "" if there is none.
        size: bytes of that archive, roughly.
    """

    name: str
    files: Mapping[str, str] = field(repr=False)
    url: str = ""
    size: int = 0

    def missing(self) -> list[str]:
        """The files that are not there."""
        return [file for file in self.files if not (data_directory() / file).is_file()]

    def complete(self) -> bool:
        """Whether all files are there and right."""
        try:
            for file in self.files:
                self.read(file)
        except InputError:
            return False
        return True

    def read(self, file: str) -> bytes:
        """The bytes of one of its files, once they are known to be right."""
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
        if not right(content, self.files[file]):
            raise InputError(
                f"{path} is not the official file (its SHA-256 differs): remove it and run "
                f"`nufed data get {self.name}`"
            )
        return content


def right(content: bytes, sha256: str) -> bool:
    """Whether bytes are the expected ones; without a SHA-256 any are."""
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
MNIST_WRITERS = Stored("mnist-writers", {"mnist_by_writer.npz": ""})

STORED = {each.name: each for each in (CIFAR10, CIFAR100, MNIST_WRITERS)}
