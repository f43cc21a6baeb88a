"""`--custom_data_reader_params "key=value; other=[1, 2]"` as keyword arguments.

It must not know which reader takes them.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from edl_torch.errors import InvalidArgument

# Runs of characters that are neither separator nor quote, or whole quoted strings.
_PIECE = re.compile(r"""(?:[^;"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')+""")


def parse_reader_params(text: str) -> dict[str, Any]:
    """Parse `key=value` pairs that are separated by semicolons.

    A value is a Python literal (number, string in quotes, list, dict, None, True) or else the text itself
    without the blanks around it; semicolons inside quotes belong to the value. Raises InvalidArgument for
    an entry without `=`, a key that is no identifier, a key given twice and an unclosed quote.
    """
    params: dict[str, Any] = {}
    for place, entry in enumerate(_split(text), 1):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not key.isidentifier():
            # its text is not repeated: it may be part of a key to somebody's data
            raise InvalidArgument(
                f"reader parameter {place} is not key=value; separate pairs by ';', quote values with one"
            )
        if key in params:
            raise InvalidArgument(f"reader parameter {key!r} is given twice")
        params[key] = _value(value)
    return params


def _split(text: str) -> list[str]:
    pieces, position = [], 0
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None and text[position] != ";":
            raise InvalidArgument(f"reader parameters: the quote at character {position + 1} is not closed")
        if piece is not None:
            pieces.append(piece.group())
        position = piece.end() if piece is not None else position + 1
    return [piece for piece in pieces if piece.strip()]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
