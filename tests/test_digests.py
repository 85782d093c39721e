"""Every digest, signature and derived key is of an encoding that different contents never share.

docs/reliability.md has the table of all of them. Each is fuzzed: among many contents that are made
of separators, digits and parts of each other, no two have the same digest.
"""

import os
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, strategies as st

import nufed
from flower.ops.test_approvals import zipped
from nufed.data import Samples, Split
from nufed.data.partition import DirichletReusing
from nufed.flower.app import registry as authentication, signatures
from nufed.flower.app.registry import SECURE_SUM, SiteKeys
from nufed.flower.app.site import Task
from nufed.flower.ops.approvals import bundle_digest
from nufed.flower.ops.keys import make_site_key
from nufed.flower.secure_sum import site as secure_site
from nufed.flower.secure_sum.masking import (
    Advert,
    Secrets,
    confirmed_message,
    pair_context,
    signed_message,
)
from nufed.flower.secure_sum.terms import SumTerms
from nufed.lab.config import load_config
from nufed.lab.export.wandb_runs import run_id
from nufed.lab.files import canonical, seal, sha256, tensor_pieces
from nufed.lab.runs.read_run import version_of
from nufed.models.trainable import base_digest
from nufed.seeding import stream

SOURCE = Path(nufed.__file__).parent
TABLE = Path(__file__).parents[1] / "docs" / "reliability.md"
DIGESTING = re.compile(r"hashlib\.|\bsha256\(|\bsha256_of\(|\bcanonical\(|\bHKDF\(|\bdigest_of\(")

small = st.integers(0, 12)
text = st.text("a1/\n \"',[]\\é", max_size=4)
hexadecimal = st.text("0a", min_size=32, max_size=32)
binary = st.binary(max_size=4) | st.text("ab/\n", max_size=4).map(str.encode)
shape = st.lists(st.integers(0, 3), max_size=2).map(tuple)
kinds = st.sampled_from(["float32", "int64", "uint8"])
# an array without elements has no values that could differ
arrays = st.tuples(kinds, shape, small).map(lambda a: (*a[:2], a[2] if all(a[1]) else 0))
named_shapes = st.dictionaries(text, arrays, max_size=3)
names = st.text("a1/\n \"',[]", min_size=1, max_size=4)  # of parameters, which have no dots
plain = st.recursive(
    st.none() | st.booleans() | small | st.sampled_from([1.0, 0.5, -0.0]) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
attempts = st.tuples(hexadecimal, small, hexadecimal, st.sets(small, min_size=3, max_size=5))


def tensors(shapes):
    return {n: torch.full(s, v, dtype=getattr(torch, k)) for n, (k, s, v) in shapes.items()}


def frozen(shapes):
    module = torch.nn.Module()
    for name, tensor in tensors(shapes).items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return base_digest(module)


def samples(content):
    inputs, targets, classes, owners = content
    rows = len(targets)
    made = tuple(torch.full((rows, *s), v, dtype=getattr(torch, k)) for k, s, v in inputs)
    numbers = None if owners is None else np.array((owners * rows)[:rows])
    return Samples(made, torch.tensor(targets), tuple(classes), numbers).fingerprint


def split(agents):
    parts = [[np.array(own[kind], dtype=np.int64) for own in agents] for kind in (1, 2, 3)]
    return Split(*parts, tuple(own[0] for own in agents), ()).fingerprint


def labels(numbers):
    return DirichletReusing(np.array(numbers), 1, [1], 1.0, 0).describe()["labels_sha256"]


CONFIG = load_config("quickstart").model_dump(exclude_none=True)


def configuration(arguments):
    return load_config(CONFIG | {"data": CONFIG["data"] | {"args": arguments}}).fingerprint


def watched(folder):
    def version(content):
        for name, (size, time) in content.items():
            (folder / name).write_bytes(bytes(size))
            os.utime(folder / name, ns=(time, time))
        for name in {"run.json", "bounds.json"} - content.keys():
            (folder / name).unlink(missing_ok=True)
        return version_of(folder)

    return version


def reply(content):
    message_id, arrays, settings, numbers = content
    records = {f"arrays {name}": arrays_of(own) for name, own in arrays.items()}
    records |= {f"config {name}": ConfigRecord(own) for name, own in settings.items()}
    records |= {f"metrics {name}": MetricRecord(own) for name, own in numbers.items()}
    return authentication._statement(message_id, RecordDict(records))


def arrays_of(shapes):
    return ArrayRecord({name: Array(t.numpy()) for name, t in tensors(shapes).items()})


def terms(content):
    run, round, attempt, sites = content
    return SumTerms(run, round, attempt, tuple(sorted(sites)))


def confirmation(content):
    attempt, adverts, survivors = content
    known = {site: Advert(*parts, b"") for site, parts in adverts.items()}
    own = Secrets(terms(attempt), 0, 4, b"", b"", b"", known, {}, tuple(sorted(survivors)))
    return confirmed_message(own)


three_parts = st.tuples(binary, binary, binary)
DIGESTS = {
    "seeding.py": (
        st.tuples(small, text, small, small, small),
        lambda content: stream(*content).bit_generator.state["state"]["key"].tobytes(),
    ),
    "data/samples.py": (
        st.tuples(
            st.lists(arrays, min_size=1, max_size=3),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
            st.lists(text, min_size=3, max_size=4, unique=True),
            st.none() | st.lists(text, min_size=3, max_size=3),
        ),
        samples,
    ),
    "data/partition.py": (st.lists(st.integers(-1, 300), min_size=1, max_size=4), labels),
    "models/trainable.py": (
        st.dictionaries(names, arrays, min_size=1, max_size=3),
        frozen,
    ),
    "data/split.py": (
        st.lists(
            st.tuples(text, *[st.lists(st.integers(0, 2**40), max_size=3)] * 3),
            min_size=1,
            max_size=3,
        ),
        split,
    ),
    "lab/config/schema.py": (
        st.dictionaries(st.just("a"), plain | st.sampled_from([np.inf, -np.inf, np.nan])),
        configuration,
    ),
    "lab/files.py, canonical": (
        st.lists(plain | binary | st.lists(binary, max_size=3), max_size=3),
        lambda content: canonical(*content),
    ),
    "lab/files.py, sealed": (
        st.tuples(st.dictionaries(text, plain, max_size=2), st.none() | named_shapes),
        lambda content: sha256(
            seal(content[0], None if content[1] is None else tensors(content[1]))
        ),
    ),
    "flower/app/transport.py": (
        named_shapes,
        lambda content: sha256(tensor_pieces(tensors(content))),
    ),
    "lab/export/wandb_runs.py": (
        st.tuples(text, st.text("a1.-_", min_size=1, max_size=3), small),
        lambda content: run_id(*content),
    ),
    "flower/app/site.py": (
        st.tuples(hexadecimal, small, named_shapes, st.text("ab:", max_size=3)),
        lambda content: (
            Task(
                content[0], content[1], 0, tensors(content[2]), {}, 0, Path(), content[3], {}
            ).digest
        ),
    ),
    "flower/app/signatures.py": (
        st.tuples(st.sampled_from([authentication.REPLY, SECURE_SUM]), binary),
        lambda content: signatures._statement(*content),
    ),
    "flower/app/registry.py": (
        st.tuples(
            st.text("0a", max_size=3),
            st.dictionaries(text, named_shapes, max_size=2),
            st.dictionaries(text, st.dictionaries(text, small | text | binary, max_size=3)),
            st.dictionaries(text, st.dictionaries(text, small | st.just(0.5), max_size=3)),
        ),
        reply,
    ),
    "flower/secure_sum/terms.py": (attempts, lambda content: terms(content).digest),
    "flower/secure_sum/masking.py, pairs": (
        st.tuples(binary, text, small, small),
        lambda content: pair_context(*content),
    ),
    "flower/secure_sum/masking.py, keys": (
        st.tuples(attempts, small, three_parts),
        lambda content: signed_message(terms(content[0]), content[1], Advert(*content[2], b"")),
    ),
    "flower/secure_sum/masking.py, confirmations": (
        st.tuples(attempts, st.dictionaries(small, three_parts, max_size=3), st.sets(small)),
        confirmation,
    ),
    "flower/ops/approvals.py": (
        st.dictionaries(st.text("ab.", min_size=1, max_size=3).map("x{}x".format), binary),
        lambda content: bundle_digest(zipped(content)),
    ),
}


def as_text(content):
    """Equal for the same content of the same types; mappings and sets have no order."""
    if isinstance(content, dict):
        return f"{ {key: as_text(content[key]) for key in sorted(content)} }"
    if isinstance(content, list | tuple):
        return f"{[as_text(each) for each in content]}"
    return repr(sorted(content) if isinstance(content, set) else content)


def no_two_alike(data, contents, digest):
    """Different contents have different digests."""
    found = {}
    for content in data.draw(st.lists(contents, min_size=2, max_size=20)):
        assert as_text(found.setdefault(digest(content), content)) == as_text(content)


@pytest.mark.parametrize("name", DIGESTS)
@given(st.data())
def test_different_contents_have_different_digests(name, data):
    no_two_alike(data, *DIGESTS[name])


@given(st.data())
def test_a_page_is_reloaded_after_any_change(tmp_path_factory, data):
    about = st.tuples(st.integers(0, 3), st.integers(0, 10**6))
    files = st.dictionaries(st.sampled_from(["run.json", "bounds.json"]), about)
    no_two_alike(data, files, watched(tmp_path_factory.mktemp("watched")))


@pytest.mark.parametrize(
    "join", [" ".join, "/".join, "\n".join, lambda parts: repr("".join(parts))]
)
def test_the_same_search_finds_two_readings_of_joined_strings(join):
    @given(st.data())
    def search(data):
        no_two_alike(data, st.lists(text, max_size=3), join)

    with pytest.raises(AssertionError):
        search()


def test_the_digest_of_keys_depends_on_all_of_them(tmp_path):
    for number in range(4):
        make_site_key(tmp_path / f"{number}")
    lines = tuple((tmp_path / f"{number}.pub").read_text() for number in range(4))
    site = SimpleNamespace(plan=SimpleNamespace(site_keys=SiteKeys(lines)))
    chosen = [sites for size in range(5) for sites in combinations(range(4), size)]
    assert len({secure_site._keys_of(site, sites) for sites in chosen}) == len(chosen) == 16


def test_the_table_lists_all_of_them():
    """A new digest belongs into docs/reliability.md, and, if it is of more than one value, here."""
    table = (
        TABLE.read_text().split("## Digests and signatures")[1].split("\n## ")[0].partition("|")[2]
    )
    listed = set(re.findall(r"`([a-z_/]+\.py)`", table))
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if DIGESTING.search(path.read_text("utf-8"))
    }
    assert found == listed
    assert {name.partition(",")[0] for name in DIGESTS} <= listed
