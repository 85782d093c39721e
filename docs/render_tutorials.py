"""Writes docs/tutorials/ from the scripts in examples/tutorials/, with what they print.

A script's docstring is its title and introduction; `# %%` begins a cell, whose first comment is
text.
`python docs/render_tutorials.py` runs all of them in a new directory, `… compare` that one.
"""

import io
import os
import re
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

DOCS = Path(__file__).parent
SCRIPTS = DOCS.parent / "examples" / "tutorials"
PAGES = DOCS / "tutorials"


def scripts() -> dict[str, Path]:
    """The tutorials by name."""
    return {path.stem: path for path in sorted(SCRIPTS.glob("*.py"))}


def rendered(script: Path) -> str:
    """The page of a script, which is run in the working directory."""
    head, *cells = re.split(r"^# %%\n", script.read_text("utf-8"), flags=re.MULTILINE)
    title, _, about = head.strip().strip('"').strip().partition("\n")
    parts = [
        f"# {title}",
        about.strip(),
        f"The script is [{script.name}](../../examples/tutorials/{script.name}); run it anywhere, "
        "or cell by cell in an editor that knows `# %%`.",
    ]
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        text, code = parted(cell)
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            exec(compile(code, f"{script.name}, cell {number}", "exec"), names)
        parts += [text, f"```python\n{code}\n```"]
        if printed.getvalue():
            parts += [f"```text\n{printed.getvalue().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def parted(cell: str) -> tuple[str, str]:
    """The comment at the start of a cell, and the rest."""
    lines = cell.splitlines()
    size = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line[2:] for line in lines[:size]), "\n".join(lines[size:]).strip()


if __name__ == "__main__":
    for name in sys.argv[1:] or scripts():
        os.chdir(tempfile.mkdtemp())
        (PAGES / f"{name}.md").write_text(rendered(scripts()[name]), "utf-8")
        print(PAGES / f"{name}.md")
