"""Draws docs/packages.svg: the packages of nufed and their imports, from the import graph.

Run it from any directory: `python docs/draw_packages.py`. A package is drawn above all that it
imports. Arrows that others imply (a → c beside a → b → c) are omitted (transitive reduction).
"""

from itertools import pairwise
from pathlib import Path

import grimp

PICTURE = Path(__file__).with_name("packages.svg")
SOURCE = Path(__file__).parent.parent / "src" / "nufed"
WIDTH, FLOOR, BOX, HEIGHT, GAP = 360, 62, 78, 28, 6  # pixels: a phone's width, or more if needed
BEND = 10  # width of an arrow where it passes a layer
SWEEPS, PULL = 40, 4  # iterations of the layout; weight of neighbours relative to the centre
STYLE = """
  .ground { fill: #ffffff } .core { fill: #e8f1fa; stroke: #2f6ea5 } .arrow { stroke: #8a8f98 }
  .lab { fill: #edf7ec; stroke: #3c7d3a } .flower { fill: #fdf1e3; stroke: #a9681b }
  .tip { fill: #8a8f98 } text { fill: #14202b; font: 12px system-ui, sans-serif }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .core { fill: #16283a; stroke: #6cb0ea } .arrow { stroke: #9198a1 }
    .lab { fill: #16301a; stroke: #76c274 } .flower { fill: #35240f; stroke: #e2a75a }
    .tip { fill: #9198a1 } text { fill: #e6edf3 }
  }
"""


def imports():
    """The packages directly in nufed and nufed.lab, and which others each imports."""
    graph = grimp.build_graph("nufed", cache_dir=None)
    outside = {"nufed", "nufed.lab", "nufed.__main__"}
    packages = graph.find_children("nufed") | graph.find_children("nufed.lab")
    found = {package_of(package): set() for package in packages - outside}
    for module in graph.modules - outside:
        package, used = (
            package_of(module),
            graph.find_modules_directly_imported_by(module) - outside,
        )
        found[package] |= {package_of(name) for name in used} - {package}
    return {package: sorted(found[package]) for package in sorted(found)}


def package_of(module):
    """The package of a module, directly in nufed or in nufed.lab."""
    return module.removeprefix("nufed.").removeprefix("lab.").split(".")[0]


def layer_of(package):
    """Core, lab or flower."""
    in_lab = any((SOURCE / "lab").glob(f"{package}*"))
    return "flower" if package == "flower" else "lab" if in_lab else "core"


def below(package, used):
    """Everything that a package imports, directly or indirectly."""
    return set(used[package]).union(*(below(other, used) for other in used[package]))


def reduced(used):
    """The transitive reduction of the imports."""
    return {
        package: [o for o in own if not any(o in below(third, used) for third in own)]
        for package, own in used.items()
    }


def layers(used):
    """The layer of each package: one below the lowest package that imports it; 0 is the lowest."""

    def depth(package):
        return max((depth(other) + 1 for other in used if package in used[other]), default=0)

    deepest = max(map(depth, used))
    return {package: deepest - depth(package) for package in used}


def layout(used):
    """The positions of packages, and for each arrow the points that it passes.

    Arrows over several layers get a position on each; neighbours are moved towards the mean of
    their positions (barycentre heuristic for layered graphs).
    """
    level = layers(used)
    rows = [[] for _ in range(max(level.values()) + 1)]
    for package, layer in level.items():
        rows[layer].append(package)
    chains = []
    for package, own in used.items():
        for other in own:
            between = range(level[package] - 1, level[other], -1)
            chain = [package, *((package, other, layer) for layer in between), other]
            for bend in chain[1:-1]:
                rows[bend[2]].append(bend)
            chains.append(chain)
    near = {place: [] for row in rows for place in row}
    for a, b in (pair for chain in chains for pair in pairwise(chain)):
        near[a].append(b)
        near[b].append(a)
    width = max(WIDTH, *(sum(map(size, row)) + GAP * (len(row) + 1) for row in rows))
    at = dict.fromkeys(near, width / 2)
    for _ in range(SWEEPS):
        for row in (*rows, *rows[::-1]):
            wanted = {
                p: mean([width / 2, *(at[q] for q in near[p] for _ in range(PULL))]) for p in row
            }
            row.sort(key=wanted.get)
            arrange(row, at, wanted, width)
    return at, level, chains, width


def size(place):
    return BOX if isinstance(place, str) else BEND


def arrange(row, at, wanted, width):
    """Place the nodes of one layer side by side, as near to their wanted positions as possible.

    Least squares in the given order: nodes that would overlap are merged and moved by their mean.
    """
    starts = [GAP * (i + 1) + sum(map(size, row[:i])) + size(row[i]) / 2 for i in range(len(row))]
    free = width - sum(map(size, row)) - GAP * (len(row) + 1)
    blocks = []
    for place, start in zip(row, starts, strict=True):
        blocks.append([wanted[place] - start])
        while len(blocks) > 1 and mean(blocks[-2]) > mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    shifts = [min(max(mean(block), 0), free) for block in blocks for _ in block]
    at.update({p: start + shift for p, start, shift in zip(row, starts, shifts, strict=True)})


def mean(values):
    return sum(values) / len(values)


def draw(used):
    """The diagram as SVG."""
    at, level, chains, width = layout(reduced(used))
    top = max(level.values())

    def y(place):
        return 24 + FLOOR * (top - (level[place] if isinstance(place, str) else place[2]))

    height = 24 * 2 + FLOOR * top
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        "<title>The packages of nufed: arrows point to what a package imports</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>',
    ]
    for chain in chains:
        path = f"M{at[chain[0]]:.0f} {y(chain[0]) + HEIGHT / 2:.0f}"
        for a, b in pairwise(chain):
            start, end = y(a) + HEIGHT / 2, y(b) - HEIGHT / 2
            half = (start + end) / 2
            path += f"C{at[a]:.0f} {half:.0f} {at[b]:.0f} {half:.0f} {at[b]:.0f} {end:.0f}"
            path += "" if b == chain[-1] else f"v{HEIGHT}"
        lines.append(f'<path class="arrow" fill="none" marker-end="url(#tip)" d="{path}"/>')
    for package in used:
        x, middle = at[package], y(package)
        lines.append(
            f'<rect class="{layer_of(package)}" x="{x - BOX / 2:.0f}" '
            f'y="{middle - HEIGHT / 2:.0f}" '
            f'width="{BOX}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{x:.0f}" y="{middle + 4:.0f}" text-anchor="middle">{package}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(imports()), "utf-8")
