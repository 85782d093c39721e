"""Whose connections the server's own APIs accept."""

import os
import socket

import pytest

from nufed.flower.ops.server_process import kernel_address, owner_of
from processes import can_become

NOBODY = 65534


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_owner_of_a_local_connection_is_known_while_it_is_open(host):
    with socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as server:
        client = socket.create_connection(server.getsockname()[:2])
        ends = client.getsockname()[:2], server.getsockname()[:2]
        assert owner_of(*ends) == os.geteuid()
        accepted, _ = server.accept()
        client.close()  # the kernel lists what remains of it as root's
        assert owner_of(*ends) is None
        accepted.close()
    assert owner_of(None, ends[1]) is None
    assert owner_of(("192.0.2.1", 4000), ends[1]) is None


@pytest.mark.skipif(not can_become(NOBODY), reason="only root can become another user")
def test_another_user_s_connection_is_theirs():
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = os.fork()
        if not pid:
            os.setuid(NOBODY)
            client = socket.create_connection(server.getsockname())
            client.recv(1)
            os._exit(0)
        accepted, address = server.accept()
        assert owner_of(address, server.getsockname()) == NOBODY
        accepted.close()
        os.waitpid(pid, 0)


def test_addresses_as_the_kernel_writes_them():
    assert kernel_address("127.0.0.1", 8000) == "0100007F:1F40"
    assert kernel_address("::1", 1) == "00000000000000000000000001000000:0001"
