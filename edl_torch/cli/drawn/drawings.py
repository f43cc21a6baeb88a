"""Drawings of an audit as HTML and SVG: lineages as nested lists, epochs as bars of cells.

HTML is a string of its own type, so that a text which was not escaped is an error of types. The text beside a
bar says its numbers, so it is hidden from screen readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NewType

import numpy as np

from edl_torch.audit.drawing import WRONG, Drawing, EpochMap
from edl_torch.audit.lane import Lane
from edl_torch.audit.tree import Branch
from edl_torch.audit.verdict import Judgement
from edl_torch.core.limits import printable
from edl_torch.core.picture import cell_edges
from edl_torch.core.plan import Plan

HEIGHT = 12  # of a bar, in units of its drawing; a cell is one wide
LEAST = 3  # what is there is seen
MOST_NAMES = 6
SIGNS = {
    "lost": "✕ ",
    "doubled": "✕ ",
    "forgotten": "✕ ",
    "repeated": "≈ ",
    "open": "… ",
    "acknowledged": "✓ ",
}

Markup = NewType("Markup", str)
Box = tuple[int, int]  # bottom, height


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


# Bars --------------------------------------------------------------------------------------------------


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


# Epochs ------------------------------------------------------------------------------------------------


def epoch_maps(judgement: Judgement, drawing: Drawing) -> Iterator[Markup]:
    plan, size = judgement.history.coordinates.plan, judgement.verdict.size
    sizes = np.diff(cell_edges(size)).tolist()
    few = len(drawing.epochs) <= 3
    for epoch in drawing.epochs:
        yield tag("article", *_epoch(epoch, plan, sizes, few), _class="card")
    if drawing.more_epochs:
        found = ", ".join(f"{name} {count:,}" for name, count in drawing.others.items()) or "no outcomes"
        line = f"… and {count(drawing.more_epochs, 'epoch')} more, not drawn: {found}."
        yield tag("p", text(line), _class="card soft")


def _epoch(epoch: EpochMap, plan: Plan, sizes: Sequence[int], few: bool) -> Iterator[Markup]:
    outcomes = (
        _lane(lane, lane.name, f"{SIGNS.get(lane.name, '')}{lane.name}", sizes) for lane in epoch.outcomes
    )
    what, last = ("window", plan.num_windows - 1) if plan.window > 1 else ("shard", plan.num_shards - 1)
    ends = (tag("span", text(f"{what} {number:,}")) for number in dict.fromkeys((0, last)))
    yield tag("h4", text(f"Epoch {epoch.epoch}"))
    yield tag("ul", *outcomes, _class="lanes")
    yield tag("div", *ends, _class="ends")
    if epoch.trainers:
        yield tag("details", *_trainers(epoch, sizes), open="open" if few else "")


def _trainers(epoch: EpochMap, sizes: Sequence[int]) -> Iterator[Markup]:
    more = epoch.more_trainers
    yield tag("summary", text(f"by {count(len(epoch.trainers) + more, 'trainer')}"))
    yield tag("ul", *(_lane(lane, "trainer", lane.name, sizes) for lane in epoch.trainers), _class="lanes")
    if more:
        yield tag("p", text(f"… and {count(more, 'trainer')} more, not drawn."), _class="soft")


def _lane(lane: Lane, look: str, name: str, sizes: Sequence[int]) -> Markup:
    wrong = look in WRONG
    boxes = [(0, high) for high in heights(lane.cells, sizes, least=HEIGHT if wrong else LEAST)]
    label = tag("span", tag("span", _class=f"key {look}"), text(name))
    records = tag("span", text(f"{lane.records:,}"))
    what = tag("span", label, records, _class="what bad" if wrong else "what")
    return tag("li", what, bar("lane", {look: boxes}))


# Lineages ----------------------------------------------------------------------------------------------


class LineageTree:
    """Lineages as nested lists: the line that continues stays on one level, what left it is set in."""

    def __init__(self, drawing: Drawing) -> None:
        self._sizes = np.diff(cell_edges(drawing.end)).tolist()
        self._roots = sorted(drawing.roots, key=lambda branch: not branch.counts)
        self._more, self._empty = drawing.more_lineages, drawing.empty_lineages
        self._several_ledgers = drawing.several_ledgers

    def markup(self) -> Markup:
        items = [item for root in self._roots for item in self._items(root, None)]
        about = (
            "A lineage is what a model learnt from the beginning, or from a restore, to the next. Each "
            "continues the one above it; others that left it are set in. The bars are all epochs together."
        )
        keys = {"before": "done when it began", "counted": "counted", "beyond": "rolled back"}
        return tag(
            "div",
            tag("p", text(about), _class="soft"),
            tag("ul", *(_key(look, what) for look, what in keys.items()), _class="legend"),
            tag("ol", *items, _class="tree"),
            *self._left_out(),
            _class="card",
        )

    def _left_out(self) -> Iterator[Markup]:
        if self._more:
            yield tag("p", text(f"… and {count(self._more, 'lineage')} more, not drawn."))
        if self._empty:
            which = f"{count(self._empty, 'lineage')} without a record"
            yield tag("p", text(f"Not drawn: {which}. A job that restores as it begins leaves one behind."))

    def _items(self, branch: Branch | None, origin: Branch | None) -> Iterator[Markup]:
        while branch is not None:
            after = sorted(branch.children, key=lambda child: child.counts)
            aside = [item for child in after[:-1] for item in self._items(child, branch)]
            yield tag(
                "li",
                tag("div", *self._lineage(branch, origin), _class="counts" if branch.counts else "away"),
                *([tag("ol", *aside)] if aside else []),
            )
            branch, origin = (after[-1] if after else None), branch

    def _lineage(self, branch: Branch, origin: Branch | None) -> Iterator[Markup]:
        yield tag("strong", text(self._name(branch)))
        yield text(" ")
        if branch.final:
            yield tag("span", text("✓ the final model"), _class="chip good")
        elif not branch.counts:
            yield tag("span", text("↶ rolled back"), _class="chip warn")
        began = "the beginning of the data"
        if branch.restored:
            began = f"a token with {count(branch.before.records, 'record')} done"
            began += f", taken by {_some(branch.taken_by)}" if branch.taken_by else ""
            began += f" in {self._name(origin)}" if origin is not None else ""
        did = f"{branch.counted.records:,} counted, {branch.rolled_back.records:,} rolled back"
        yield tag("p", text(f"Began from {began}. {did}. Trainers: {_some(branch.trainers)}."))
        cells = {"before": branch.before, "counted": branch.counted, "beyond": branch.rolled_back}
        yield bar("lane thin", stacked({look: lane.cells for look, lane in cells.items()}, self._sizes))

    def _name(self, branch: Branch) -> str:
        ledger, number = branch.key
        return f"lineage {number} of ledger {ledger}" if self._several_ledgers else f"lineage {number}"


def _key(look: str, what: str) -> Markup:
    return tag("li", tag("span", _class=f"key {look}"), text(what))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return (", ".join(names[:MOST_NAMES]) or "none") + more
