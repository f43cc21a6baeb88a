"""Tools for testing readers and training loops: a fake master, a fake clock, faults, `check_reader`.

Public, and without torch: nothing here is needed to run a job.
"""

from __future__ import annotations

from edl_torch.testing.check_reader import check_reader
from edl_torch.testing.fake_master import (
    FakeClock,
    FakeConnection,
    FakeMaster,
    Fault,
    Faults,
    Outcomes,
    wait_until,
)
from edl_torch.testing.peers import ThreadPeers

__all__ = [
    "FakeClock",
    "FakeConnection",
    "FakeMaster",
    "Fault",
    "Faults",
    "Outcomes",
    "ThreadPeers",
    "check_reader",
    "wait_until",
]
