"""CLINC150 (Larson et al. 2019): sentences with their intents, dealt out to organisations."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from nufed.data.omniglot import Characters
from nufed.data.samples import Samples
from nufed.errors import InputError, require
from nufed.lab.pretrained import tokens

PARTS = ("train", "val", "test")


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
    require(part in PARTS, "part", part, f"must be one of {', '.join(PARTS)}")
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
        ways, samples, tasks, seed: as for :func:`nufed.lab.readers.sources.intents`.
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
