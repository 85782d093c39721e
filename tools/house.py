"""Measures of the house: files, lines of code, members, functions, messages, names, call stacks.

    python tools/house.py            # prints a table
    python tools/house.py --list     # and what exceeds a limit

A line of code is neither blank nor a comment nor part of a docstring. docs/architecture.md has the
figures.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src" / "nufed"
FLOORS = ("lab", "flower")
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MOST_PARAMETERS, MOST_LINES = 8, 60
VAGUE = ("own", "found")  # names that say nothing of the thing
PARSERS = ("partition", "replace", "startswith", "endswith", "removeprefix")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module(NamedTuple):
    """A file, with its syntax tree and the number of its lines of code."""

    name: str
    floor: str
    tree: ast.Module
    lines: int


@cache
def modules() -> list[Module]:
    """All files of the package."""
    files = []
    for path in sorted(SOURCE.rglob("*.py")):
        text, name = path.read_text("utf-8"), path.relative_to(SOURCE)
        tree = ast.parse(text)
        floor = name.parts[0] if name.parts[0] in FLOORS else "core"
        files.append(Module(name.as_posix(), floor, tree, code_lines(text, tree)))
    return files


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


def public(files: list[Module]) -> set[ast.stmt]:
    """The functions and methods that users call: those of the names that the package exports."""
    (package,) = [module for module in files if module.name == "__init__.py"]
    names: set[str] = set()
    for node in package.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=listed):
                names = set(ast.literal_eval(listed))
    exported = [n for m in files for n in m.tree.body if getattr(n, "name", None) in names]
    classes = [node for node in exported if isinstance(node, ast.ClassDef)]
    methods = [each for node in classes for each in node.body if isinstance(each, DEFINITIONS)]
    return {*exported, *(each for each in methods if not each.name.startswith("_"))}


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of lines after the docstring."""
    body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are options of the command line."""
    given = (*node.args.args, *node.args.kwonlyargs)
    return any(each.annotation and "typer" in ast.unparse(each.annotation) for each in given)


def vague_names(module: Module) -> Iterator[str]:
    """Variables and parameters whose name does not name the thing; records' fields keep theirs."""
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    fields = [each.target for c in classes for each in c.body if isinstance(each, ast.AnnAssign)]
    for node in ast.walk(module.tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if (
                name in VAGUE and node not in fields
            ):
                yield f"{module.name}:{node.lineno} {name}"


def parsed_messages(module: Module) -> Iterator[str]:
    """Where the text of an error or of its reason is compared or taken apart."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]) if is_message(text):
                yield f"{module.name}:{node.lineno}"
            case ast.Call(func=ast.Attribute(attr=name, value=text)) if (
                name in PARSERS and is_message(text)
            ):
                yield f"{module.name}:{node.lineno}"


def is_message(node: ast.expr) -> bool:
    """Whether it is ``str(error)`` or the reason of something."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id="error" | "e" | "exception")]):
            return True
        case ast.Attribute(attr="reason" | "message") | ast.Name(id="reason" | "message"):
            return True
    return False


def walks() -> Iterator[tuple[str, int]]:
    """The call stacks in docs/architecture.md, which tests trace, with their lengths."""
    for section in PAGE.read_text("utf-8").split("\n### ")[1:]:
        heading, _, text = section.partition("\n")
        text = text.split("\n## ")[0]
        yield heading, len(re.findall(r"^\| \d+ \|", text, re.MULTILINE))


def members(files: list[Module], name: str) -> int:
    """The public members of a class, with those that it inherits inside nufed."""
    classes = {
        node.name: node
        for module in files
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
                case ast.FunctionDef(name=member) | ast.AnnAssign(target=ast.Name(id=member)):
                    names.add(member)
                case ast.Assign(targets=targets):
                    names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return len([each for each in names if not each.startswith("_")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list what exceeds a limit")
    options = parser.parse_args()
    files = modules()
    for floor in ("core", *FLOORS):
        here = [module for module in files if module.floor == floor]
        lines = sum(module.lines for module in here)
        print(f"{floor:10} {len(here):4} files {lines:7,} lines of code")
    print(f"{'all':10} {len(files):4} files {sum(m.lines for m in files):7,} lines of code")
    for name in ("Objective", "Algorithm"):
        print(f"{name:10} {members(files, name):4} public members")
    every = [pair for module in files for pair in functions(module)]
    called = public(files)
    limits = {
        f"functions with more than {MOST_PARAMETERS} parameters, public ones and commands aside": [
            name
            for name, node in every
            if parameters(node) > MOST_PARAMETERS and not is_command(node) and node not in called
        ],
        f"functions with bodies of more than {MOST_LINES} lines": [
            name for name, node in every if body_lines(node) > MOST_LINES
        ],
        "messages that are taken apart": [each for m in files for each in parsed_messages(m)],
        f"variables called {' or '.join(VAGUE)}": [each for m in files for each in vague_names(m)],
    }
    for what, places in limits.items():
        print(f"{len(places):4} {what}")
    for heading, calls in walks():
        print(f"{calls:4} calls: {heading}")
    if options.list:
        for what, places in limits.items():
            print("\n".join(["", f"{what}:", *places]))


if __name__ == "__main__":
    main()
