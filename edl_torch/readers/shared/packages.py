"""Packages that not everybody has. Importing this costs no numpy."""

from __future__ import annotations

import importlib
from typing import Any

from edl_torch.errors import ReaderUnavailable


def required(module: str, need: str) -> Any:
    """Import a module that not everybody has. Raises ReaderUnavailable, which says what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ReaderUnavailable(need) from exc
