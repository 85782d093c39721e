"""The errors and warnings that nufed raises on purpose.

::

    NufedError                 everything below; the command line prints it as one sentence
    ├── InputError             a value, key, file or module that was given can't be used
    ├── UpdateError            one agent's update is left out: agent, round, reason and its kind
    ├── TrainingError          training has to stop
    └── RunError               a run directory can't be written or read
        └── ResumableError     until something is done; then the run can be resumed
    NumericalWarning           a result was computed, but is numerically unreliable
    ReportWarning              a report was written, but without some of its charts
    ObserverWarning            an observer of a run failed, and the run continued

Every message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import reprlib
from enum import StrEnum

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 20


class NufedError(Exception):
    """Base of every error that nufed raises on purpose."""


class InputError(NufedError, ValueError):
    """A value, key, file or module that was given can't be used.

    Args:
        message: what was given, what is allowed, and what to do.
        key: the argument or configuration key with which the message begins, if any.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.message, self.key = message, key

    def __str__(self) -> str:
        return f"{self.key} {self.message}" if self.key else self.message

    def within(self, table: str) -> InputError:
        """This error with the key's table in front: ``method.`` or ``methods.NAME.``."""
        return InputError(self.message, f"{table}.{self.key}")


class Fault(StrEnum):
    """The kinds of reasons for which an agent's update or scores are left out."""

    OFFLINE = "offline"
    LATE = "late"
    AT_SITE = "failed at the site"
    NOT_FINITE = "not finite"
    DIVERGED = "diverged"
    NORM = "norm"
    INVALID = "invalid"


class UpdateError(NufedError):
    """One agent's update or scores are left out; ``who`` names the agent in the message."""

    def __init__(
        self, agent: int, round: int, reason: str, fault: Fault = Fault.INVALID, who: str = ""
    ) -> None:
        self.who = who or f"agent {agent}"
        super().__init__(f"{self.who}, round {round}: {reason}")
        self.agent, self.round = agent, round
        self.reason, self.fault = reason, fault


class TrainingError(NufedError):
    """Training has to stop."""


class RunError(NufedError):
    """A run directory can't be written or read."""


class ResumableError(RunError):
    """A run directory can't be used until something is done; then the run can be resumed.

    Args:
        problem: what can't be done, and why.
        remedy: what to do before the run is resumed.
        then: what the resumed run does.
        command: resumes it.
    """

    def __init__(
        self, problem: str, remedy: str, then: str = "", command: str = "nufed run --resume"
    ) -> None:
        super().__init__(problem, remedy, then, command)
        self.problem, self.remedy, self.then, self.command = problem, remedy, then, command

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy} and continue with `{self.command}`{self.then}"

    def resumed_by(self, command: str) -> ResumableError:
        """This error for a run that another command resumes."""
        return ResumableError(self.problem, self.remedy, self.then, command)


class NumericalWarning(UserWarning):
    """A result was computed, but is numerically unreliable."""


class ReportWarning(UserWarning):
    """A report was written, but without some of its charts."""


class ObserverWarning(UserWarning):
    """An observer of a run failed, and the run continued."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise an :class:`InputError` about the argument or key ``name`` unless ``ok``.

    >>> require(False, "adapt_steps", -1, "must be a whole number, 0 or more")
    Traceback (most recent call last):
    nufed.errors.InputError: adapt_steps = -1: must be a whole number, 0 or more
    """
    if not ok:
        raise InputError(f"= {shown(value)}: {allowed}", name)


def require_whole(least: int = 1, /, **numbers: object) -> None:
    """Raise an :class:`InputError` for the first that is no whole number of at least ``least``.

    >>> require_whole(samples=5, tasks=0)
    Traceback (most recent call last):
    nufed.errors.InputError: tasks = 0: must be a whole number, at least 1
    """
    for name, value in numbers.items():
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(whole, name, value, f"must be a whole number, at least {least}")


def shown(value: object) -> str:
    """The ``repr`` of a value, truncated if it is long.

    >>> shown(["a", 10**9])
    "['a', 1000000000]"
    """
    try:
        return _short.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a very long {type(value).__name__}"


def visible(text: object, keep: str = "") -> str:
    r"""Text with all non-printable characters escaped as in Python's repr.

    So no name, message or file can send terminal escapes, forge a line or reverse the text
    direction. Characters of ``keep`` are not escaped.

    >>> print(visible("a\x1b[2J\nb\u202ec"))
    a\x1b[2J\nb\u202ec
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in str(text)
    )


def in_short(error: BaseException) -> str:
    """An error's class and the first line of its message.

    >>> in_short(ValueError("a\\nb"))
    'ValueError: a'
    """
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}".removesuffix(": ")
