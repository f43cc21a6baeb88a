"""Escaping of names that callers chose, for logs and terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with everything that is not printable escaped, such as line ends and terminal sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
