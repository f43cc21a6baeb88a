"""Words for what a verdict rests on, and for what keeps it from being exact: of the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edl_torch.audit.verdict import Outcome, Verdict
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


def worst(verdicts: Sequence[Verdict]) -> Outcome:
    """What several verdicts come to."""
    found = {verdict.outcome for verdict in verdicts}
    return next(outcome for outcome in _WORST_FIRST if outcome in found)


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
