"""CLINC150: organisations with a few intents of a domain under private labels."""

import json
from collections import Counter

import pytest

from nufed import InputError
from nufed.lab.readers.sources import (
    INTENTS,
    SOURCES,
    Sentences,
    intents,
    organisations,
    read_sentences,
)

transformers = pytest.importorskip("transformers", reason='needs pip install "nufed[hf]"')
DOMAINS = {"bank": list("abcdef"), "home": list("ghijkl")}
ROWS = [[f"{intent} {number}", intent] for number in range(4) for intent in "abcdefghijkl"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of letters and digits."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl0123456789"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def small():
    content = json.dumps({"train": ROWS, "test": ROWS[:12]}).encode()
    return read_sentences(content, json.dumps(DOMAINS).encode(), "train")


def test_intents_of_a_domain_are_dealt_out_under_labels_of_the_organisation(tokenizer):
    read = small()
    samples = organisations(read, tokenizer, ways=3)
    assert len(samples) == len(ROWS) and samples.classes == ("0", "1", "2")
    assert set(samples.owners) == {"bank-0", "bank-1", "home-0", "home-1"}
    letters = samples.inputs["input_ids"][:, 1] - 5  # after [CLS], numbered from the vocabulary
    held = Counter()
    for owner in sorted(set(samples.owners)):
        rows = samples.owners == owner
        pairs = set(zip(samples.targets[rows].tolist(), letters[rows].tolist(), strict=True))
        assert len(pairs) == 3 and len({label for label, _ in pairs}) == 3
        names = {"abcdefghijkl"[letter] for _, letter in pairs}
        assert names <= set(DOMAINS[owner[:4]])
        held.update(names)
    assert held == Counter("abcdefghijkl")  # each intent at one organisation


def test_fewer_sentences_and_more_organisations(tokenizer):
    samples = organisations(small(), tokenizer, ways=2, samples=3, tasks=5)
    assert len(set(samples.owners)) == 10 and len(samples) == 10 * 2 * 3
    again = organisations(small(), tokenizer, ways=2, samples=3, tasks=5)
    other = organisations(small(), tokenizer, ways=2, samples=3, tasks=5, seed=1)
    assert samples.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer": None}, "data.args.tokenizer must be the folder or the name"),
        ({"ways": 7}, "ways = 7: must be a whole number from 2 to 6, the intents of a domain"),
        ({"samples": 0}, "samples = 0: must be a whole number, at least 1"),
        ({"tokenizer": "no/where"}, "neither a folder nor in the local cache"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(tokenizer, changed, said):
    with pytest.raises(InputError, match=said):
        organisations(**{"read": small(), "tokenizer": tokenizer, **changed})


def test_the_parts_are_the_official_ones():
    with pytest.raises(InputError, match="part = 'oos_train': must be one of train, val, test"):
        read_sentences(b"{}", b"{}", "oos_train")


def test_the_real_file_has_organisations_of_ten_domains(real_data, tokenizer):
    assert SOURCES["intents"] is intents and INTENTS.complete()
    sentences, domains = map(INTENTS.read, INTENTS.files)
    sizes = {
        part: len(read_sentences(sentences, domains, part).texts) for part in ("train", "test")
    }
    assert sizes == {"train": 15_000, "test": 4_500}
    samples = intents(tokenizer, samples=1)
    assert len(samples) == 150 and len(set(samples.owners)) == 30
    assert {owner.rpartition("-")[0] for owner in samples.owners} == set(json.loads(domains))
    assert isinstance(read_sentences(sentences, domains, "val"), Sentences)
