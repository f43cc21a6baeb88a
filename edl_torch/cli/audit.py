"""`edl-torch audit`: what trainers wrote down, judged, for people and for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.findings import Finding
from edl_torch.audit.verdict import Outcome, Verdict, judge
from edl_torch.trainer.facts import Way

_WORST_FIRST = (Outcome.REFUTED, Outcome.UNFINISHED, Outcome.INEXACT, Outcome.PROVEN)

MEANING = {
    "lost": "no outcome",
    "doubled": "more than one outcome",
    "forgotten": "confirmed, and unknown to the master",
    "repeated": "may have been trained on once more than is counted",
    "stale": "came too late and was refused",
}
_WAYS = {
    Way.STEP.label: "when an attached optimizer had stepped",
    Way.NEXT.label: "when the next batch was asked for",
    Way.TOKEN.label: "by a token taken in the loop's body",
    Way.REPORT.label: "by the loop's reports",
    Way.COUNT.label: "by counting reports over several loader workers",
    Way.UNSTEPPED.label: "at the end of the job, without a step on them",
    Way.UNKNOWN.label: "in a way that the log does not tell",
}
_COUNTS = ("acknowledged", "quarantined", "dropped", "lost", "doubled", "forgotten", "open")


def run(options: argparse.Namespace) -> int:
    """Print the verdict on the logs, and on the journal if one is given; write the page if one is wanted.

    Returns 0: proven, 1: refuted, 2: unfinished, or unusable logs, 3: proven, inexact.
    """
    words = None if options.state is None else partial(_words, options.state)
    listed = max(0, options.list)
    judgements = judge(options.directories, words=words, unfinished=options.unfinished, listed=listed)
    if options.html is not None:
        from edl_torch.cli.drawn.page import write_page

        write_page(judgements, options.html, options.directories)
    verdicts = [judgement.verdict for judgement in judgements]
    print(write_json(verdicts) if options.json else write_table(verdicts))
    if options.html is not None and not options.json:
        print(f"page: {len(verdicts)} dataset(s) drawn to {options.html}")
    return worst(verdicts).status


def worst(verdicts: Sequence[Verdict]) -> Outcome:
    """What several verdicts come to."""
    found = {verdict.outcome for verdict in verdicts}
    return next(outcome for outcome in _WORST_FIRST if outcome in found)


def _words(state: Path) -> dict[str, FinalWord]:
    from edl_torch.audit.chain import final_words
    from edl_torch.master.journal import view

    return final_words(view(state))


def write_json(verdicts: list[Verdict]) -> str:
    """Everything, indented. Names may hold undecodable bytes, so it is ASCII."""
    datasets = [_summary(verdict.outcome) | asdict(verdict) for verdict in verdicts]
    return json.dumps(_summary(worst(verdicts)) | {"datasets": datasets}, indent=2)


def _summary(outcome: Outcome) -> dict[str, object]:
    return {"verdict": outcome.label, "proven": outcome in (Outcome.PROVEN, Outcome.INEXACT)}


def write_table(verdicts: list[Verdict]) -> str:
    """A few lines for each dataset."""
    return "\n\n".join("\n".join(_lines(verdict)) for verdict in verdicts)


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"dataset {verdict.dataset!r}: {verdict.outcome.label}"
    if verdict.advice:
        yield f"  {verdict.advice}"
    epochs = f"{verdict.num_epochs} epoch(s)" if verdict.num_epochs else "endless"
    yield f"  {verdict.size} records, {epochs}; {verdict.records} must have exactly one outcome"
    yield (
        f"  lineage {verdict.lineage} of ledger {verdict.ledger}, the last of {verdict.lineages} "
        f"in the logs; {verdict.trainers} trainer session(s)"
    )
    counts = [(name, getattr(verdict, name)) for name in _COUNTS]
    yield "  " + "  ".join(f"{name} {count}" for name, count in counts if count or name != "open")
    yield f"  rolled back {verdict.rolled_back}  refused as stale {verdict.refused}"
    yield from (f"  {text}" for text in grounds(verdict))
    yield from (f"  INEXACT: {text}" for text in inexact(verdict))
    yield from (f"  CONTRADICTION: {text}" for text in verdict.contradictions)
    for kind in MEANING:
        yield from _kind(verdict, kind)


def grounds(verdict: Verdict) -> Iterator[str]:
    """Yield what the verdict rests on."""
    rests_on = [f"{count} {_WAYS[way]}" for way, count in verdict.rests_on.items()]
    if rests_on:
        yield f"acknowledged: {'; '.join(rests_on)}"
    if verdict.judged:
        yield "by the logs and the master's own word"
    if verdict.unsettled:
        counting = "the master has heard" if verdict.judged else "nobody else has, and count as acknowledged"
        yield f"{verdict.unsettled} were reported without an answer; {verdict.assumed} of them {counting}"


def inexact(verdict: Verdict) -> Iterator[str]:
    """Yield what keeps the proof from being exact."""
    if verdict.repeated:
        why = {
            "given back after a loop had them": verdict.returned,
            "taken back by the master while a loop had them": verdict.void,
            "reported too late": verdict.late,
        }
        reasons = "; ".join(f"{count} {what}" for what, count in why.items() if count)
        yield f"{verdict.repeated} record(s) may have been trained on once more than is counted: {reasons}"
    if verdict.counted:
        yield (
            f"{verdict.counted} record(s) were acknowledged by counting: a plain DataLoader with several "
            f"workers does not say which records a batch holds"
        )
    if verdict.uncounted:
        yield f"{verdict.uncounted} record(s) were reported so and read again: the reports do not say which"
    if verdict.unstepped:
        yield (
            f"{verdict.unstepped} record(s) were handed out after the last optimizer.step() of the job: the "
            f"model has not learnt from them"
        )
    if verdict.unexplained:
        yield (
            f"{verdict.unexplained} record(s) were acknowledged, and the log does not say how: it is of an "
            f"older edl-torch"
        )
    yield from verdict.doubts


def _kind(verdict: Verdict, kind: str) -> Iterator[str]:
    found = [finding for finding in verdict.findings if finding.kind == kind]
    more = verdict.unnamed.get(kind, 0)
    if found or more:
        yield f"  {kind}: {MEANING[kind]}"
    yield from (f"    {_finding(finding)}" for finding in found)
    if more:
        yield f"    … and {more} more record(s)"


def _finding(finding: Finding) -> str:
    records = finding.records
    by = f", by {'; '.join(finding.by)}" if finding.by else ""
    which = f"record {records.start}"
    if len(records) > 1:
        which = f"records {records.start} to {records.end - 1}"
    return f"epoch {records.epoch}: {which} of {records.name!r}{by}"
