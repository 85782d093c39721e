"""The data sets that nufed can load by name.

Those that are too large to ship (``stored.toml``) lie in the data directory, ``NUFED_DATA`` or one
in the user's cache directory. Files with a known SHA-256 are verified each time they are read.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from nufed.data.built_in import digits, sensors, sinusoid
from nufed.data.omniglot import Characters, omniglot14
from nufed.data.samples import Samples
from nufed.data.tables import as_table
from nufed.errors import InputError, require, require_whole
from nufed.lab.files import cache_directory
from nufed.lab.pretrained import tokens
from nufed.lab.readers.files import own_file, read_npz
from nufed.lab.readers.hugging_face import hugging_face
from nufed.lab.readers.leaf import leaf
from nufed.lab.readers.tables import own_table, read_columns
from nufed.lab.readers.text import of_texts, own_texts, roles
from nufed.seeding import stream


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

    @property
    def command(self) -> str:
        """The command that gets it, from the first missing file if it has no address."""
        source = "" if self.url else f" --from {[*self.missing(), *self.files][0]}"
        return f"nufed data get {self.name}{source}"

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


@dataclass(frozen=True)
class Origin:
    """Where a data set comes from: whom to cite, and under which licence it is."""

    citation: str
    licence: str


ORIGINS = {
    "digits": Origin("Alpaydin and Kaynak 1998, UCI Machine Learning Repository", "CC BY 4.0"),
    "cifar10": Origin("Krizhevsky 2009, Learning Multiple Layers of Features", "none stated"),
    "cifar100": Origin("Krizhevsky 2009, Learning Multiple Layers of Features", "none stated"),
    "fashion-mnist": Origin("Xiao, Rasul and Vollgraf 2017", "MIT"),
    "mnist-writers": Origin(
        "LeCun et al. 1998; writers: Yadav and Bottou 2019 (QMNIST)", "none stated"
    ),
    "omniglot": Origin("Lake, Salakhutdinov and Tenenbaum 2015", "MIT"),
    "heart": Origin(
        "Janosi, Steinbrunn, Pfisterer and Detrano 1988, Heart Disease, UCI Machine Learning "
        "Repository, doi:10.24432/C52P4X",
        "CC BY 4.0",
    ),
    "digit-tasks": Origin("LeCun et al. 1998", "none stated"),
    "omniglot14": Origin("Lake, Salakhutdinov and Tenenbaum 2015", "MIT"),
    "shakespeare": Origin("Shakespeare; file: Karpathy 2015 (char-rnn)", "public domain"),
    "intents": Origin(
        "Larson et al. 2019, An Evaluation Dataset for Intent Classification and Out-of-Scope "
        "Prediction (CLINC150)",
        "CC BY 3.0",
    ),
}


def is_valid(content: bytes, sha256: str) -> bool:
    """Whether bytes have this SHA-256; without one all are valid."""
    return not sha256 or hashlib.sha256(content).hexdigest() == sha256


def data_directory() -> Path:
    """``NUFED_DATA``, or ``nufed`` in the user's cache directory."""
    given = os.environ.get("NUFED_DATA")
    return Path(given).expanduser() if given else cache_directory()


_TABLES = tomllib.loads((files("nufed.lab.readers") / "stored.toml").read_text("utf-8"))
STORED = {name: Stored(name, **table) for name, table in _TABLES.items()}
CIFAR10, CIFAR100, FASHION_MNIST, MNIST_WRITERS, OMNIGLOT, SHAKESPEARE, INTENTS = STORED.values()
STORED["digit-tasks"] = MNIST_WRITERS  # its images
OMNIGLOT_PART = "omniglot_8_alphabets.npz"  # of earlier versions, whose runs still resume

Pixels: TypeAlias = Literal["unit", "symmetric", "standardised"]
# scale and shift of bytes; the last gives CIFAR mean about 0 and standard deviation about 1
PIXELS: dict[Pixels, tuple[float, float]] = {
    "unit": (1 / 255, 0.0),
    "symmetric": (2 / 255, -1.0),
    "standardised": (1 / (255 * 0.25), -0.475 / 0.25),
}
SIDE = 32  # pixels of a CIFAR image


def cifar10(pixels: Pixels = "unit") -> Samples:
    """The 50,000 training images of CIFAR-10: 3×32×32 pixels, 10 classes.

    ``pixels``: inputs in 0 … 1 (``unit``), in −1 … 1 (``symmetric``), or ``standardised``.
    """
    return _cifar(CIFAR10, 1, _lines("cifar10"), pixels)


def cifar100(pixels: Pixels = "unit") -> Samples:
    """The 50,000 training images of CIFAR-100: 3×32×32 pixels, 100 classes.

    ``pixels``: inputs in 0 … 1 (``unit``), in −1 … 1 (``symmetric``), or ``standardised``.
    """
    return _cifar(CIFAR100, 2, _lines("cifar100"), pixels)


def fashion_mnist(
    part: Literal["train", "test", "all"] = "train", pixels: Pixels = "unit"
) -> Samples:
    """Fashion-MNIST (Xiao et al. 2017): 28×28 pixels, 10 classes of clothing.

    ``part``: the 60,000 training images, the 10,000 test images, or all. ``pixels`` as for
    :func:`cifar10`; ``standardised`` uses the mean and standard deviation of CIFAR.
    """
    require(part in ("train", "test", "all"), "part", part, "must be train, test or all")
    require(pixels in PIXELS, "pixels", pixels, f"must be one of {', '.join(PIXELS)}")
    files = list(FASHION_MNIST.files)  # images and labels for training, then for test
    chosen = {"train": files[:2], "test": files[2:], "all": files}[part]
    arrays = [_idx(FASHION_MNIST.read(file), file) for file in chosen]
    scale, shift = PIXELS[pixels]
    return Samples(
        inputs=torch.from_numpy(np.concatenate(arrays[::2])),
        targets=torch.from_numpy(np.concatenate(arrays[1::2])).long(),
        classes=_lines("fashion-mnist"),
        scale=scale,
        shift=shift,
    )


def mnist_writers(
    part: Literal["train", "test", "all"] = "train", samples: int | None = None, seed: int = 0
) -> Samples:
    """MNIST with the person who wrote each digit: 28×28 pixels, one agent per writer.

    Args:
        part: the 539 writers of MNIST's training images, the 297 of its test images, or all.
        samples: digits of every writer, drawn at random; all by default.
        seed: of that draw, independent of the run's seeds.
    """
    require(part in ("train", "test", "all"), "part", part, "must be train, test or all")
    if samples is not None:
        require_whole(samples=samples)
    parts = ("train", "test") if part == "all" else (part,)
    (file,) = MNIST_WRITERS.files
    content, path = MNIST_WRITERS.read(file), data_directory() / file
    read = [_writers(content, name, path) for name in parts]
    images, labels, owners = (np.concatenate(column) for column in zip(*read, strict=True))
    if samples is not None:
        order = stream(seed, "mnist-writers").permutation(len(owners))
        held = (order[owners[order] == writer][:samples] for writer in np.unique(owners))
        kept = np.sort(np.concatenate(list(held)))
        images, labels, owners = images[kept], labels[kept], owners[kept]
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(labels).long(),
        classes=tuple(str(digit) for digit in range(10)),
        owners=owners,
        scale=1 / 255,
    )


def digit_tasks(
    ways: int = 3, samples: int = 20, tasks: int = 100, part: str = "train", seed: int = 0
) -> Samples:
    """MNIST as tasks: every agent has a few digits, labelled 0 … ways − 1 in an order of its own.

    No image is in two tasks. The same label is another digit at every agent.

    Args:
        ways: digits per agent.
        samples: images of each of them.
        tasks: the number of agents.
        part: of the images, as for :func:`mnist_writers`.
        seed: of these draws, independent of the run's seeds.
    """
    require_whole(samples=samples, tasks=tasks, ways=ways)
    require(ways <= 10, "ways", ways, "must be at most 10, the number of digits")
    images = mnist_writers(part)  # type: ignore[arg-type]
    assert isinstance(images.inputs, torch.Tensor)
    digits, rng = images.targets.numpy(), stream(seed, "digit-tasks")
    left = {digit: rng.permutation(np.flatnonzero(digits == digit)) for digit in range(10)}
    rows: list[np.ndarray[Any, Any]] = []
    for _ in range(tasks):
        for digit in rng.permutation(10)[:ways].tolist():
            rows.append(left[digit][:samples])
            left[digit] = left[digit][samples:]
            enough = "must be fewer: MNIST has about 6000 images of a digit"
            require(len(rows[-1]) == samples, "tasks", tasks, enough)
    width = len(str(tasks - 1))
    return dataclasses.replace(
        images,
        inputs=images.inputs[torch.from_numpy(np.concatenate(rows))],
        targets=torch.arange(ways).repeat_interleave(samples).repeat(tasks),
        classes=tuple(map(str, range(ways))),
        owners=np.repeat([f"{task:0{width}}" for task in range(tasks)], ways * samples),
    )


def check_writers(content: bytes, path: Path) -> None:
    """Refuse the bytes of the file ``path`` unless they are MNIST by writer."""
    for part in ("train", "test"):
        _writers(content, part, path)


def shakespeare(length: int = 80, least: int = 25, tokenizer: str | None = None) -> Samples:
    """Tiny Shakespeare, to predict next characters (65): one agent per role with enough text.

    Args:
        length: characters or tokens of a sample.
        least: samples that a role must have.
        tokenizer: the folder of a Hugging Face tokenizer, for tokens instead of characters.
    """
    (file,) = SHAKESPEARE.files
    play = SHAKESPEARE.read(file).decode("ascii")
    return of_texts(roles(play), length, least, tokenizer, "".join(sorted(set(play))))


CATEGORICAL = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")
NEVER_ZERO = ("trestbps", "chol")  # 0 was written for a missing value


def heart() -> Samples:
    """UCI heart disease: 920 patients of 4 hospitals, 13 columns with missing values, 2 classes.

    An agent is a hospital: cleveland, hungary, switzerland, long-beach.

    >>> samples = heart()
    >>> len(samples), samples.classes, len(samples.columns)
    (920, ('healthy', 'disease'), 13)
    """
    with as_file(files("nufed.data") / "heart.csv") as path:
        data = read_columns(path, "num", owner="hospital")
    assert data.labels is not None and data.owners is not None
    columns = {
        name: ["" if cell == "0" and name in NEVER_ZERO else cell for cell in cells]
        for name, cells in data.columns.items()
    }
    table = as_table(columns, CATEGORICAL)
    diseased = np.array([number != "0" for number in data.labels])
    return Samples(
        table.values,
        torch.from_numpy(diseased).long(),
        ("healthy", "disease"),
        np.array(data.owners),
        columns=table.columns,
    )


CLINC_PARTS = ("train", "val", "test")


class Sentences(NamedTuple):
    """Sentences by row, the intent of each, and the domain of each intent."""

    texts: list[str]
    intents: list[str]
    domains: dict[str, str]


def read_sentences(sentences: bytes, domains: bytes, part: str) -> Sentences:
    """The sentences of a part of CLINC150, without those that are out of scope.

    >>> read_sentences(b'{"test": [["hi", "greeting"]]}', b'{"talk": ["greeting"]}', "test")
    Sentences(texts=['hi'], intents=['greeting'], domains={'greeting': 'talk'})
    """
    require(part in CLINC_PARTS, "part", part, f"must be one of {', '.join(CLINC_PARTS)}")
    rows = json.loads(sentences)[part]
    by_intent = {intent: name for name, every in json.loads(domains).items() for intent in every}
    return Sentences([text for text, _ in rows], [intent for _, intent in rows], by_intent)


def organisations(
    read: Sentences,
    tokenizer: str | None,
    length: int = 32,
    ways: int = 5,
    samples: int | None = None,
    tasks: int | None = None,
    seed: int = 0,
) -> Samples:
    """Sentences as tokens, for organisations that number a few intents of their domain 0, 1, ….

    Args:
        read: the sentences.
        tokenizer: the folder of a pretrained model with its tokenizer, or a name in the local cache
            of Hugging Face.
        length: tokens of a sentence at most.
        ways, samples, tasks, seed: as for :func:`intents`.
    """
    if tokenizer is None:
        raise InputError(
            "must be the folder or the name of the pretrained model that reads the sentences",
            "data.args.tokenizer",
        )
    names, numbers = np.unique(read.intents, return_inverse=True)
    of_intent = np.array([read.domains[name] for name in names])
    domains, domain = np.unique(of_intent[numbers], return_inverse=True)
    fewest = min(int((of_intent == name).sum()) for name in domains)
    allowed = f"must be a whole number from 2 to {fewest}, the intents of a domain"
    require(isinstance(ways, int) and 2 <= ways <= fewest, "ways", ways, allowed)
    characters = Characters(domain, numbers, domains, np.zeros(len(domains)))
    dealt = characters.deal(ways, samples, tasks, seed)
    return dealt.of(tokens([read.texts[row] for row in dealt.rows], tokenizer, length), 1.0)


def intents(
    tokenizer: str | None = None,
    length: int = 32,
    ways: int = 5,
    samples: int | None = None,
    tasks: int | None = None,
    part: Literal["train", "val", "test"] = "train",
    seed: int = 0,
) -> Samples:
    """CLINC150: sentences of 150 intents in 10 domains; an agent is an organisation with a few.

    Every organisation has ``ways`` intents of one domain, numbered 0 … ways − 1: the same number is
    another intent at every organisation. It is called like its domain, for example banking-0.

    Args:
        tokenizer: the folder of a pretrained model with its tokenizer, or a name in the local cache
            of Hugging Face; inputs are its ``input_ids``, ``attention_mask``, ….
        length: tokens of a sentence at most.
        ways: intents per organisation.
        samples: sentences of each intent, drawn at random; all by default.
        tasks: organisations of every domain, each with intents drawn at random. By default intents
            are dealt out, without overlap.
        part: the official part: 100 sentences of each intent in ``"train"``, 20 in ``"val"`` and 30
            in ``"test"``.
        seed: of these draws, independent of the run's seeds.
    """
    sentences, domains = map(INTENTS.read, INTENTS.files)
    read = read_sentences(sentences, domains, part)
    return organisations(read, tokenizer, length, ways, samples, tasks, seed)


def _cifar(stored: Stored, labels: int, classes: tuple[str, ...], pixels: Pixels) -> Samples:
    """Records of ``labels`` label bytes, the last of them the class, and a channel-major image."""
    require(pixels in PIXELS, "pixels", pixels, f"must be one of {', '.join(PIXELS)}")
    width = labels + 3 * SIDE * SIDE
    records = [np.frombuffer(stored.read(f), np.uint8).reshape(-1, width) for f in stored.files]
    images = np.empty((sum(map(len, records)), 3, SIDE, SIDE), np.uint8)
    np.concatenate([r[:, labels:] for r in records], out=images.reshape(len(images), -1))
    scale, shift = PIXELS[pixels]
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(np.concatenate([r[:, labels - 1] for r in records])).long(),
        classes=classes,
        scale=scale,
        shift=shift,
    )


def _lines(name: str) -> tuple[str, ...]:
    """The class names of a data set, in the order of their numbers."""
    return tuple((files("nufed.data") / f"{name}.txt").read_text("utf-8").splitlines())


def _idx(content: bytes, file: str) -> np.ndarray[Any, Any]:
    """The bytes of a verified idx.gz file: two zeros, type 8, dimensions, their sizes, the data."""
    unpacked = gzip.decompress(content)
    if unpacked[:3] != b"\0\0\x08":
        raise InputError(f"{file} is not an idx file of bytes: get the data set again")
    shape = np.frombuffer(unpacked, ">i4", count=unpacked[3], offset=4)
    return np.frombuffer(unpacked, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _writers(content: bytes, part: str, path: Path) -> tuple[np.ndarray[Any, Any], ...]:
    """Images, labels and writers of one part of MNIST; writers are called train-0, test-326."""
    try:
        names = [f"{key}_{part}" for key in ("x", "y", "writer")]
        arrays = read_npz(content, names)
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"{missing[0]} is not in it")
        images, labels, writers = (arrays[name] for name in names)
        if images.dtype != np.uint8 or images.shape != (len(images), 28, 28):
            raise ValueError(f"x_{part} is {images.dtype} of shape {images.shape}")
        for key, column in (("y", labels), ("writer", writers)):
            if column.dtype.kind not in "iu" or column.shape != (len(images),):
                raise ValueError(f"{key}_{part} must hold one whole number per image")
        if not 0 <= labels.min() <= labels.max() <= 9:
            raise ValueError(f"y_{part} must hold digits")
    except Exception as error:  # zipfile and numpy may raise anything on an invalid file
        raise InputError(
            f"{path} does not have the layout of MNIST by writer ({error}): docs/data.md says how "
            "to make it"
        ) from error
    return images, labels, np.array([f"{part}-{writer}" for writer in writers])


DRAWN, DRAWING_SIDE = 105, 28  # pixels per side: of a drawing, and of an image
ARRAYS = ("ink", "alphabet", "character", "drawer", "alphabets")


def omniglot(
    ways: int = 5, samples: int | None = None, tasks: int | None = None, seed: int = 0
) -> Samples:
    """Omniglot at 28×28 pixels (Lake et al. 2015): few-shot tasks, as ``omniglot14`` has them.

    Drawings of 105×105 bits become 28×28 bytes, 255 for ink: every pixel is the mean over a window
    of 4 or 5 pixels per side (adaptive average pooling), rounded. Where only the file of earlier
    versions is there, with some alphabets and none for evaluation, it is used.

    Args:
        ways, samples, tasks, seed: as for :func:`nufed.data.omniglot.omniglot14`.
    """
    part = dataclasses.replace(OMNIGLOT, files={OMNIGLOT_PART: ""})
    stored = part if OMNIGLOT.missing() and not part.missing() else OMNIGLOT
    (file,) = stored.files
    arrays = _read(stored.read(file), data_directory() / file)
    characters = Characters(
        arrays["alphabet"], arrays["character"], arrays["alphabets"], arrays["evaluation"]
    )
    dealt = characters.deal(ways, samples, tasks, seed)
    return dealt.of(torch.from_numpy(_images(arrays["ink"][dealt.rows])), 1 / 255)


def check_omniglot(content: bytes, path: Path) -> None:
    """Refuse the bytes of the file ``path`` unless they have the layout of docs/data.md."""
    _read(content, path)


def _read(content: bytes, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        arrays = read_npz(content, (*ARRAYS, "evaluation"))
        if missing := [name for name in ARRAYS if name not in arrays]:
            raise ValueError(f"{missing[0]} is not in it")
        ink, names = arrays["ink"], arrays["alphabets"]
        width = -(-DRAWN * DRAWN // 8)
        if ink.dtype != np.uint8 or ink.shape != (len(ink), width) or not len(ink):
            raise ValueError(f"ink is {ink.dtype} of shape {ink.shape}, not bytes in {width}")
        for key in ("alphabet", "character", "drawer"):
            if arrays[key].dtype.kind not in "iu" or arrays[key].shape != (len(ink),):
                raise ValueError(f"{key} must hold one whole number per drawing")
        if names.dtype.kind != "U" or names.ndim != 1 or len(set(names)) < len(names):
            raise ValueError("alphabets must hold different names")
        if not 0 <= arrays["alphabet"].min() <= arrays["alphabet"].max() < len(names):
            raise ValueError("alphabet must hold places in alphabets")
        evaluation = arrays.setdefault("evaluation", np.zeros(len(names), np.uint8))
        if evaluation.dtype.kind not in "iub" or evaluation.shape != names.shape:
            raise ValueError("evaluation must hold a 0 or 1 per alphabet")
    except Exception as error:  # zipfile and numpy may raise anything on an invalid file
        raise InputError(
            f"{path} does not have the layout of Omniglot ({error}): docs/data.md says how to "
            "make it"
        ) from error
    return arrays


def _images(ink: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Packed drawings as small images; in whole numbers, so that all machines agree."""
    drawings = np.unpackbits(ink, axis=1, count=DRAWN * DRAWN).reshape(-1, DRAWN, DRAWN)
    places = np.arange(DRAWING_SIDE)
    starts, ends = places * DRAWN // DRAWING_SIDE, -(-(places + 1) * DRAWN // DRAWING_SIDE)
    images = np.empty((len(drawings), DRAWING_SIDE, DRAWING_SIDE), np.uint8)
    for y, (top, bottom) in enumerate(zip(starts, ends, strict=True)):
        band = drawings[:, top:bottom].sum(axis=1, dtype=np.int64)
        for x, (left, right) in enumerate(zip(starts, ends, strict=True)):
            area = (bottom - top) * (right - left)
            images[:, y, x] = (255 * band[:, left:right].sum(axis=1) + area // 2) // area
    return images


SOURCES: dict[str, Callable[..., Samples]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion-mnist": fashion_mnist,
    "mnist-writers": mnist_writers,
    "digit-tasks": digit_tasks,
    "omniglot14": omniglot14,
    "omniglot": omniglot,
    "sinusoid": sinusoid,
    "sensors": sensors,
    "heart": heart,
    "shakespeare": shakespeare,
    "intents": intents,
    "text": own_texts,
    "leaf": leaf,
    "hf": hugging_face,
    "file": own_file,
    "table": own_table,
}

WITH_PLACE = ("leaf", "hf")  # sources that may be written as NAME:PLACE


def source_of(name: str) -> tuple[str, dict[str, str]]:
    """The name of a source and the arguments that are part of it.

    >>> source_of("leaf:data/femnist"), source_of("digits"), source_of("my.module:function")
    (('leaf', {'path': 'data/femnist'}), ('digits', {}), ('my.module:function', {}))
    """
    source, colon, place = name.partition(":")
    return (source, {"path": place}) if colon and source in WITH_PLACE else (name, {})
