"""Trainers written by hand, and what a verdict says about their logs."""

from __future__ import annotations

from dataclasses import replace

from audited_job import BATCH, SPEC, WORD, grant_of
from hand_log import HandLog

from edl_torch.audit.verdict import audit
from edl_torch.core.calls import Acknowledgement, GiveBack
from edl_torch.shard import Source
from edl_torch.trainer.vocabulary import Evidence

SMALL = replace(SPEC, sources=(Source(name="a.csv", start=100, count=16),))


def one(folder, **options):
    (verdict,) = audit([folder], **options)
    return verdict


def findings(verdict, kind):
    found = [f.records for f in verdict.findings if f.kind == kind]
    return [(r.epoch, r.name, r.start, r.end) for r in found]


def by(verdict, kind):
    return [f.by for f in verdict.findings if f.kind == kind]


class Writer:
    """A trainer written by hand: leases and acknowledgements of any kind."""

    def __init__(self, folder, session="s", spec=SMALL, lineage=1, ledger="L", member=1):
        self.log = HandLog(folder, session, session)
        self.log.joined(spec, ledger=ledger, lineage=lineage, batch_size=BATCH, member=member)
        self.log.model(WORD)

    def take(self, task, shard, skip, limit, *, epoch=0):
        self.log.granted(grant_of(task, shard, skip, limit, epoch=epoch))

    def say(self, task, *upto, answered=True, stale=(), way=Evidence.STEP):
        for position in upto:
            done = Acknowledgement(task=task, attempt=1, upto=position)
            self.log.intent(acknowledgements=[done], way=way)
            if answered:
                self.log.answered(stale)

    def give_back(self, task, start, had):
        """The loop is left with positions `start` to `had` in hand."""
        back = GiveBack(task=task, attempt=1, start=start)
        self.log.intent(give_backs=[back], returned=[(task, start, had)])
        self.log.answered()

    def whole(self, task, shard, skip=0, limit=8, *, epoch=0, **options):
        self.take(task, shard, skip, limit, epoch=epoch)
        self.say(task, skip + limit, **options)
