"""docs/torchft.md changes five lines of torchft's example at most, with names that there are."""

from __future__ import annotations

import re
from pathlib import Path

from edl_torch import ElasticDataLoader
from edl_torch.integrations import torchft

PAGE = (Path(__file__).parents[2] / "docs" / "torchft.md").read_text(encoding="utf-8")


def test_five_lines_of_the_example_change() -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    added = re.findall(r"^\+(.*)$", block, re.M)
    assert len(added) <= 5
    (imported,) = re.findall(r"import (.*)", added[0])
    assert all(hasattr(torchft, name) for name in imported.split(", "))
    methods = set(re.findall(r"trainloader\.(\w+)", block))
    assert methods == {"epochs", "weigh"}
    assert all(hasattr(ElasticDataLoader, name) for name in methods)
