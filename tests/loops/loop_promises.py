"""What must hold of any loop: its own count against the master's books and the audit's verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from loop_program import Program
from loop_reference import Batch, Counts, Record, Reference

from edl_torch.audit.verdict import Outcome, Verdict, audit
from edl_torch.testing import FakeMaster

TOLERANCE = 1e-12


class BrokenPromise(AssertionError):
    """`promise` names it in a word or two."""

    def __init__(self, promise: str, details: object) -> None:
        super().__init__(f"{promise}: {details}")
        self.promise = promise


class Books:
    """What the master was told of one dataset since the model began, or went back to a copy.

    Where reports have wrong sizes, those say which records a failed batch held.
    """

    def __init__(self, fake: FakeMaster, program: Program) -> None:
        self._exact = program.says_what_is
        self._is_guessed = program.is_guessed
        self._unreadable = unreadable(program)
        self._fake = fake
        self._acknowledged: Counts = Counter()
        self._quarantined: Counts = Counter()

    def restart(self) -> None:
        """What was told so far is of a model that is gone."""
        self._acknowledged, self._quarantined = self._told()

    def _told(self) -> tuple[Counts, Counts]:
        outcomes = self._fake.outcomes.get("training")
        if outcomes is None:
            return Counter(), Counter()
        told = (outcomes.acknowledged, outcomes.quarantined)
        return tuple(Counter({(e, number): n for (e, _, number), n in counts.items()}) for counts in told)  # type: ignore[return-value]

    def check(self, reference: Reference) -> None:
        """Nothing has an outcome that the loop did not give it."""
        acknowledged, quarantined = self._told()
        if not self._is_guessed:
            _no_more(acknowledged - self._acknowledged, reference.trained_since(), "acknowledged early")
        if self._exact:
            reasons = reference.bad_since() + self._unreadable
            _no_more(quarantined - self._quarantined, reasons, "quarantined without reason")


def unreadable(program: Program) -> Counts:
    """Records that no loop is ever given."""
    return Counter((epoch, n) for epoch in range(program.data.epochs) for n in program.data.unreadable)


def _no_more(told: Counts, done: Counts, promise: str) -> None:
    if early := told - done:
        raise BrokenPromise(promise, sorted(early))


def check_gradient(actual: torch.Tensor | None, expected: torch.Tensor, window: list[Batch]) -> None:
    """The gradient before a step is that of one process's mean over the window's records."""
    if actual is None or not torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE):
        sizes = [len(batch.numbers) for batch in window]
        raise BrokenPromise("gradient", f"{actual} where {expected} is right, batches of {sizes}")


def check_finished(program: Program, reference: Reference) -> None:
    """Every record of every epoch was trained on, and none twice but those of a loop that was left."""
    data = program.data
    outcomes = reference.trained() + reference.bad() + unreadable(program)
    for epoch in range(data.epochs):
        missing = [(epoch, n) for n in range(data.records) if not outcomes[epoch, n]]
        dropped = data.batch_size - 1 if program.loader.drop_last else 0
        if len(missing) > dropped and not program.is_guessed:
            raise BrokenPromise("lost", f"{missing}, {dropped} may be dropped")
    beyond = {record for record in outcomes if not _is_of(record, program)}
    if beyond:
        raise BrokenPromise("no record of the job", sorted(beyond))


def check_once(program: Program, reference: Reference) -> None:
    """No record was given to the loop twice, but those of a loop that was left."""
    given = reference.delivered_counts() + reference.before + reference.bad_before
    allowed = Counter(dict.fromkeys(given, 1)) + reference.again
    if doubled := given - allowed:
        raise BrokenPromise("doubled", sorted(doubled))


def _is_of(record: Record, program: Program) -> bool:
    return record[0] < program.data.epochs and record[1] < program.data.records


def is_bare_proof(verdict: Verdict) -> bool:
    """Whether the audit says PROVEN, of all records and without a reserve."""
    return verdict.outcome is Outcome.PROVEN


def check_verdict(program: Program, reference: Reference, folder: Path, *, ended: bool) -> Judged:
    """The audit does not prove what the model shows to be wrong. Returns what both say.

    One that has not `ended`, but with an error, may lack steps of optimizers that nobody attached.
    """
    (verdict,) = audit([folder], unfinished=True)
    judged = Judged(_learnt_once(program, reference, verdict), verdict)
    if not is_bare_proof(verdict):
        return judged
    if reference.is_broken:
        raise BrokenPromise("proven though broken", "a step was on a part of a gradient")
    said = verdict.several or verdict.partly or verdict.rests_on.get("skipped")  # in the first line
    if said or not ((program.steps_on_all and ended) or len(program.attached) == len(program.optimizers)):
        return judged
    bad = reference.bad() + unreadable(program)
    # A plain loader shows no gradients: what is in quarantine by the loop's word stands in the first line.
    by_word = reference.bad() if program.loader.plain else Counter()
    for head, learnt in enumerate(reference.learnt):
        if twice := [record for record, times in learnt.items() if times > 1 and not by_word[record]]:
            raise BrokenPromise("proven though doubled", f"optimizer {head} learnt twice {sorted(twice)}")
        if verdict.dropped:
            continue
        required = {(e, n) for e in range(program.data.epochs) for n in range(program.data.records)}
        if never := required - set(learnt) - set(bad):
            raise BrokenPromise("proven though lost", f"optimizer {head} never learnt {sorted(never)}")
    return judged


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished job: whether each optimizer learnt each record once, by the loop's count; the verdict."""

    exact: bool
    verdict: Verdict


def _learnt_once(program: Program, reference: Reference, verdict: Verdict) -> bool:
    bad = reference.bad() + unreadable(program)
    required = program.data.epochs * program.data.records - len(bad) - verdict.dropped
    return not reference.is_broken and all(
        max(learnt.values(), default=1) == 1 and len(learnt) == required and not learnt.keys() & bad.keys()
        for learnt in reference.learnt
    )
