"""Page of an audit, as one HTML file: the verdict, then lineages and epochs of each dataset as drawings.

HTML is a string of its own type, so that a text which was not escaped is an error of types: a name is never
markup. The text beside a bar says its numbers, so the bar is hidden from screen readers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import NewType

import numpy as np

from edl_torch import __version__
from edl_torch.audit.drawing import Branch, Drawing, EpochMap, Lane, draw
from edl_torch.audit.findings import MEANING, WRONG, Finding
from edl_torch.audit.verdict import Judgement, Outcome, Verdict
from edl_torch.cli.verdict_words import delivered, grounds, inexact, undecided, worst
from edl_torch.core.limits import printable
from edl_torch.core.status import cell_edges
from edl_torch.errors import OutputError
from edl_torch.master.web import hashes, with_style
from edl_torch.system.whole_files import whole_file
from edl_torch.trainer.vocabulary import Evidence

VERDICT_SIGNS = {
    Outcome.PROVEN: ("✓", "good"),
    Outcome.DELIVERED: ("◐", "warn"),
    Outcome.INEXACT: ("≈", "warn"),
    Outcome.UNFINISHED: ("…", "warn"),
    Outcome.REFUTED: ("✕", "bad"),
}
FIGURES = ("acknowledged", "quarantined", "dropped", *WRONG, "open", "repeated")
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


def write_page(judgements: Sequence[Judgement], path: Path, directories: Iterable[str]) -> None:
    """Write the page, whole or not at all. Raises OutputError."""
    page = render(judgements, directories, written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    try:
        with whole_file(path) as file:
            file.write(page.encode())
    except OSError as exc:
        raise OutputError(f"{str(path)!r} cannot be written: {exc.strerror}; choose another path") from exc


def render(judgements: Sequence[Judgement], directories: Iterable[str], *, written: str) -> str:
    """Return the page as text."""
    outcome = worst([judgement.verdict for judgement in judgements])
    page = with_style(resources.files("edl_torch.cli").joinpath("audit_page.html").read_text("utf-8"))
    policy = (
        f"default-src 'none'; style-src {hashes(page, 'style')}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    names = ", ".join(judgement.verdict.dataset for judgement in judgements)
    head = tag(
        "header",
        tag("h1", text("edl-torch audit")),
        tag("span", text("what became of each record of each epoch, by the trainers' logs"), _class="soft"),
    )
    body = head + tag(
        "main",
        _banner(judgements, outcome),
        *(_dataset(number, judgement) for number, judgement in enumerate(judgements)),
        tag(
            "footer",
            text(
                f"Written {written} by edl-torch {__version__} from the logs in {', '.join(directories)}. "
                "Epochs, shards and records are numbered from 0, as in the logs."
            ),
        ),
    )
    values = {"policy": policy, "title": text(f"{outcome.label}: {names} – edl-torch audit"), "body": body}
    before, *rest = page.split("{{")  # one pass: no name is taken for a place to fill
    parts = (part.split("}}", 1) for part in rest)
    return before + "".join(f"{values[name]}{after}" for name, after in parts)


def _banner(judgements: Sequence[Judgement], outcome: Outcome) -> Markup:
    """Return what has to be known first: the verdict in a sign and a word, and what it means."""
    sign, colour = VERDICT_SIGNS[outcome]
    lines = [
        tag(
            "li",
            tag("a", text(judgement.verdict.dataset), href=f"#dataset-{number}"),
            text(f": {_sentence(judgement.verdict)}{_unlearnt(judgement.verdict)}"),
        )
        for number, judgement in enumerate(judgements)
    ]
    return tag(
        "section",
        tag("div", text(f"{sign} {outcome.label}"), _class="word", role="status"),
        tag("ul", *lines),
        _class=f"card verdict {colour}",
        aria_label="Verdict",
    )


def _sentence(verdict: Verdict) -> str:
    must = f"{count(verdict.records, 'record')} that must have exactly one outcome"
    wrong = [
        f"{getattr(verdict, kind):,} {kind} ({MEANING[kind]})" for kind in WRONG if getattr(verdict, kind)
    ]
    wrong += [count(len(verdict.contradictions), "contradiction")] if verdict.contradictions else []
    match verdict.outcome:
        case Outcome.REFUTED:
            return f"of {must}: {', '.join(wrong)}."
        case Outcome.UNFINISHED:
            return f"nothing is wrong so far; {count(verdict.open, 'record')} without an outcome yet."
        case Outcome.INEXACT:
            return f"all {must} have it, but a model may have had some more often than is counted."
        case Outcome.DELIVERED:
            return f"all {must} have it: {delivered(verdict)}."
        case _:
            learnt = verdict.acknowledged - verdict.rests_on.get(Evidence.SKIPPED.label, 0)
            which = "each" if learnt == verdict.records else f"{learnt:,} of them"
            return f"all {must} have it, and one model has learnt {which}."


def _unlearnt(verdict: Verdict) -> str:
    found = {
        "put into quarantine": verdict.quarantined,
        "dropped": verdict.dropped,
        "stepped over by a GradScaler": verdict.rests_on.get(Evidence.SKIPPED.label, 0),
    }
    return "".join(f" {n:,} of {verdict.records:,} were {where}." for where, n in found.items() if n)


def _dataset(number: int, judgement: Judgement) -> Markup:
    verdict, drawing = judgement.verdict, draw(judgement)
    sign, colour = VERDICT_SIGNS[verdict.outcome]
    return tag(
        "section",
        tag(
            "h2",
            text(f"{verdict.dataset} "),
            tag("span", text(f"{sign} {verdict.outcome.label}"), _class=f"chip {colour}"),
            id=f"dataset-{number}",
        ),
        tag("div", _figures(verdict), *_remarks(verdict), _class="card"),
        *_findings(verdict, "Wrong records", WRONG, "wrong"),
        *_findings(verdict, "Records that are not wrong, but remarkable", ("repeated", "stale"), ""),
        tag("h3", text("Lineages")),
        LineageTree(drawing).markup(),
        tag("h3", text("Epochs")),
        *epoch_maps(judgement, drawing),
        aria_labelledby=f"dataset-{number}",
    )


def _figures(verdict: Verdict) -> Markup:
    always = ("acknowledged", "quarantined", "dropped", *WRONG)
    figures = {"must have one outcome": verdict.records}
    figures |= {name: getattr(verdict, name) for name in FIGURES if name in always or getattr(verdict, name)}
    figures |= {"rolled back": verdict.rolled_back, "refused as stale": verdict.refused}
    figures |= {"trainer sessions": verdict.trainers, "lineages": verdict.lineages}
    rows = [
        tag(
            "div",
            tag("dt", text(name)),
            tag("dd", text(f"{number:,}")),
            _class="bad" if name in WRONG and number else "",
        )
        for name, number in figures.items()
    ]
    return tag("dl", *rows, _class="figures")


def _remarks(verdict: Verdict) -> Iterator[Markup]:
    epochs = count(verdict.num_epochs, "epoch") if verdict.num_epochs else "endless"
    size = f"{count(verdict.size, 'record')}, {epochs}"
    if verdict.components:
        size = f"A mixture of {count(verdict.size, 'record')}" if verdict.num_epochs else "An endless mixture"
    yield tag("p", text(f"{size}; ledger {verdict.ledger}."))
    yield from (tag("p", text(f"{line[:1].upper()}{line[1:]}.")) for line in grounds(verdict))
    yield from (
        tag("p", text(f"✕ Contradiction: {line}."), _class="note bad") for line in verdict.contradictions
    )
    yield from (tag("p", text(f"◐ Delivered: {line}."), _class="note warn") for line in undecided(verdict))
    yield from (tag("p", text(f"≈ Inexact: {line}."), _class="note warn") for line in inexact(verdict))
    if verdict.advice:
        yield tag("p", text(f"→ {verdict.advice}."), _class="note warn")


def _findings(verdict: Verdict, title: str, kinds: Sequence[str], look: str) -> Iterator[Markup]:
    found = [finding for finding in verdict.findings if finding.kind in kinds]
    more = {kind: verdict.unnamed[kind] for kind in kinds if verdict.unnamed.get(kind)}
    if not found and not more:
        return
    columns = ("What", "Epoch", "First", "Last", "Records", "Storage", "Reported by")
    heads = [tag("th", tag("span", text(name)), scope="col", _class=_side(name)) for name in columns]
    rows = (
        tag(
            "tr",
            *(tag("td", text(value), _class=_side(name)) for name, value in zip(columns, row, strict=True)),
        )
        for row in map(_row, found)
    )
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), _class=look)
    label = f"{title} of {verdict.dataset}"
    scrolled = tag("div", table, _class="scroll", tabindex="0", role="region", aria_label=label)
    left = [
        tag("p", text(f"… and {count:,} more {kind}: --list names more."), _class="soft")
        for kind, count in more.items()
    ]
    yield tag("h3", text(title))
    yield tag("div", scrolled, *left, _class="card")


def _side(column: str) -> str:
    return "n" if column in ("Epoch", "First", "Last", "Records") else "which" if column == "What" else "name"


def _row(finding: Finding) -> tuple[object, ...]:
    records, what = finding.records, f"{finding.kind}: {MEANING[finding.kind]}"
    by = "; ".join(finding.by) or "nobody"
    return what, records.epoch, records.start, records.end - 1, len(records), records.name, by


# Markup ------------------------------------------------------------------------------------------------


def text(value: object) -> Markup:
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
    sizes = np.diff(cell_edges(judgement.verdict.size)).tolist()
    few = len(drawing.epochs) <= 3
    for epoch in drawing.epochs:
        yield tag("article", *_epoch(epoch, sizes, few), _class="card")
    if drawing.more_epochs:
        found = ", ".join(f"{name} {count:,}" for name, count in drawing.others.items()) or "no outcomes"
        line = f"… and {count(drawing.more_epochs, 'epoch')} more, not drawn: {found}."
        yield tag("p", text(line), _class="card soft")


def _epoch(epoch: EpochMap, sizes: Sequence[int], few: bool) -> Iterator[Markup]:
    outcomes = (
        _lane(lane, lane.name, f"{SIGNS.get(lane.name, '')}{lane.name}", sizes) for lane in epoch.outcomes
    )
    ends = (tag("span", text(f"{which} in its order")) for which in ("first", "last"))
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
