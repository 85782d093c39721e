"""A SuperLink with TLS and keys admits only sites with valid credentials.

Every refusal is Flower's own: the checks of `nufed federate` are bypassed.
"""

from types import SimpleNamespace

import pytest

from nufed.errors import RunError
from nufed.flower.app.signatures import load_public
from nufed.flower.ops.flower_processes import flower, free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.link import NAME, Link, control_of, flwr_json
from nufed.flower.ops.site_runner import SiteOptions, site_command
from nufed.flower.ops.superlink import is_listening, start_superlink, superlink_command
from processes import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
TIMEOUT = PATIENCE


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A SuperLink, one whose certificate lacks its address, and one with an expired certificate."""
    place = tmp_path_factory.mktemp("federation")
    for name, days in (("keys", 1), ("other", 1), ("old", 1 / 1440)):
        make_authority(place / name, days=days)
    for name in ("right", "taken", "unknown"):
        make_site_key(place / name)
    with flower() as commands:
        port, elsewhere, expired = free_ports(3)
        _, link = start_superlink(commands, "127.0.0.1", port, place / "keys", place / "link.log")
        for host, at, keys in (("127.0.0.2", elsewhere, "keys"), ("127.0.0.1", expired, "old")):
            commands.start(*superlink_command(host, at, place / keys), log=place / f"{at}.log")
            assert wait(lambda host=host, at=at: is_listening(host, at), TIMEOUT)
        link.connect(commands)

        def admit(file):
            with control_of(link) as control:
                return control.register(load_public((place / file).read_text()))

        for name in ("right", "taken"):
            admit(f"{name}.pub")
        links = {
            "right": link,
            "wrong authority": Link(link.address, place / "other" / "ca.crt"),
            "wrong address": Link(f"127.0.0.2:{elsewhere}", place / "keys" / "ca.crt"),
            "expired": Link(f"127.0.0.1:{expired}", place / "old" / "ca.crt"),
            "plain": Link(link.address, None),
        }

        def start(link, key):
            log = place / f"site-{len(list(place.glob('site-*.log')))}.log"
            (commands.home / "refused").unlink(missing_ok=True)  # or the same reason is not logged
            site = SiteOptions(0, key and place / key)
            process = commands.start(*site_command(site, links[link]), log=log)
            return SimpleNamespace(process=process, log=log)

        def online():
            """Number of sites that the SuperLink reports as online."""
            nodes = flwr_json(commands, "supernode", "list", NAME)["nodes"]
            return sum(node["status"] == "online" for node in nodes)

        right = start("right", "taken")
        assert wait(lambda: "connected to" in right.log.read_text(), TIMEOUT), right.log.read_text()
        yield SimpleNamespace(
            start=start,
            online=online,
            log=place / "link.log",
            right=right,
            register=admit,
        )


@pytest.mark.parametrize(
    ("link", "key", "words"),
    [
        ("wrong authority", "right", "unable to get local issuer certificate"),
        ("wrong address", "right", "certificate is not valid for '127.0.0.2'"),
        ("expired", "right", "certificate has expired"),
        ("right", None, "All SuperNodes must be registered"),
        ("right", "unknown", "Failed to activate SuperNode"),
        ("right", "taken", "Failed to activate SuperNode"),
    ],
    ids=["wrong authority", "wrong address", "expired", "no key", "unknown key", "key in use"],
)
def test_a_site_with_invalid_credentials_is_refused_and_exits(federation, link, key, words):
    site = federation.start(link, key)
    assert site.process.wait(TIMEOUT) == 1
    assert words in site.log.read_text()
    assert "connected to" not in site.log.read_text()
    assert federation.online() == 1 and federation.right.process.poll() is None


def test_a_site_without_encryption_can_not_connect(federation):
    site = federation.start("plain", None)
    tries = "Connection attempt failed"  # it retries for ever
    assert wait(lambda: site.log.read_text().count(tries) >= 3, TIMEOUT), site.log.read_text()
    site.process.kill()
    assert "connected to" not in site.log.read_text()
    assert federation.online() == 1 and federation.right.process.poll() is None


def test_a_key_is_registered_once(federation):
    with pytest.raises(RunError, match="Public key already in use"):
        federation.register("right.pub")


def test_the_server_says_why_it_refused_a_key(federation):
    before = len(federation.log.read_text())
    federation.start("right", "unknown").process.wait(TIMEOUT)
    assert "No SuperNode found with the given public key" in federation.log.read_text()[before:]


def test_a_second_valid_site_is_admitted(federation):
    site = federation.start("right", "right")
    assert wait(lambda: "connected to" in site.log.read_text(), TIMEOUT), site.log.read_text()
    assert federation.online() == 2
    site.process.terminate()
    assert site.process.wait(TIMEOUT) == 0
    assert wait(lambda: federation.online() == 1, TIMEOUT)
