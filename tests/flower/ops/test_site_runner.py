"""A site that the server disconnects joins again; while it is refused, less and less often."""

import pytest

from nufed.errors import RunError
from nufed.flower.ops.site_runner import FIRST_DELAY, MAX_DELAY, stay_connected


class StopError(Exception):
    pass


def tries(codes):
    """What is said and the pauses, for the exit codes of successive tries."""
    left, said, slept = list(codes), [], []

    def connect():
        if not left:
            raise StopError
        return left.pop(0)

    with pytest.raises(StopError):
        stay_connected(connect, said.append, slept.append)
    return said, slept


def test_a_revoked_site_tries_with_exponential_backoff_up_to_a_limit():
    said, slept = tries([0] + [1] * 8)
    assert slept == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert (slept[0], slept[-1]) == (FIRST_DELAY, MAX_DELAY)
    (only,) = said  # not at every try
    assert "revoked the key" in only and "rejoining in 5 seconds" in only


def test_the_pause_is_short_again_after_a_connection():
    said, slept = tries([0, 1, 1, 0, 1])
    assert slept == [5, 10, 20, 5, 10]
    assert len(said) == 2


def test_a_site_that_was_never_connected_ends():
    with pytest.raises(RunError, match=r"exited \(exit code 1\); see its output"):
        stay_connected(lambda: 1, print, pytest.fail)
