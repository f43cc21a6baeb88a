"""What became of an earlier report comes up late: at the end of a pass, of a session, or before a restore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from edl_torch import DataShardService
from edl_torch.client.handle import DirectLink
from edl_torch.client.leases import Mode
from edl_torch.errors import EdlError, MasterUnavailable, StaleLease
from edl_torch.testing import FakeMaster, wait_until


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("edl-")]


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
        wait_until(lambda: service.session._reporter._error is not None, what="the report was refused")


@pytest.mark.parametrize("what_happens", [another_lineage, nobody_there])
@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_service_whose_reports_are_not_taken_closes_all_the_same(
    in_process: bool, what_happens: Callable[[FakeMaster], None]
) -> None:
    fake = FakeMaster()
    service = DataShardService(
        4, fake.connect(in_process=in_process), dataset_size=64, records_per_shard=4, num_epochs=2
    )
    report_in_vain(service, fake, in_process, what_happens)
    service.close()
    wait_until(lambda: not own_threads())


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster()


@pytest.fixture
def remote(fake: FakeMaster) -> Iterator[DataShardService]:
    with DataShardService(4, fake.connect(in_process=False), dataset_size=64, records_per_shard=4) as service:
        yield service


def test_a_batch_in_hand_goes_back_though_the_end_of_its_pass_meets_an_error(
    fake: FakeMaster, remote: DataShardService
) -> None:
    """Else the next pass would take it for trained on."""
    session = remote.session
    number = session.elastic.open()
    assert session.elastic.more_to_read()
    link = DirectLink(session)
    link.begin(Mode.ELASTIC)
    for _ in range(2):
        grant = link.next()
        assert grant is not None
        session.elastic.batch_requested()
        assert session.elastic.hand(((grant.task, grant.slice.skip, grant.slice.stop),))
    wait_until(lambda: remote.record_count > 4, what="a lease was fetched ahead")
    session._reporter._error = MasterUnavailable("as it was a while ago")
    with pytest.raises(MasterUnavailable):
        session.elastic.close(number)
    session.elastic.close(session.elastic.open())
    session.flush()
    assert fake.dataset_status("training").acknowledged == 4, "the batch before the one in hand"


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_trainer_whose_reports_are_of_another_lineage_may_not_go_back_to_a_token_but_a_new_one_may(
    fake: FakeMaster, in_process: bool
) -> None:
    def service_of() -> DataShardService:
        return DataShardService(4, fake.connect(in_process=in_process), dataset_size=64, records_per_shard=4)

    with service_of() as superseded:
        token = superseded.state_dict()
        report_in_vain(superseded, fake, in_process, another_lineage)
        with pytest.raises(StaleLease, match="lineage 2; the call is of lineage 1"):
            superseded.load_state_dict(token)
    with service_of() as service:
        service.load_state_dict(token)
        seen = 0
        while (shard := service.fetch_shard()) is not None:
            seen += shard.end - shard.start
            service.report_batch_done()
        assert seen == 64
        assert service.finished
