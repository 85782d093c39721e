"""Private keys that others can read are refused; certificates that expire soon are named."""

import socket
import ssl
from contextlib import contextmanager, suppress
from threading import Thread

import pytest

from nufed.errors import InputError
from nufed.flower.ops.keys import (
    check_private,
    check_server_keys,
    link_expiry,
    make_authority,
    make_site_key,
    server_expiry,
)
from nufed.flower.ops.link import Link
from processes import PATIENCE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_a_private_key_that_others_can_access_is_refused(tmp_path, mode):
    make_site_key(tmp_path / "key")
    check_private(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(InputError, match=rf"mode {mode:04o}\): run chmod 600 .*key, and") as raised:
        check_private(tmp_path / "key")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["server.key", "ca.key"])
def test_all_private_keys_of_a_server_are_checked(tmp_path, name):
    make_authority(tmp_path)
    check_server_keys(tmp_path)
    (tmp_path / name).chmod(0o640)
    with pytest.raises(InputError, match=f"{name} is accessible to other users"):
        check_server_keys(tmp_path)
    (tmp_path / "ca.key").unlink()
    (tmp_path / "server.key").chmod(0o600)
    check_server_keys(tmp_path)


def test_certificates_are_named_thirty_days_before_they_expire(tmp_path):
    for days in (31, 29, 1 / 1440):
        make_authority(tmp_path / f"{days}", days=days)
    assert server_expiry(tmp_path / "31") == []
    soon = server_expiry(tmp_path / "29")
    assert [text.split()[1].rpartition("/")[2] for text in soon] == ["server.crt", "ca.crt"]
    assert all(", in 28 days: make new ones with `nufed federate keys" in text for text in soon)
    assert all(" expired on " in text for text in server_expiry(tmp_path / str(1 / 1440)))


@contextmanager
def tls_server(folder):
    """A server that presents the folder's certificate to one client; yields its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with suppress(OSError):
                context.wrap_socket(listening.accept()[0], server_side=True).close()

        thread = Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(PATIENCE)


def test_a_run_and_a_site_name_the_certificate_that_the_server_presents(tmp_path):
    make_authority(tmp_path, days=29)
    with tls_server(tmp_path) as address:
        about = [text.partition(" expires")[0] for text in link_expiry(Link(address, ca(tmp_path)))]
    assert about == [
        f"warning: {tmp_path / 'ca.crt'}",
        f"warning: the certificate of {address}",
    ]


def test_a_server_that_is_unreachable_is_no_error_here(tmp_path):
    make_authority(tmp_path, days=31)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    assert link_expiry(Link(address, ca(tmp_path))) == []
    assert link_expiry(Link(address, None)) == []


def ca(folder):
    return folder / "ca.crt"
