"""Masters of which none outlives the test, however that ends, and trainers that do not wait long for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from master_kit import MakeMaster, MasterProcess

from edl_torch.trainer import leasing


@pytest.fixture
def quick_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that waits asks its master again and again, and not once a second."""
    monkeypatch.setattr(leasing, "POLL_S", 0.02)


@pytest.fixture
def make_master(tmp_path: Path) -> Iterator[MakeMaster]:
    """Makes masters with arguments of `edl-torch master`, not started; `durable=True` gives one a journal."""
    masters: list[MasterProcess] = []

    def make(*arguments: str, durable: bool = False) -> MasterProcess:
        state = tmp_path / f"state-{len(masters)}" if durable else None
        masters.append(MasterProcess(tmp_path, *arguments, state=state))
        return masters[-1]

    yield make
    for master in masters:
        master.close()


@pytest.fixture
def start_master(make_master: MakeMaster) -> MakeMaster:
    """Makes masters that serve."""

    def start(*arguments: str, durable: bool = False) -> MasterProcess:
        master = make_master(*arguments, durable=durable)
        master.start()
        return master

    return start
