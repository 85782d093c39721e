"""Registering sites' keys at a SuperLink, through its Control API.

In this process: a ``flwr supernode register`` per key would start a process of seconds for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from nufed.errors import RunError
from nufed.flower.ops.link import Link


@contextmanager
def control_api(link: Link) -> Iterator[ControlHttpClient]:
    """A client of the Control API, which answers to the server's own user only."""
    client = ControlHttpClient.from_server_address(
        server_address=link.address,
        insecure=link.ca is None,
        root_certificates=link.ca.read_bytes() if link.ca else None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="nufed")],
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        text = " ".join(error.response.text.split())[:300]
        raise RunError(f"the server answered {error.response.status_code}: {text}") from None
    except httpx.HTTPError as error:
        raise RunError(f"the server's Control API can't be reached: {error}") from None
    finally:
        client.close()


def register(client: ControlHttpClient, public: str) -> str:
    """Register a site's public key (OpenSSH); returns Flower's node id of the site."""
    key = load_ssh_public_key(public.encode())
    assert isinstance(key, ec.EllipticCurvePublicKey)  # as the registry has checked
    request = RegisterNodeRequest(public_key=public_key_to_bytes(key))
    return str(client.RegisterNode(request).node_id)


def unregister(client: ControlHttpClient, node: str) -> None:
    """Remove a site's key: the SuperLink no longer admits it."""
    client.UnregisterNode(UnregisterNodeRequest(node_id=int(node)))
