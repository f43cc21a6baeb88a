"""A class of the package is called as no other one, so that who reads its name knows which it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import edl_torch

PACKAGE = Path(edl_torch.__file__).parent


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
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            for name in classes(ast.parse(path.read_text("utf-8"))):
                named[name].append(str(path.relative_to(PACKAGE)))
    twice = {name: where for name, where in named.items() if len(where) > 1}
    assert twice == {}
