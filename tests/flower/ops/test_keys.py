"""Certificates and keys: validity, file modes, and never overwritten."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from nufed.errors import InputError
from nufed.flower.ops.keys import check_certificate, make_authority, make_site_key


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def verify(ca, server, host):
    """As a client that trusts only this CA."""
    subject = x509.DNSName(host)
    store = Store([certificate(ca)])
    PolicyBuilder().store(store).build_server_verifier(subject).verify(certificate(server), [])


def test_a_certificate_is_valid_for_the_given_hosts_and_for_loopback(tmp_path):
    make_authority(tmp_path, ["fed.example.org", "10.0.0.5"])
    names = certificate(tmp_path / "server.crt").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert set(names.value.get_values_for_type(x509.DNSName)) == {"fed.example.org", "localhost"}
    addresses = map(str, names.value.get_values_for_type(x509.IPAddress))
    assert set(addresses) == {"10.0.0.5", "127.0.0.1", "::1"}
    for host in ("fed.example.org", "10.0.0.5", "127.0.0.1"):
        check_certificate(tmp_path, host)
    with pytest.raises(InputError, match=r"is not valid for 10\.0\.0\.6"):
        check_certificate(tmp_path, "10.0.0.6")


def test_only_its_own_ca_authenticates_a_server(tmp_path):
    for name in ("one", "two"):
        make_authority(tmp_path / name, ["fed.example.org"])
    server = tmp_path / "one" / "server.crt"
    verify(tmp_path / "one" / "ca.crt", server, "fed.example.org")
    with pytest.raises(VerificationError):
        verify(tmp_path / "one" / "ca.crt", server, "other.example.org")
    with pytest.raises(VerificationError):
        verify(tmp_path / "two" / "ca.crt", server, "fed.example.org")


def test_certificates_are_valid_for_the_given_days(tmp_path):
    make_authority(tmp_path / "new", days=30)
    for name in ("ca.crt", "server.crt"):
        left = certificate(tmp_path / "new" / name).not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=29.9) < left < timedelta(days=30)
    make_authority(tmp_path / "old", days=1 / 1440)
    with pytest.raises(InputError, match="not today"):
        check_certificate(tmp_path / "old", "127.0.0.1")


def test_private_files_are_readable_by_their_owner_only(tmp_path):
    make_authority(tmp_path)
    make_site_key(tmp_path / "site")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    secret = {"ca.key", "server.key", "site"}
    assert {name for name, mode in modes.items() if mode == 0o600} == secret
    assert modes.keys() - secret == {"ca.crt", "server.crt", "site.pub"}


def test_a_sites_private_and_public_key_match(tmp_path):
    public = make_site_key(tmp_path / "keys" / "site")
    private = load_ssh_private_key((tmp_path / "keys" / "site").read_bytes(), None)
    read = load_ssh_public_key(public.read_bytes())
    assert public == tmp_path / "keys" / "site.pub"
    assert isinstance(read.curve, ec.SECP384R1)
    assert read.public_numbers() == private.public_key().public_numbers()


@pytest.mark.parametrize("there", ["ca.crt", "ca.key", "server.crt", "server.key"])
def test_no_file_of_an_authority_is_overwritten(tmp_path, there):
    (tmp_path / there).write_text("precious")
    with pytest.raises(InputError, match=f"{there} exists and is never"):
        make_authority(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


@pytest.mark.parametrize("there", ["site", "site.pub"])
def test_no_key_is_overwritten(tmp_path, there):
    (tmp_path / there).write_text("precious")
    with pytest.raises(InputError, match="exists and is never"):
        make_site_key(tmp_path / "site")
    assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize("host", ["", "a b", "https://fed.example.org", "fed.example.org:80", "ü"])
def test_an_invalid_host_is_refused(tmp_path, host):
    with pytest.raises(InputError, match="must be a bare host name or IP address"):
        make_authority(tmp_path, [host])
    assert not list(tmp_path.iterdir())
