"""`edl-torch audit`: what trainers wrote down, judged, for people and for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.findings import MEANING, WRONG, Finding
from edl_torch.audit.verdict import Outcome, Verdict, judge
from edl_torch.cli.verdict_words import grounds, headline, inexact, undecided, worst

_COUNTS = ("acknowledged", "quarantined", "dropped", *WRONG, "open")


def run(options: argparse.Namespace) -> int:
    """Print the verdict on the logs, and on the journal if one is given; write the page if one is wanted.

    Returns 0: proven, or what is expected, 1: refuted, 2: unfinished, or unusable logs, 3: inexact,
    4: delivered.
    """
    words = None if options.state is None else partial(_words, options.state)
    listed = max(0, options.list)
    judgements = judge(options.directories, words=words, unfinished=options.unfinished, listed=listed)
    if options.html is not None:
        from edl_torch.cli.audit_page import write_page

        write_page(judgements, options.html, options.directories)
    verdicts = [judgement.verdict for judgement in judgements]
    print(write_json(verdicts) if options.json else write_table(verdicts))
    if options.html is not None and not options.json:
        print(f"page: {len(verdicts)} dataset(s) drawn to {options.html}")
    outcome = worst(verdicts)
    return 0 if outcome.label.lower() == options.expect else outcome.status


def _words(state: Path) -> dict[str, FinalWord]:
    from edl_torch.audit.chain import final_words
    from edl_torch.master.journal import view

    return final_words(view(state))


def write_json(verdicts: list[Verdict]) -> str:
    """Everything, indented. Names may hold undecodable bytes, so it is ASCII."""
    datasets = [_summary(verdict.outcome) | _values(verdict) for verdict in verdicts]
    return json.dumps(_summary(worst(verdicts)) | {"datasets": datasets}, indent=2, default=asdict)


def _summary(outcome: Outcome) -> dict[str, object]:
    return {"verdict": outcome.label, "proven": outcome is Outcome.PROVEN}


def _values(verdict: Verdict) -> dict[str, object]:
    said = {"headline": headline(verdict), "undecided": [*undecided(verdict)], "inexact": [*inexact(verdict)]}
    return said | vars(verdict) | {"task_type": verdict.task_type.name}


def write_table(verdicts: list[Verdict]) -> str:
    """A few lines for each dataset."""
    return "\n\n".join("\n".join(_lines(verdict)) for verdict in verdicts)


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"dataset {verdict.dataset!r}: {headline(verdict)}"
    if verdict.advice:
        yield f"  {verdict.advice}"
    epochs = f"{verdict.num_epochs} epoch(s)" if verdict.num_epochs else "endless"
    if verdict.first_epoch:
        epochs += f", of which {verdict.first_epoch} had other data"
    size = f"{verdict.size} records, {epochs}"
    if verdict.components:
        size = f"a mixture of {verdict.size} records" if verdict.num_epochs else "an endless mixture"
    yield f"  {size}; {verdict.records} must have exactly one outcome"
    if verdict.abandoned:
        yield f"  {verdict.abandoned} more were abandoned: the job went on with other data in its next epoch"
    yield (
        f"  lineage {verdict.lineage} of ledger {verdict.ledger}, the last of {verdict.lineages} "
        f"in the logs; {verdict.trainers} trainer session(s)"
    )
    counts = [(name, getattr(verdict, name)) for name in _COUNTS]
    yield "  " + "  ".join(f"{name} {count}" for name, count in counts if count or name != "open")
    yield f"  rolled back {verdict.rolled_back}  refused as stale {verdict.refused}"
    yield from (f"  {text}" for text in grounds(verdict))
    yield from (f"  DELIVERED: {text}" for text in undecided(verdict))
    yield from (f"  INEXACT: {text}" for text in inexact(verdict))
    yield from (f"  CONTRADICTION: {text}" for text in verdict.contradictions)
    for kind in MEANING:
        yield from _kind(verdict, kind)


def _kind(verdict: Verdict, kind: str) -> Iterator[str]:
    found = [finding for finding in verdict.findings if finding.kind == kind]
    more = verdict.unnamed.get(kind, 0)
    if found or more:
        yield f"  {kind}: {MEANING[kind]}"
    unit = "pass" if verdict.components else "epoch"
    yield from (f"    {unit} {_finding(finding)}" for finding in found)
    if more:
        yield f"    … and {more} more record(s)"


def _finding(finding: Finding) -> str:
    records = finding.records
    by = f", by {'; '.join(finding.by)}" if finding.by else ""
    which = f"record {records.start}"
    if len(records) > 1:
        which = f"records {records.start} to {records.end - 1}"
    return f"{records.epoch}: {which} of {records.name!r}{by}"
