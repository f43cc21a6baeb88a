"""The example's modules are scripts beside each other, not a package: make them importable."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[3] / "examples" / "coco")

if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
