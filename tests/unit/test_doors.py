"""What one file of the package uses of another's objects is public there, and imports lead in no circle."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "edl_torch"
MOST_FOREIGN = 5
THEIRS = {"_version", "_iterator", "_reader"}  # parts of torch's and pyodps' objects
PARSED = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> set[str]:
    """Return the private names that a file gives to its classes' and objects' parts, and to its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def foreign(path: Path, ours: set[str]) -> Iterator[str]:
    """Yield each use of a private part of an object whose class is in another file of the package."""
    own = defined(PARSED[path])
    for node in ast.walk(PARSED[path]):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if name in ours - own - THEIRS:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_parts_of_other_files_objects_that_are_used_are_public() -> None:
    ours = {name for tree in PARSED.values() for name in defined(tree)}
    found = [use for path in PARSED for use in foreign(path, ours)]
    assert len(found) <= MOST_FOREIGN, "\n".join(found)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_lead_in_no_circle() -> None:
    """Imports for types alone and those inside of functions, too."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PARSED}
    leads = {name: set(imported(PARSED[path])) & files.keys() - {name} for name, path in files.items()}

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            seen |= (new := leads[todo.pop()] - seen)
            todo += new
        return seen

    reaches = {name: reached(name) for name in leads}
    circles = {frozenset(n for n in reaches[name] if name in reaches[n]) for name in leads} - {frozenset()}
    assert not circles


# A class is called as no other one, so that who reads its name knows which it is ----------------------------


def classes(node: ast.AST, inside: str = "") -> Iterator[str]:
    """Yield the name of each class, one in another class with that one's before it."""
    for child in ast.iter_child_nodes(node):
        is_class = isinstance(child, ast.ClassDef)
        name = f"{inside}{child.name}" if isinstance(child, ast.ClassDef) else inside
        if is_class:
            yield name
        yield from classes(child, f"{name}." if is_class else inside)


def test_no_two_classes_have_one_name() -> None:
    named: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in PARSED.items():
        if not path.name.endswith("_pb2.py"):
            for name in classes(tree):
                named[name].append(str(path.relative_to(PACKAGE)))
    twice = {name: where for name, where in named.items() if len(where) > 1}
    assert twice == {}
