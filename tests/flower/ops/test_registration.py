"""The registry of sites: what is refused, and what a running server is told."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from nufed.errors import InputError, RunError
from nufed.flower.app.registry import read_sites
from nufed.flower.app.signatures import fingerprint, read_public, sign, verify
from nufed.flower.internals import ControlApi
from nufed.flower.ops.keys import make_site_key
from nufed.flower.ops.link import Link
from nufed.flower.ops.registration import (
    Admission,
    add_key,
    register_site,
    revoke_old_key,
    revoke_site,
)
from nufed.lab.runs.audit_log import audit


@pytest.fixture
def place(tmp_path):
    for name in ("a", "b", "c"):
        make_site_key(tmp_path / name)
    register_site(tmp_path, 0, "Ward 3", tmp_path / "a.pub")
    return tmp_path


def key(place, name):
    return fingerprint(read_public(place / f"{name}.pub"))


def sites(place):
    registry = read_sites(place / "sites.toml")
    found = {s.number: (s.name, [fingerprint(k) for k in s.keys]) for s in registry.site}
    return found, registry.revoked


def test_a_site_is_registered_with_its_number_name_and_key(place):
    register_site(place, 1, "Läb \"B\" \\ 'C'", place / "b.pub")
    assert sites(place) == (
        {0: ("Ward 3", [key(place, "a")]), 1: ("Läb \"B\" \\ 'C'", [key(place, "b")])},
        [],
    )
    assert (place / "sites.toml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("number", "name", "file", "words"),
    [
        (0, "Ward 4", "b", "the number 0 is registered twice"),
        (1, "Ward 3", "b", "the name Ward 3 is registered twice"),
        (1, "Ward 4", "a", "is registered twice or revoked"),
        (-1, "Ward 4", "b", "site.1.number"),
        (1, "", "b", "a name is one line"),
        (1, "two\nlines", "b", "a name is one line"),
        (1, "12", "b", "and not a number"),
    ],
)
def test_what_would_be_ambiguous_is_refused_and_changes_nothing(place, number, name, file, words):
    before = (place / "sites.toml").read_bytes()
    with pytest.raises(InputError, match=words) as raised:
        register_site(place, number, name, place / f"{file}.pub")
    assert "\n" not in str(raised.value)
    assert (place / "sites.toml").read_bytes() == before


def test_a_key_is_rotated_in_two_steps(place):
    assert add_key(place, "Ward 3", place / "b.pub") == key(place, "b")
    assert sites(place) == ({0: ("Ward 3", [key(place, "a"), key(place, "b")])}, [])
    with pytest.raises(InputError, match=r"has two keys already.*--finish"):
        add_key(place, "0", place / "c.pub")
    assert revoke_old_key(place, "0") == key(place, "a")
    assert sites(place) == ({0: ("Ward 3", [key(place, "b")])}, [key(place, "a")])
    with pytest.raises(InputError, match="has one key only"):
        revoke_old_key(place, "0")


def test_a_revoked_key_is_never_registered_again_but_the_number_is(place):
    revoke_site(place, "0")
    assert sites(place) == ({}, [key(place, "a")])
    with pytest.raises(InputError, match="registered twice or revoked"):
        register_site(place, 0, "Ward 3", place / "a.pub")
    register_site(place, 0, "Ward 3", place / "b.pub")
    assert sites(place)[0] == {0: ("Ward 3", [key(place, "b")])}


def test_every_change_is_in_the_audit_log_beside_the_registry(place, nufed):
    add_key(place, "0", place / "b.pub")
    revoke_old_key(place, "0")
    revoke_site(place, "0")
    events = audit(place / "audit.jsonl").events
    a, b = key(place, "a"), key(place, "b")
    assert [(event["event"], event["site"], event["name"], event["keys"]) for event in events] == [
        ("registered", 0, "Ward 3", [a]),
        ("added key", 0, "Ward 3", [b]),
        ("revoked key", 0, "Ward 3", [a]),
        ("revoked site", 0, "Ward 3", [b]),
    ]
    result = nufed("federate", "audit", place, cwd=place)
    assert result.returncode == 0 and "4 lines" in result.stdout


def test_changes_made_at_the_same_time_are_all_kept(place):
    for number in range(1, 9):
        make_site_key(place / f"{number}")
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda n: register_site(place, n, f"Ward {n + 3}", place / f"{n}.pub"), range(1, 9)
            )
        )
    assert set(sites(place)[0]) == set(range(9))
    assert len(audit(place / "audit.jsonl").events) == 9


def test_a_registry_that_others_may_write_is_refused(place):
    (place / "sites.toml").chmod(0o620)
    with pytest.raises(InputError, match="writable by other users: run chmod 644"):
        read_sites(place / "sites.toml")


@pytest.mark.parametrize(
    "text", ["[[site", "[[site]]\nnumber = 0\n", "sites = 1\n", 'site = "a"\n', "\xff"]
)
def test_an_invalid_registry_is_one_sentence(place, text):
    (place / "sites.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"sites.toml is invalid") as raised:
        read_sites(place / "sites.toml")
    assert "\n" not in str(raised.value)


def test_fingerprints_are_those_of_openssh(place):
    try:
        printed = subprocess.run(
            ["ssh-keygen", "-lf", place / "a.pub"], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        pytest.skip("ssh-keygen is not installed")
    assert key(place, "a") in printed.split()


def test_a_signature_is_bound_to_key_purpose_and_content(place):
    signature = sign(place / "a", "mask", b"content")
    public = {name: read_public(place / f"{name}.pub") for name in "ab"}
    assert verify(public["a"], "mask", b"content", signature)
    assert not verify(public["b"], "mask", b"content", signature)
    assert not verify(public["a"], "reply", b"content", signature)
    assert not verify(public["a"], "mask", b"other", signature)
    with pytest.raises(InputError, match="can't be read"):
        sign(place / "none", "mask", b"content")


class FakeSuperLink:
    """Records Flower's calls; ids count from 100."""

    def __init__(self, home, monkeypatch):
        self.home, self.keys, self.fails, self._ids = home, {}, False, count(100)
        monkeypatch.setattr(ControlApi, "register", lambda _, key: self.register(key))
        monkeypatch.setattr(ControlApi, "unregister", lambda _, node: self.keys.pop(node))

    def register(self, public):
        if self.fails:
            raise RunError("the server rejected the key")
        node = str(next(self._ids))
        line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        self.keys[node] = fingerprint(line)
        return node


def test_a_server_applies_every_change_of_the_registry(place, tmp_path_factory, monkeypatch):
    link, said = FakeSuperLink(tmp_path_factory.mktemp("home"), monkeypatch), []
    nowhere = Link("127.0.0.1:1", None)
    applied = Admission(nowhere, link.home, place / "sites.toml", said.append)
    applied.apply()
    assert link.keys == {"100": key(place, "a")}
    assert json.loads((link.home / "nodes.json").read_text()) == link.keys
    assert said == [f"registered site 0 ('Ward 3', key {key(place, 'a')})"]
    add_key(place, "0", place / "b.pub")
    applied.keep_applied()
    assert set(link.keys.values()) == {key(place, "a"), key(place, "b")}
    revoke_old_key(place, "0")
    applied.keep_applied()
    assert set(link.keys.values()) == {key(place, "b")}
    assert json.loads((link.home / "nodes.json").read_text()) == link.keys
    link.fails = True
    register_site(place, 1, "Ward 4", place / "c.pub")
    said.clear()
    for _ in range(3):
        applied.keep_applied()
    assert said == ["the registry of sites is not applied: the server rejected the key"]
    link.fails = False
    applied.keep_applied()
    assert set(link.keys.values()) == {key(place, "b"), key(place, "c")}
