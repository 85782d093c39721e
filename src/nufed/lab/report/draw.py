"""Script of the drawing process, the only one that loads V8 (80 GB of address space).

It is run by path, so that it imports neither torch nor the rest of nufed. Standard input is one
JSON object, ``{"javascript": bool, "specs": {name: Vega-Lite specification}}``. Each result is
written to standard output as a line of JSON when ready: ``{"javascript": text}``, then
``{"name": name, "svg": text, "png": base64}`` for each chart.
"""

from __future__ import annotations

import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import vl_convert


def main() -> None:
    """Draw the charts requested on standard input."""
    request = json.load(sys.stdin.buffer)
    if request["javascript"]:
        # the type stub lacks the default
        _write(javascript=vl_convert.javascript_bundle())  # type: ignore[call-arg]
    with ThreadPoolExecutor(1) as pool:  # a chart's PNG beside the SVG of the next
        written = [
            pool.submit(_write_chart, name, vl_convert.vegalite_to_svg(json.dumps(spec)))
            for name, spec in request["specs"].items()
        ]
    for each in written:
        each.result()


def _write_chart(name: str, svg: str) -> None:
    png = vl_convert.svg_to_png(svg, scale=2)
    _write(name=name, svg=svg, png=base64.b64encode(png).decode())


def _write(**result: Any) -> None:
    sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
