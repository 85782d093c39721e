"""Text of other people, made safe to show."""

from __future__ import annotations


def visible(text: object, keep: str = "") -> str:
    r"""Text in which everything that does not print is written out, as Python's repr does it.

    So no name, message or file can steer a terminal, forge a line or turn the direction of
    writing. Characters of ``keep`` stay as they are.

    >>> print(visible("a\x1b[2J\nb\u202ec"))
    a\x1b[2J\nb\u202ec
    """
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in str(text)
    )
