"""Warnings that point at the line of the user's program."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType


def warn_user(text: str) -> None:
    """Warn at the line outside of this package and torch that led here; where there is none, at the caller's.

    `warnings` has this as `skip_file_prefixes` from Python 3.12 on.
    """
    not_the_users = tuple(_folder(name) for name in ("edl_torch", "torch") if name in sys.modules)
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(not_the_users):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=2 if frame is None else level)


def _folder(package: str) -> str:
    """Return where a package's files lie, with a slash at the end: torch's loaders call ours."""
    return f"{Path(sys.modules[package].__file__ or package).parent}/"
