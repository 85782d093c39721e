"""The script of the process that draws: it alone loads V8, which needs 80 GB of address space.

It is run by its path, so that it imports neither torch nor the rest of nufed. Standard input is
one JSON object, ``{"javascript": bool, "specs": {name: Vega-Lite specification}}``. Standard output
is a line of JSON for each result, as soon as it is there: ``{"javascript": text}``, then
``{"name": name, "svg": text, "png": base64}`` for each chart.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import vl_convert


def main() -> None:
    """Draw what standard input asks for."""
    asked = json.load(sys.stdin.buffer)
    if asked["javascript"]:
        # its stub lacks the default
        _answer(javascript=vl_convert.javascript_bundle())  # type: ignore[call-arg]
    for name, spec in asked["specs"].items():
        svg = vl_convert.vegalite_to_svg(json.dumps(spec))
        png = vl_convert.svg_to_png(svg, scale=2)
        _answer(name=name, svg=svg, png=base64.b64encode(png).decode())


def _answer(**result: Any) -> None:
    sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
