"""Warnings that point at the line of the user's program."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

# They call us, or the loop in which we are.
_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "accelerate", "transformers")


def warn_user(text: str) -> None:
    """Warn at the line outside of this package and frameworks that led here; else at the caller's.

    `warnings` has this as `skip_file_prefixes` from Python 3.12 on.
    """
    loaded = [sys.modules.get(name) for name in ("edl_torch", *_FRAMEWORKS)]
    not_the_users = tuple(_folder(module) for module in loaded if getattr(module, "__file__", None))
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(not_the_users):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=2 if frame is None else level)


def _folder(package: Any) -> str:
    """Return where a package's files lie, with a slash at the end: torch's loaders call ours."""
    return f"{Path(package.__file__).parent}/"
