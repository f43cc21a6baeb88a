"""A decision that a signal's handler cuts off, of a trainer or an embedded master."""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster
from edl_torch.errors import BadRecord, ServiceClosed, StaleLease, UnknownDataset
from edl_torch.system.termination import is_own

RECORDS = 8

Decide = Callable[[Callable[[], object]], object]


def of_a_trainer() -> tuple[Decide, Callable[[], object]]:
    service = DataShardService(batch_size=1, dataset_size=1, master_client=LocalMaster())
    return service.session.do, service.state_dict


def of_an_embedded_master() -> tuple[Decide, Callable[[], object]]:
    master = LocalMaster()

    def decide(change: Callable[[], object]) -> object:
        return master.apply(lambda dispatcher, now: change())

    return decide, master.status


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object], number: int) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def times_out(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def finds_an_error_of_ours(number: int, frame: FrameType | None) -> None:
    raise StaleLease("as of another loader")


of_each = pytest.mark.parametrize("made", [of_a_trainer, of_an_embedded_master])


@of_each
@pytest.mark.parametrize("handler", [signal.default_int_handler, times_out, finds_an_error_of_ours])
def test_nothing_goes_on_from_a_decision_that_a_handler_has_cut_off(
    handler: Any, made: Callable[[], tuple[Decide, Callable[[], object]]]
) -> None:
    decide, ask = made()
    errors = KeyboardInterrupt, TimeoutError, StaleLease
    with handled_by(handler, signal.SIGALRM), pytest.raises(errors):
        decide(lambda: signal.raise_signal(signal.SIGALRM))
    for _ in range(2):
        with pytest.raises(ServiceClosed, match="was cut off in its middle, by Ctrl-C or by what"):
            ask()


@of_each
@pytest.mark.parametrize("caught", [True, False])
def test_a_handler_that_asks_in_the_middle_of_a_decision_is_refused(
    caught: bool, made: Callable[[], tuple[Decide, Callable[[], object]]]
) -> None:
    """As one that takes a token. The decision goes on where the handler lets it."""
    decide, ask = made()

    def asks(number: int, frame: FrameType | None) -> None:
        try:
            ask()
        except ServiceClosed:
            if not caught:
                raise
        else:
            pytest.fail("it was answered")

    with handled_by(asks, signal.SIGALRM):
        if caught:
            decide(lambda: signal.raise_signal(signal.SIGALRM))
            ask()
        else:
            with pytest.raises(ServiceClosed):
                decide(lambda: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(ServiceClosed, match="was cut off"):
                ask()


def test_an_error_that_a_decision_raises_by_itself_cuts_nothing_off() -> None:
    master = LocalMaster()
    for _ in range(2):
        with pytest.raises(UnknownDataset) as raised:
            master.dataset_status("unknown")
    assert not is_own(raised.value), "this test's frame is among them"
    raised.value.__traceback__ = raised.tb.tb_next
    assert is_own(raised.value)
    assert not is_own(KeyboardInterrupt())


# What a program sees of it --------------------------------------------------------------------------------


def made_loader() -> ElasticDataLoader:
    return ElasticDataLoader(range(RECORDS), batch_size=1, master_client=LocalMaster(), num_epochs=4)


def interrupt_once_in(loader: ElasticDataLoader) -> None:
    for _ in loader:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_the_programs_handler_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with made_loader() as loader:
        for _ in loader:
            assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
def test_ctrl_c_in_a_loops_body_comes_at_once_and_no_frame_of_ours_ends_its_traceback() -> None:
    with made_loader() as loader:
        with pytest.raises(KeyboardInterrupt) as raised:
            interrupt_once_in(loader)
        frames = traceback.extract_tb(raised.value.__traceback__)
        assert [frame.name for frame in frames][1:] == ["interrupt_once_in"]
        assert len(list(loader)) == RECORDS


def test_asyncio_cancels_its_task_by_ctrl_c_in_the_body_of_a_loop() -> None:
    async def cancelled() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(10)

    with made_loader() as loader:
        for _ in loader:
            with pytest.raises(KeyboardInterrupt) as raised:
                asyncio.run(cancelled())
            assert isinstance(raised.value.__context__, asyncio.CancelledError)


class Rung:
    """A dataset in which a signal comes, in the middle of a record that is good."""

    def __init__(self, error: type[Exception]) -> None:
        self.due = [6]

        def handle(number: int, frame: FrameType | None) -> None:
            _fail_by(error)

        self.handle = handle

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> int:
        if self.due and index == self.due[0]:
            self.due.clear()
            with handled_by(self.handle, signal.SIGALRM):
                try:
                    signal.raise_signal(signal.SIGALRM)
                except TimeoutError as exc:
                    raise OSError("the driver's own word for it") from exc
        return index


def _fail_by(error: type[Exception]) -> None:
    raise error("too late")


class RungInMany(Rung):
    """Which reads several at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Rung, RungInMany])
@pytest.mark.parametrize(("error", "seen"), [(ValueError, ValueError), (TimeoutError, OSError)])
def test_a_record_is_not_to_blame_for_what_a_handler_raises_while_it_is_read(
    kind: type[Rung], error: type[Exception], seen: type[Exception]
) -> None:
    rung = kind(error)
    with ElasticDataLoader(rung, batch_size=2, on_bad_record="quarantine", max_bad_records=3) as loader:
        with handled_by(rung.handle, signal.SIGALRM):
            got, raised = [], None
            try:
                for batch in loader:
                    got += batch.tolist()
            except seen as exc:
                raised = exc
        assert type(raised) is seen
        assert not loader.quarantined()
        got += [n for batch in loader for n in batch.tolist()]
    assert sorted(set(got)) == [*range(RECORDS)]


def test_a_record_whose_reader_says_that_it_took_too_long_is_bad() -> None:
    class Judged(Rung):
        def __getitem__(self, index: int) -> int:
            try:
                return super().__getitem__(index)
            except ValueError as exc:
                raise BadRecord("it took too long") from exc

    judged = Judged(ValueError)
    options: dict[str, Any] = {"on_bad_record": "quarantine", "max_bad_records": 3}
    with ElasticDataLoader(judged, batch_size=2, **options) as loader:
        with handled_by(judged.handle, signal.SIGALRM):
            got = [n for batch in loader for n in batch.tolist()]
        assert [bad.index for bad in loader.quarantined()] == [6]
    assert len(got) == RECORDS - 1
