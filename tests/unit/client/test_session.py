"""What a session tells its trainer of iterations over plain DataLoaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edl_torch import DataShardService
from edl_torch.client.iterations import NoIterations
from edl_torch.client.session import Session
from edl_torch.testing import FakeMaster
from edl_torch.trainer.plain import NO_PASS, OWN_STREAM
from edl_torch.trainer.supply import Mode


@pytest.fixture
def session() -> Iterator[Session]:
    with DataShardService(4, FakeMaster(grace_s=1.0), dataset_size=64, records_per_shard=8) as service:
        yield service.session


def begin(session: Session, stream: str, run: str = "") -> int:
    return session.begin_stream(stream, Mode.PLAIN, run)[0]


class Numbered(NoIterations):
    """Iterations of this process: run "i7" is number 7."""

    newest = 9
    over: frozenset[str] = frozenset()

    def number(self, run: str) -> int:
        return int(run[1:]) if run.startswith("i") else 0

    def is_over(self, run: str) -> bool:
        return run in self.over


def test_workers_of_an_older_iteration_get_nothing_though_none_of_them_began_before(session: Session) -> None:
    session.watch(Numbered())
    number = begin(session, "worker 0", "i7 1")
    assert begin(session, "worker 0", "i6 1") == NO_PASS
    assert begin(session, "worker 1", "i7 1") == number
    assert begin(session, "worker 0", "i6 2") > number  # persistent ones begin again
    own = begin(session, OWN_STREAM)
    assert begin(session, "worker 0", "i9 1") == NO_PASS
    assert begin(session, "worker 0", "i10 1") > own


def test_workers_of_an_iteration_that_is_gone_get_nothing(session: Session) -> None:
    iterations = Numbered()
    session.watch(iterations)
    iterations.over = frozenset({"i7"})
    assert begin(session, "worker 0", "i7 1") == NO_PASS
