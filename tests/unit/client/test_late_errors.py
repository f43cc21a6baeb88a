"""A service whose reports are not taken closes all the same, and its threads end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from edl_torch import DataShardService
from edl_torch.errors import EdlError
from edl_torch.testing import FakeMaster, wait_until


def another_lineage(fake: FakeMaster) -> None:
    """Somebody went back to a checkpoint: every report of this trainer is refused."""
    fake.go_back("training", None)


def nobody_there(fake: FakeMaster) -> None:
    fake.faults.master_away()


def report_in_vain(
    service: DataShardService, fake: FakeMaster, in_process: bool, what_happens: Callable[[FakeMaster], None]
) -> None:
    """Train on a batch, and have its report come to nothing; a remote trainer has leases ahead then."""
    assert service.fetch_shard() is not None
    if not in_process:
        wait_until(lambda: service.record_count > 4, what="a lease was fetched ahead")
    what_happens(fake)
    with suppress(EdlError):
        service.report_batch_done()
    if not in_process:
        outbox = service.session.trainer.state.outbox
        wait_until(lambda: outbox.error is not None, what="the report was refused")


@pytest.mark.parametrize("what_happens", [another_lineage, nobody_there])
@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_service_whose_reports_are_not_taken_closes_all_the_same(
    own_threads: Callable[[], list[threading.Thread]],
    in_process: bool,
    what_happens: Callable[[FakeMaster], None],
) -> None:
    fake = FakeMaster()
    service = DataShardService(
        4, fake.connect(in_process=in_process), dataset_size=64, records_per_shard=4, num_epochs=2
    )
    report_in_vain(service, fake, in_process, what_happens)
    service.close()
    wait_until(lambda: not own_threads())
