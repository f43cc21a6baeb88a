"""Cases of a test of which some run at each change, and further ones in `make test-all` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(names: str, quick: Iterable[Any], every: Iterable[Any], **options: Any) -> Any:
    """Parametrize a test by `every` case; all that are not `quick` are marked `long`."""
    kept = list(quick)
    listed = list(every)
    assert all(case in listed for case in kept), "a quick case is one of them"
    marks = ([] if case in kept else [pytest.mark.long] for case in listed)
    several = "," in names
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*(case if several else [case]), marks=mark)
            for case, mark in zip(listed, marks, strict=True)
        ],
        **options,
    )
