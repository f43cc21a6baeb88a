"""Proves, or refutes by naming the records, that each record of each epoch had exactly one outcome.

What counts is the model that came out: the final lineage and those that it goes back to (`audit.chain`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

from edl_torch.audit.chain import Chain, FinalWord
from edl_torch.audit.findings import Finding, Findings
from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lineage import History, histories
from edl_torch.audit.part import Part, records_of
from edl_torch.audit.reading import Answer, read_logs

LISTED = 20  # ranges of each kind that are named, unless the caller wants more


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One dataset. Counts are of records in the lineages that made the final model, unless said otherwise.

    `findings` names the first ranges of each kind, `unnamed` counts the records of the others.
    """

    dataset: str
    ledger: str
    lineage: int
    size: int
    num_epochs: int  # 0 is endless
    records: int  # that must have an outcome
    acknowledged: int
    quarantined: int
    dropped: int
    lost: int
    doubled: int
    forgotten: int
    open: int  # without an outcome, and need not have one yet
    unsettled: int  # reported, and no log says whether the master heard it
    assumed: int  # of those, taken for acknowledged, as nobody else has them
    refused: int  # acknowledgements that came too late; in all lineages
    rolled_back: int  # acknowledged after a token that the job went back to; in all lineages
    trainers: int  # sessions
    lineages: int
    contradictions: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    unnamed: Mapping[str, int] = field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Whether each record that must have an outcome has exactly one."""
        return not (self.lost or self.doubled or self.forgotten or self.contradictions)


def audit(
    directories: Sequence[str | PathLike[str]],
    *,
    words: Mapping[str, FinalWord] | None = None,
    unfinished: bool = False,
    listed: int = LISTED,
) -> list[Verdict]:
    """Judge every dataset in the logs of `directories`, by name.

    `words` is the master's final word by dataset. With `unfinished` a record without an outcome is open, not
    lost: for a job that still runs or was stopped. Raises AuditError when the logs cannot be used.
    """
    words = words or {}
    found = histories(read_logs(directories))
    return [
        judge(history, words.get(history.spec.name), unfinished=unfinished, listed=listed)
        for history in found
    ]


def judge(
    history: History, word: FinalWord | None = None, *, unfinished: bool = False, listed: int = LISTED
) -> Verdict:
    """The verdict on one dataset. Raises AuditError when the logs do not reach back to its beginning."""
    word = word or FinalWord()
    parts = Chain(history, word).parts()
    final, spec = parts[0], history.spec
    excused = final.missing & _excused(history, final, word, unfinished)
    final.missing -= excused
    found = Findings(history, parts, judged=word.token is not None)
    named = found.named(listed)
    quarantined = sum((part.quarantined - part.begun).count for part in parts)
    return Verdict(
        dataset=spec.name,
        ledger=final.lineage.key[0],
        lineage=final.lineage.key[1],
        size=spec.size,
        num_epochs=spec.num_epochs,
        records=final.required.count - excused.count,
        acknowledged=sum(part.own.count for part in parts) - quarantined,
        quarantined=quarantined,
        dropped=sum(part.dropped.count for part in parts),
        lost=found.count("lost"),
        doubled=found.count("doubled"),
        forgotten=found.count("forgotten"),
        open=excused.count + _ahead(history, final, word),
        unsettled=sum(part.unsettled for part in parts),
        assumed=sum(part.assumed.count for part in parts),
        refused=sum(item.acknowledged.answered(Answer.REFUSED).records for item in history.lineages.values()),
        rolled_back=_rolled_back(history, parts),
        trainers=history.trainer_count,
        lineages=len(history.lineages),
        contradictions=tuple(text for part in parts for text in part.contradictions),
        findings=named,
        unnamed=_unnamed(found, named),
    )


def _excused(history: History, final: Part, word: FinalWord, unfinished: bool) -> Intervals:
    """Records that may be without an outcome yet."""
    if word.token is not None:
        return Intervals()  # the master says which have one
    if unfinished:
        return final.required
    if history.spec.num_epochs:
        return Intervals()
    # An endless job was stopped somewhere in the last epoch that it began.
    end = final.required.count
    return Intervals.run(max(0, end - history.spec.size), end)


def _ahead(history: History, final: Part, word: FinalWord) -> int:
    """Records of the job that have no outcome by the master's word."""
    if word.token is None or not history.spec.num_epochs:
        return 0
    return history.spec.num_epochs * history.spec.size - final.required.count


def _rolled_back(history: History, parts: list[Part]) -> int:
    beyond = sum((part.outcomes - part.begun - part.required).count for part in parts[1:])
    used = {part.lineage.key for part in parts}
    unused = [lineage.acknowledged for key, lineage in history.lineages.items() if key not in used]
    return beyond + sum(records_of(r.at(r.answers != Answer.REFUSED)).count for r in unused)


def _unnamed(found: Findings, named: Sequence[Finding]) -> dict[str, int]:
    left = {kind: records.count for kind, records in found.records.items()}
    for finding in named:
        left[finding.kind] -= len(finding.records)
    return {kind: count for kind, count in left.items() if count}
