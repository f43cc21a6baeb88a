"""torchvision's transforms, also beside a build of torch for which its wheel was not made.

The wheel's compiled part does not load then; the transforms do not need it once its operators have names.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

_library: list[Any] = []  # operators live as long as it does


def torchvision() -> Any:
    """Return the package, with `transforms` and `transforms.v2`. Skips the test where it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.append(library)
        import torchvision
    import torchvision.transforms.v2

    return torchvision
