"""Measures of the house: files, lines of code, members, parameters and lengths of functions.

    python tools/house.py            # prints a table
    python tools/house.py --list     # and what exceeds a limit

A line of code is neither blank nor a comment nor part of a docstring. docs/architecture.md has the
figures.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src" / "nufed"
FLOORS = ("lab", "flower")
MOST_PARAMETERS, MOST_LINES = 8, 60
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module(NamedTuple):
    """A file, with its syntax tree and the number of its lines of code."""

    name: str
    floor: str
    tree: ast.Module
    lines: int


def modules() -> list[Module]:
    """All files of the package."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text, name = path.read_text("utf-8"), path.relative_to(SOURCE)
        tree = ast.parse(text)
        floor = name.parts[0] if name.parts[0] in FLOORS else "core"
        found.append(Module(name.as_posix(), floor, tree, code_lines(text, tree)))
    return found


def code_lines(text: str, tree: ast.Module) -> int:
    """The number of lines that are neither blank, nor comments, nor docstrings."""
    strings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, *DEFINITIONS)) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(
                getattr(first, "value", None), ast.Constant
            ):
                strings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in strings
        for number, line in numbered
    )


def functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a module with its name."""
    for node in ast.walk(module.tree):
        if isinstance(node, DEFINITIONS):
            yield f"{module.name}:{node.lineno} {node.name}", node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters, without self and cls."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are options of the command line."""
    given = (*node.args.args, *node.args.kwonlyargs)
    return any(each.annotation and "typer" in ast.unparse(each.annotation) for each in given)


def members(found: list[Module], name: str) -> int:
    """The public members of a class, with those that it inherits inside nufed."""
    classes = {
        node.name: node
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    names: set[str] = set()
    left = [name]
    while left:
        node = classes.get(left.pop())
        if node is None:
            continue
        left += [ast.unparse(base) for base in node.bases]
        for each in node.body:
            match each:
                case ast.FunctionDef(name=own) | ast.AnnAssign(target=ast.Name(id=own)):
                    names.add(own)
                case ast.Assign(targets=targets):
                    names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return len([each for each in names if not each.startswith("_")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list what exceeds a limit")
    options = parser.parse_args()
    found = modules()
    for floor in ("core", *FLOORS):
        own = [module for module in found if module.floor == floor]
        print(f"{floor:10} {len(own):4} files {sum(m.lines for m in own):7,} lines of code")
    print(f"{'all':10} {len(found):4} files {sum(m.lines for m in found):7,} lines of code")
    for name in ("Objective", "Algorithm"):
        print(f"{name:10} {members(found, name):4} public members")
    every = [pair for module in found for pair in functions(module)]
    wide = [
        name for name, node in every if parameters(node) > MOST_PARAMETERS and not is_command(node)
    ]
    long = [
        name for name, node in every if (node.end_lineno or 0) - node.body[0].lineno >= MOST_LINES
    ]
    print(f"{len(wide):4} functions with more than {MOST_PARAMETERS} parameters, commands aside")
    print(f"{len(long):4} functions with bodies of more than {MOST_LINES} lines")
    if options.list:
        print("\n".join(["", "parameters:", *wide, "", "lines:", *long]))


if __name__ == "__main__":
    main()
