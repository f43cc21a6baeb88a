"""Which other sessions of the process may hold what one waits for."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

from edl_torch import ElasticDataLoader
from edl_torch.client.session import _sessions
from edl_torch.testing import FakeMaster
from edl_torch.trainer.vocabulary import SiblingSession


def loader(fake: FakeMaster, name: str = "training") -> ElasticDataLoader:
    client = fake.connect()
    return ElasticDataLoader(range(12), 2, records_per_shard=4, dataset_name=name, master_client=client)


def seen_by(one: ElasticDataLoader) -> tuple[SiblingSession, ...]:
    return one.service.session.siblings()


def test_a_neighbour_has_the_records_that_its_loop_has_begun_to_read() -> None:
    fake = FakeMaster()
    with loader(fake) as one, loader(fake) as two:
        assert len(one) == len(two) == 6  # both take part
        assert seen_by(one) == ()
        batches = iter(two)
        next(batches)
        ((sibling),) = seen_by(one)
        assert sibling.session == two.service.session.id
        assert (sibling.records, sibling.same_thread) == (two.service.record_count, True)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(next, batches).result()
        assert [(found.records, found.same_thread) for found in seen_by(one)] == [
            (two.service.record_count, False)
        ]
        assert seen_by(two) == ()


def test_a_loop_that_was_left_and_a_service_that_is_closed_hold_nothing() -> None:
    fake = FakeMaster()
    with loader(fake) as one, loader(fake) as left, loader(fake) as closed:
        assert len(one) == 6
        for _ in left:
            break
        batches = iter(closed)
        next(batches)
        closed.service.close()
        assert seen_by(one) == ()


def test_who_reads_other_data_or_of_another_master_is_no_neighbour() -> None:
    fake = FakeMaster()
    with (
        loader(fake) as one,
        loader(fake, "validation") as other,
        ElasticDataLoader(range(12), 2) as elsewhere,
    ):
        assert len(one) == 6
        batches = iter(other), iter(elsewhere)
        for iterator in batches:
            next(iterator)
        assert len(seen_by(one)) == 0


def test_sessions_that_are_gone_are_forgotten() -> None:
    made = loader(FakeMaster())
    session = made.service.session
    noted = weakref.ref(session, _sessions._references.discard)
    assert noted in _sessions._references
    alive = [reference for reference in _sessions._references if reference() is session]
    made.close()
    del made, session
    gc.collect()
    assert noted() is None
    assert not _sessions._references & set(alive)
