"""Lineages of an audit as nested lists, each with a bar of what it did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edl_torch.audit.drawing import Drawing
from edl_torch.audit.tree import Branch
from edl_torch.cli.drawn.bars import bar, stacked
from edl_torch.cli.drawn.markup import Markup, count, tag, text
from edl_torch.core.picture import cell_edges

MOST_NAMES = 6


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
