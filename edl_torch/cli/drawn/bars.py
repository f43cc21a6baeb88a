"""Bars of cells, as SVG. The text beside a bar says its numbers, so it is hidden from screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from edl_torch.cli.drawn.markup import Markup, tag

HEIGHT = 12  # of a bar, in units of its drawing; a cell is one wide
LEAST = 3  # what is there is seen

Box = tuple[int, int]  # bottom, height


def heights(cells: Sequence[int], sizes: Sequence[int], least: int = LEAST) -> list[int]:
    """Return how high each cell is filled: by its share, but never so little that it is not seen, nor so much
    that it looks full where it is not."""
    full = (
        HEIGHT if n == size else min(HEIGHT - 1, HEIGHT * n // size)
        for n, size in zip(cells, sizes, strict=True)
    )
    return [max(least, high) if n else 0 for n, high in zip(cells, full, strict=True)]


def stacked(kinds: Mapping[str, Sequence[int]], sizes: Sequence[int]) -> dict[str, list[Box]]:
    """Return the bottom and the height of each cell of some kinds of records, one upon the other."""
    bottoms, boxes = [0] * len(sizes), {}
    for name, cells in kinds.items():
        highs = heights(cells, sizes)
        bottoms = [min(bottom, HEIGHT - high) for bottom, high in zip(bottoms, highs, strict=True)]
        boxes[name] = list(zip(bottoms, highs, strict=True))
        bottoms = [bottom + high for bottom, high in boxes[name]]
    return boxes


def bar(look: str, kinds: Mapping[str, Sequence[Box]]) -> Markup:
    """Return a bar of cells, drawn from the bottom; neighbours that are alike are one box."""
    paths, width = [], 1
    for name, boxes in kinds.items():
        width, place, drawn = len(boxes), 0, []
        for (bottom, high), run in groupby(boxes):
            wide = len(list(run))
            if high:
                drawn.append(f"M{place} {HEIGHT - bottom - high}h{wide}v{high}h-{wide}z")
            place += wide
        if drawn:
            paths.append(tag("path", _class=name, d="".join(drawn)))
    box = f"0 0 {width} {HEIGHT}"
    return tag("svg", *paths, _class=look, viewBox=box, preserveAspectRatio="none", aria_hidden="true")
