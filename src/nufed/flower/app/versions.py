"""Which versions of nufed work together in a federation.

Releases of one minor series (0.1.0, 0.1.3) exchange the same messages, and read each other's run
directories and sites' folders. Other versions (development versions, release candidates) work only
with themselves.
"""

from __future__ import annotations

import re
from importlib.metadata import version

VERSION = version("nufed")
NUMBERS = re.compile(r"(\d+)\.(\d+)\.\d+")


def works_with(one: str, other: str) -> bool:
    """Whether a server and a site with these versions work together.

    >>> works_with("0.1.0", "0.1.3"), works_with("0.1.3", "0.2.0"), works_with("0.1.0", "0.1.0rc1")
    (True, False, False)
    """
    series = [found.groups() for found in map(NUMBERS.fullmatch, (one, other)) if found]
    return one == other or (len(series) == 2 and series[0] == series[1])
