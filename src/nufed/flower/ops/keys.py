"""TLS certificates of the server and key pairs of the sites.

::

    ca.crt       given to every site: authenticates the server
    ca.key       signs certificates; the server does not need it, keep it elsewhere
    server.crt   the server's certificate, with its names and addresses
    server.key   its private key

Private keys that others can read are refused at start, and expiring certificates are named.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nufed.errors import InputError
from nufed.flower.ops.link import Link
from nufed.lab.files import make_private

AHEAD = timedelta(days=30)
CONNECT_TIMEOUT = 10  # seconds


def check_private(path: Path) -> None:
    """Refuse a private key that other users of this machine may read or write."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InputError(
            f"the private key {path} is accessible to other users (mode {mode:04o}): run chmod 600 "
            f"{path}, and make a new key if others may have read it"
        )


def check_server_keys(folder: Path) -> None:
    """Check every private key in the server's folder."""
    for name in (KEY, CA_KEY):  # the CA's key should be elsewhere
        if (folder / name).exists():
            check_private(folder / name)


def server_expiry(folder: Path) -> list[str]:
    """Warnings about certificates in the server's folder that expire within 30 days."""
    files = {str(folder / name): (folder / name).read_bytes() for name in (CERTIFICATE, CA)}
    return list(_warnings(files))


def link_expiry(link: Link) -> list[str]:
    """The same for a server's certificate as it presents it, and the CA that authenticates it.

    If it can't be reached, connecting says so later.
    """
    if link.ca is None:
        return []
    files = {str(link.ca): link.ca.read_bytes()}
    host, _, port = link.address.rpartition(":")
    with suppress(OSError, ValueError):
        address = (host.strip("[]"), int(port))
        text = ssl.get_server_certificate(address, ca_certs=str(link.ca), timeout=CONNECT_TIMEOUT)
        files[f"the certificate of {link.address}"] = text.encode()
    return list(_warnings(files))


def _warnings(certificates: dict[str, bytes]) -> Iterator[str]:
    for name, content in certificates.items():
        try:
            end = x509.load_pem_x509_certificate(content).not_valid_after_utc
        except ValueError as error:
            raise InputError(f"{name} is not a usable certificate: {error}") from error
        left = end - datetime.now(UTC)
        if left < AHEAD:
            yield (
                f"warning: {name} {_when(left, end)}: make new ones with `nufed federate keys "
                "FOLDER --host HOST` and give the new ca.crt to every site"
            )


def _when(left: timedelta, end: datetime) -> str:
    if left < timedelta(0):
        return f"expired on {end:%Y-%m-%d}"
    return f"expires on {end:%Y-%m-%d}, in {left.days} days"


CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "server.crt", "server.key"
# for the server's own processes
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make_authority(folder: Path, hosts: Sequence[str] = (), days: float = 365) -> None:
    """Write a certificate authority and a server's certificate for ``hosts`` (names, addresses).

    Loopback is always included. Existing files are never overwritten.
    """
    for name in (CA, CA_KEY, CERTIFICATE, KEY):
        _refuse_existing(folder / name)
    start = datetime.now(UTC) - timedelta(minutes=5)  # tolerates clock skew
    end = start + timedelta(days=days)
    names = [_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])]

    ca_key, key = _new_key(), _new_key()
    issuer = _subject("nufed federation")
    by_ca = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _certificate(issuer, issuer, ca_key, start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(by_ca, critical=False)
    )
    server = (
        _certificate(_subject("nufed server"), issuer, key, start, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(by_ca), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    pem = serialization.Encoding.PEM
    _write(folder / CA_KEY, _private(ca_key, serialization.PrivateFormat.PKCS8), secret=True)
    _write(folder / KEY, _private(key, serialization.PrivateFormat.PKCS8), secret=True)
    _write(folder / CA, ca.sign(ca_key, hashes.SHA384()).public_bytes(pem))
    _write(folder / CERTIFICATE, server.sign(ca_key, hashes.SHA384()).public_bytes(pem))


def make_site_key(path: Path) -> Path:
    """Write a site's key pair: private to ``path``, public to ``path.pub``, which is returned.

    Only the public key leaves the site.
    """
    public = path.with_name(f"{path.name}.pub")
    for file in (path, public):
        _refuse_existing(file)
    key = _new_key()
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(path, _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
    _write(public, line + b"\n")
    return public


def check_certificate(folder: Path, host: str) -> None:
    """Refuse a folder without a server certificate that is valid now and for ``host``."""
    for name in (CA, CERTIFICATE, KEY):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} has no {name}: make certificates with `nufed federate keys {folder}`"
            )
    path = folder / CERTIFICATE
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise InputError(f"{path} is not a usable certificate: {error}") from error
    again = f"make another with `nufed federate keys FOLDER --host {host}`"
    if _name(host) not in names:
        raise InputError(f"{path} is not valid for {host}: {again}")
    if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
        raise InputError(
            f"{path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}, not today: {again}"
        )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        if not host or set(host) & set(" /:"):
            raise ValueError
        return x509.DNSName(host)
    except ValueError:
        raise InputError(
            f"--host {host}: must be a bare host name or IP address, as fed.example.org or 10.0.0.5"
        ) from None


def _new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: PrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=start,
        not_valid_after=end,
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: PrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists and is never overwritten: give another path")


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    try:
        make_private(path.parent)
        mode = 0o600 if secret else 0o644
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123
            file.write(content)
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror}") from error
