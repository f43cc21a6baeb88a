"""Page as a whole: the verdict, then each dataset. All texts go through `text()`: a name is never markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from edl_torch import __version__
from edl_torch.audit.drawing import WRONG, draw
from edl_torch.audit.findings import Finding
from edl_torch.audit.verdict import Judgement, Outcome, Verdict
from edl_torch.cli.drawn.drawings import LineageTree, Markup, count, epoch_maps, tag, text
from edl_torch.cli.verdict_words import MEANING, delivered, grounds, inexact, undecided, worst
from edl_torch.errors import OutputError
from edl_torch.master.web.document import hashes, with_style
from edl_torch.readers.shared.files import whole_file

SIGNS = {
    Outcome.PROVEN: ("✓", "good"),
    Outcome.DELIVERED: ("◐", "warn"),
    Outcome.INEXACT: ("≈", "warn"),
    Outcome.UNFINISHED: ("…", "warn"),
    Outcome.REFUTED: ("✕", "bad"),
}
FIGURES = ("acknowledged", "quarantined", "dropped", *WRONG, "open", "repeated")


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
    page = with_style(resources.files("edl_torch.cli.drawn").joinpath("page.html").read_text("utf-8"))
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
    sign, colour = SIGNS[outcome]
    lines = [
        tag(
            "li",
            tag("a", text(judgement.verdict.dataset), href=f"#dataset-{number}"),
            text(f": {_sentence(judgement.verdict)}{_quarantine(judgement.verdict)}"),
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
            return f"all {must} have it, and one model has learnt each."


def _quarantine(verdict: Verdict) -> str:
    found = verdict.quarantined
    return f" {found:,} of {verdict.records:,} are in quarantine." if found else ""


def _dataset(number: int, judgement: Judgement) -> Markup:
    verdict, drawing = judgement.verdict, draw(judgement)
    sign, colour = SIGNS[verdict.outcome]
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
    yield tag("p", text(f"{count(verdict.size, 'record')}, {epochs}; ledger {verdict.ledger}."))
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
