"""What a fake master remembers of the reports that it was sent."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from edl_torch.core.calls import (
    UNREGISTERED,
    Acknowledgement,
    Failure,
    Grant,
    LeaseAnswer,
    PassState,
    ReportAnswer,
    ReportCall,
)
from edl_torch.core.plan import Plan
from edl_torch.shard import DatasetSpec, Slice, Source
from edl_torch.testing import Outcomes

SPEC = DatasetSpec(name="training", sources=(Source(name="a", count=8),), records_per_shard=4)


def outcomes() -> Outcomes:
    """Of a trainer that holds both shards."""
    new = Outcomes(Plan(SPEC))
    grants = [Grant(task=n, attempt=1, slice=Slice(epoch=0, shard=n, skip=0, limit=4)) for n in (0, 1)]
    new.granted(LeaseAnswer(request=1, epoch=0, state=PassState.OPEN, grants=tuple(grants)))
    return new


def report() -> ReportCall:
    """Record 1 is bad, record 6 too, and all others up to it were trained on."""
    return ReportCall(
        session="s",
        dataset="training",
        fence=UNREGISTERED,
        request=1,
        failures=tuple(Failure(task=n, attempt=1, position=p, reason="bad") for n, p in ((0, 1), (1, 2))),
        acknowledgements=tuple(Acknowledgement(task=n, attempt=1, upto=4 - n) for n in (0, 1)),
    )


def interrupted_at(line: int, told: Outcomes) -> bool:
    """Take in a report, with KeyboardInterrupt before the line of that number. Returns whether it came."""
    passed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if frame.f_code.co_filename != sys.modules[Outcomes.__module__].__file__:
            return None
        if event == "line":
            passed += 1
            if passed == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        told.reported(report(), ReportAnswer(request=1))
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_report_that_was_interrupted_anywhere_and_comes_again_counts_once() -> None:
    line = 1
    while interrupted_at(line, told := outcomes()):
        told.reported(report(), ReportAnswer(request=1))
        assert told.quarantined == Counter({(0, "a", 1): 1, (0, "a", 6): 1}), line
        assert told.acknowledged == Counter({(0, "a", n): 1 for n in (0, 2, 3, 4, 5)}), line
        line += 1
    assert line > 20
