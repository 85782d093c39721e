"""The errors and warnings that nufed raises on purpose.

::

    NufedError                 everything below; the command line prints it as one sentence
    ├── InputError             a value, key, file or module that was given can't be used
    ├── UpdateError            one agent's update must not be averaged in; it names agent and round
    ├── TrainingError          training can't go on
    └── RunError               a run directory can't be written or read
    NumericalWarning           a result was computed, but the numbers behind it are poor
    ReportWarning              a report was written, but without some of its charts

Every message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import reprlib

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 20


class NufedError(Exception):
    """Base of every error that nufed raises on purpose."""


class InputError(NufedError, ValueError):
    """A value, key, file or module that was given can't be used."""


class UpdateError(NufedError):
    """One agent's update must not be averaged in."""

    def __init__(self, agent: int, round: int, reason: str) -> None:
        super().__init__(f"agent {agent}, round {round}: {reason}")
        self.agent = agent
        self.round = round
        self.reason = reason


class TrainingError(NufedError):
    """Training can't go on."""


class RunError(NufedError):
    """A run directory can't be written or read."""


class NumericalWarning(UserWarning):
    """A result was computed, but the numbers behind it are poor."""


class ReportWarning(UserWarning):
    """A report was written, but without some of its charts."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise an :class:`InputError` about the argument or key ``name`` unless ``ok``.

    >>> require(False, "adapt_steps", -1, "must be a whole number, 0 or more")
    Traceback (most recent call last):
    nufed.errors.InputError: adapt_steps = -1: must be a whole number, 0 or more
    """
    if not ok:
        raise InputError(f"{name} = {shown(value)}: {allowed}")


def shown(value: object) -> str:
    """A value as it would be written in Python, in one line that is not too long.

    >>> shown(["a", 10**9])
    "['a', 1000000000]"
    """
    try:
        return _short.repr(value)
    except ValueError:  # Python does not write down whole numbers of more than 4300 digits
        return f"a very long {type(value).__name__}"
