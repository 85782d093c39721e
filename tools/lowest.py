"""Prints the lower end of every range in pyproject.toml, as constraints for pip.

torch stays at the version of constraints.txt: an older one would come as another build.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lowest(pinned: str = "torch") -> list[str]:
    """``name==version`` of every dependency of the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ranges = [re.fullmatch(r"([\w-]+)>=([\d.]+)", line) for line in project["dependencies"]]
    lines = [f"{found[1]}=={found[2]}" for found in ranges if found and found[1] != pinned]
    tested = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [*lines, *(line for line in tested if line.startswith(f"{pinned}=="))]


if __name__ == "__main__":
    print("\n".join(lowest()))
