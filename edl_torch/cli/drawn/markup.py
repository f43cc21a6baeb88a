"""HTML as strings of their own type, so that a text which was not escaped is an error of types."""

from __future__ import annotations

from html import escape
from typing import NewType

from edl_torch.core.printable import printable

Markup = NewType("Markup", str)


def text(value: object) -> Markup:
    """Return a text as markup."""
    return Markup(escape(printable(str(value))))


def tag(name: str, *inside: Markup, **attributes: str) -> Markup:
    """Return an element; attributes that are empty are left out, and `aria_label` is written aria-label."""
    written = "".join(
        f' {key.lstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value
    )
    return Markup(f"<{name}{written}>{''.join(inside)}</{name}>")


def count(number: int, what: str) -> str:
    """Return "1 record" or "2 records"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
