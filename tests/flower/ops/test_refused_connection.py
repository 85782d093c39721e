"""Why a server refuses a site is logged once per reason, over the processes of all tries."""

import pytest

from nufed.flower.ops.site_runner import FLOWER, NOT_ADMITTED, RefusedConnection

REVOKED = """Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 7] Failed to activate SuperNode
The SuperNode could not establish a connection to the SuperLink.

For more information, visit: <https://example.org>"""


@pytest.fixture
def attempt(tmp_path, caplog):
    """Tries to connect; returns the lines that were logged."""

    def attempt(*errors, connects=False, ends=SystemExit):
        caplog.clear()
        try:
            with RefusedConnection(tmp_path / "refused").logged_once() as refused:
                if connects:
                    refused.clear()
                for error in errors:
                    FLOWER.error(error)
                raise ends(1)
        except SystemExit as ended:
            assert ended.code == 1
        return [record.getMessage() for record in caplog.records]

    caplog.set_level("INFO")
    return attempt


def test_a_reason_is_one_line_and_logged_again_only_if_it_changes(attempt):
    refused = "the server refuses this site: [code: 7] Failed to activate SuperNode"
    assert attempt(REVOKED) == [refused]
    assert attempt(REVOKED) == attempt(REVOKED) == []
    other = "the server refuses this site: SSL/TLS handshake error detected.; certificate expired"
    both = ("SSL/TLS handshake error detected.", "Exit Code: 305\ncertificate expired")
    assert attempt(*both) == [other]
    assert attempt(*both) == []
    assert attempt(REVOKED) == [refused]


def test_a_key_that_is_not_admitted_is_such_a_reason(attempt):
    assert attempt(ends=KeyboardInterrupt) == [f"the server refuses this site: {NOT_ADMITTED}"]
    assert attempt(ends=KeyboardInterrupt) == []


def test_after_a_connection_errors_are_logged_as_they_occur_and_reasons_are_new(attempt):
    assert attempt(REVOKED)
    assert attempt("Heartbeat lost", connects=True, ends=KeyboardInterrupt) == ["Heartbeat lost"]
    assert len(attempt(REVOKED)) == 1
