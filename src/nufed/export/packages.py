"""Optional packages, with one sentence where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nufed.errors import InputError


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Import the packages of an extra inside this context.

    >>> with needed("writing sounds", "sounds"):
    ...     import no_such_package
    Traceback (most recent call last):
    nufed.errors.InputError: writing sounds needs a package that is not installed (No module \
named 'no_such_package'): pip install "nufed[sounds]"
    """
    try:
        yield
    except ImportError as error:
        raise InputError(
            f'{what} needs a package that is not installed ({error}): pip install "nufed[{extra}]"'
        ) from error
