"""Epochs of an audit as maps: a bar for each outcome that records had, and one for each trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edl_torch.audit.drawing import WRONG, Drawing, EpochMap
from edl_torch.audit.lane import Lane
from edl_torch.audit.verdict import Judgement
from edl_torch.cli.drawn.bars import HEIGHT, LEAST, bar, heights
from edl_torch.cli.drawn.markup import Markup, count, tag, text
from edl_torch.core.picture import cell_edges
from edl_torch.core.plan import Plan

SIGNS = {
    "lost": "✕ ",
    "doubled": "✕ ",
    "forgotten": "✕ ",
    "repeated": "≈ ",
    "open": "… ",
    "acknowledged": "✓ ",
}


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
