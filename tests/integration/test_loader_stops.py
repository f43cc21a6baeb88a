"""A loop that stops after any batch has acknowledged exactly the records that it finished with."""

from __future__ import annotations

from typing import Any

import pytest
from loader_kit import (
    UNEVEN,
    acknowledged,
    all_records,
    elastic,
    flat,
    numbers,
    once,
    run_through,
    take,
    trainer,
)

from edl_torch.errors import ServiceClosed
from edl_torch.testing import FakeMaster

WORKERS = [
    pytest.param({}, id="0 workers"),
    pytest.param({"num_workers": 1}, id="1 worker"),
    *(
        pytest.param(
            {"num_workers": 2, "in_order": in_order, "prefetch_factor": prefetch},
            id=f"2-{in_order}-{prefetch}",
        )
        for in_order in (True, False)
        for prefetch in (1, 2, 3, 4)
    ),
]


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("arguments", WORKERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_break_after_k_batches_acknowledges_the_batches_before(
    arguments: dict[str, Any], in_process: bool, shuffle: bool
) -> None:
    fake = FakeMaster()
    extra = {"shuffle": shuffle}
    with trainer(fake, in_process=in_process, shuffle_shards=shuffle, dataset=extra) as (service, dataset):
        loader = elastic(dataset, persistent_workers="num_workers" in arguments, **arguments)
        finished: list[int] = []
        for stop_after in (1, 2, 5, 3):
            seen = []
            for batch in loader:
                seen.append(numbers(batch))
                if len(seen) == stop_after:
                    break
            finished += flat(seen[:-1])
            assert acknowledged(fake, service) == once(finished)
            assert service.record_count == 0
        finished += flat(numbers(batch) for batch in loader)
        assert sorted(finished) == all_records()
        assert acknowledged(fake, service) == once(finished)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def stop_by_break(loader: Any, seen: list[list[int]]) -> None:
    for batch in loader:
        seen.append(numbers(batch))
        if len(seen) == 3:
            break


def stop_by_exception(loader: Any, seen: list[list[int]]) -> None:
    with pytest.raises(ZeroDivisionError):
        run_through(loader, seen, lambda count: 1 / (3 - count))


def stop_by_del(loader: Any, seen: list[list[int]]) -> None:
    iterator = iter(loader)
    seen += take(iterator, 3)
    del iterator


def stop_by_loader_close(loader: Any, seen: list[list[int]]) -> None:
    for batch in loader:
        seen.append(numbers(batch))
        if len(seen) == 3:
            loader.close()


def stop_by_service_close(loader: Any, seen: list[list[int]]) -> None:
    with pytest.raises(ServiceClosed):
        run_through(loader, seen, lambda count: count == 3 and loader.service.close())


STOPS = [stop_by_break, stop_by_exception, stop_by_del, stop_by_loader_close, stop_by_service_close]


def test_a_loop_inside_a_loop_that_are_both_left_give_back_the_batch_in_hand() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        loader = elastic(dataset)
        for _ in loader:
            for batch in loader:  # ends the iteration around it
                left = numbers(batch)
                break
            break  # its iterator goes after the newer one's
        service.state_dict()
        assert not acknowledged(fake, service)
        assert numbers(next(iter(loader))) == left


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
def test_however_a_loop_stops_the_batch_in_hand_goes_back(
    stop: Any, num_workers: int, in_process: bool
) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=in_process) as (service, dataset):
        seen: list[list[int]] = []
        stop(elastic(dataset, num_workers=num_workers), seen)
        assert len(seen) == 3
        assert service.record_count == 0
    with trainer(fake) as (other, dataset):
        assert acknowledged(fake, other) == once(flat(seen[:2]))
        rest = flat(take(iter(elastic(dataset)), 100))
        assert sorted(flat(seen[:2]) + rest) == all_records()
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_reported_batch_is_not_given_back(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        seen = []
        for batch in elastic(dataset, num_workers=num_workers):
            seen.append(numbers(batch))
            if len(seen) == 3:
                service.report_batch_done()
                break
        assert acknowledged(fake, service) == once(flat(seen))


def test_report_tells_whether_it_completed_a_task() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 12}, batch_size=4, records_per_shard=12) as (service, dataset):
        # One trainer: the guided tail lends 4 records at the least, half of what waits at the most.
        completed = [service.report_batch_done() for _ in elastic(dataset)]
        assert sum(completed) == len(fake.outcomes["training"]._slices)  # leases
        assert completed[-1]


def test_a_batch_counted_in_a_token_is_not_given_back() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        seen = []
        for batch in elastic(dataset, num_workers=2):
            seen.append(numbers(batch))
            if len(seen) == 3:
                service.state_dict()
                break
        assert acknowledged(fake, service) == once(flat(seen))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dropped_last_records_have_their_outcome_and_full_batches_only_arrive(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, batch_size=4) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers, drop_last=True)
        first = take(iter(loader), 3)
        batches = take(iter(loader), 100)
        assert all(len(batch) == 4 for batch in first + batches)
        told = acknowledged(fake, service)
        assert told == once(flat(first[:2] + batches))
        progress = service.progress()
        assert progress.dropped == 39 % 4
        assert sum(told.values()) + progress.dropped == 39
        assert service.finished


class SimulatedPinning:
    """What torch's pinning thread does to each item that arrives; here there is no accelerator to pin for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        from torch.utils.data._utils.pin_memory import pin_memory

        return (pin_memory(item) for item in self.inner)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_pinned_loops_stop_exactly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        loader = elastic(dataset, num_workers=2, pin_memory=True)
        unpinned = loader._inner.read
        monkeypatch.setattr(loader._inner, "read", lambda: iter(SimulatedPinning(unpinned())))
        seen = take(iter(loader), 3)
        assert acknowledged(fake, service) == once(flat(seen[:2]))
        rest = take(iter(loader), 100)
        assert sorted(flat(seen[:2] + rest)) == all_records()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restarted_loop_reads_every_record_of_every_epoch_once(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3, shuffle_shards=True) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers, persistent_workers=num_workers > 0)
        epochs = []
        while not service.finished:
            epochs.append(service.epoch)
            flat_records = flat(take(iter(loader), 100))
            assert sorted(flat_records) == all_records()
        assert epochs == [0, 1, 2]
        assert take(iter(loader), 1) == []
    fake.outcomes["training"].check_complete(3)


def test_stopping_at_the_first_batch_and_at_none() -> None:
    fake = FakeMaster()
    with trainer(fake, UNEVEN) as (service, dataset):
        loader = elastic(dataset, num_workers=1)
        iterator = iter(loader)
        del iterator
        assert service.record_count == 0
        assert len(take(iter(loader), 1)) == 1
        assert not acknowledged(fake, service)
