"""When a source cannot be reached no record is to blame: the loop ends, and nothing goes to quarantine."""

from __future__ import annotations

import errno
import socket
import urllib.error
from typing import Any

import pytest
from loader_kit import (
    SOURCE_STEP,
    UNEVEN,
    LookingColumnReader,
    NumberReader,
    PickingReader,
    acknowledged,
    all_records,
    elastic,
    flat,
    once,
    run_through,
    take,
    trainer,
)

from edl_torch.errors import (
    BadRecord,
    DataFormatError,
    EdlError,
    InvalidArgument,
    ReaderError,
    ReaderUnavailable,
    SourceChanged,
    SourceUnavailable,
)
from edl_torch.readers.base import name_record
from edl_torch.testing import FakeMaster

QUARANTINE = {"on_bad_record": "quarantine"}


class Remote(NumberReader):
    """Its network goes down before record 1002, and one record is damaged."""

    def __init__(self) -> None:
        super().__init__(UNEVEN)
        self.down = True

    def number(self, name: str, index: int) -> int:
        number = super().number(name, index)
        if number == 3:
            raise ValueError("a damaged record")
        if self.down and number >= SOURCE_STEP + 2:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return number


class RemotePicking(Remote, PickingReader):
    """With random access."""


class RemoteColumns(Remote, LookingColumnReader):
    """With columnar reads."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("reader", "shuffle", "loader_arguments"),
    [
        (Remote, False, {}),
        (Remote, True, {}),
        (RemotePicking, True, {}),
        (RemoteColumns, False, {"batch_size": None}),
    ],
    ids=["stored", "permuted", "picked", "columns"],
)
def test_an_outage_burns_no_record_and_the_next_pass_reads_what_is_left(
    reader: Any, shuffle: bool, loader_arguments: Any, num_workers: int
) -> None:
    fake = FakeMaster()
    source = reader()
    with trainer(fake, source, dataset={**QUARANTINE, "shuffle": shuffle}, max_bad_records=1) as (
        service,
        dataset,
    ):
        loader = elastic(dataset, num_workers=num_workers, **loader_arguments)
        seen: list[list[int]] = []
        with pytest.raises(
            SourceUnavailable, match=r"record \d+ of '[bc]': ConnectionResetError: .*not to blame"
        ):
            run_through(loader, seen)
        assert set(acknowledged(fake, service)) <= set(once(flat(seen)))
        told = service.progress()
        assert {record.index for record in told.quarantine} <= {3}
        assert not told.failure
        source.down = False
        done = [number for _, number in acknowledged(fake, service)]
        rest = flat(take(iter(elastic(dataset, num_workers=num_workers, **loader_arguments)), 100))
        assert sorted(done + rest) == [number for number in all_records() if number != 3]
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_a_shard_that_is_read_whole_is_not_read_on_while_its_source_is_away() -> None:
    asked: list[tuple[str, int]] = []

    class Noting(Remote):
        def number(self, name: str, index: int) -> int:
            asked.append((name, index))
            return super().number(name, index)

    arguments = {"dataset": {**QUARANTINE, "shuffle": True}, "max_bad_records": 1}
    with (
        trainer(FakeMaster(), Noting(), **arguments) as (_, dataset),
        pytest.raises(SourceUnavailable),
    ):
        take(iter(elastic(dataset)), 100)
    assert asked[-1] == ("b", 2)
    assert asked.count(("b", 2)) == 1


def raised_from(error: Exception, cause: Exception | None) -> Exception:
    """`error` as a driver raises it, that wraps what the system says in an error of its own."""
    try:
        try:
            if cause is not None:
                raise cause
        finally:
            raise error
    except Exception as exc:  # noqa: BLE001  any
        return exc


class DriverError(Exception):
    """A storage driver's own, of no tree that we know."""


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (TimeoutError("timed out"), SourceUnavailable),
        (OSError(errno.EHOSTUNREACH, "No route to host"), SourceUnavailable),
        (OSError(errno.ESTALE, "Stale file handle"), SourceUnavailable),
        (OSError(errno.EMFILE, "Too many open files"), SourceUnavailable),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), SourceUnavailable),
        (raised_from(DriverError("could not connect"), REFUSED), SourceUnavailable),
        (raised_from(urllib.error.URLError("refused"), REFUSED), SourceUnavailable),
        (
            raised_from(BadRecord("image 'a.jpg' cannot be read"), OSError(errno.EIO, "")),
            SourceUnavailable,
        ),
        (ReaderError("reading rows 3 to 7 of p.t failed after 8 retries"), SourceUnavailable),
        (InvalidArgument("p.t has no column 'x'"), SourceUnavailable),
        (SourceChanged("the table p.t was written to"), SourceChanged),
        (ReaderUnavailable("reader 'parquet' needs pyarrow"), ReaderUnavailable),
        (BadRecord("image 'a.jpg' is empty"), BadRecord),
        (raised_from(BadRecord("'a.mp4' took too long"), TimeoutError("10 s")), BadRecord),
        (raised_from(BadRecord("image 'a.jpg' is missing"), FileNotFoundError(2, "No such file")), BadRecord),
        (DataFormatError("chunk 3 is damaged"), BadRecord),
        (BrokenPipeError(errno.EPIPE, "the decoder hung up"), BadRecord),
        (PermissionError(errno.EACCES, "Permission denied"), BadRecord),
        (ValueError("no number"), BadRecord),
        (OSError("no byte"), BadRecord),
    ],
    ids=lambda value: "" if isinstance(value, type) else f"{type(value).__name__}-{value}"[:40],
)
def test_who_is_to_blame(error: Exception, named: type[EdlError]) -> None:
    found = name_record(error, "a", 7)
    assert type(found) is named
    assert str(found).startswith("record 7 of 'a': ")
    assert str(error) in str(found)
    assert found.__cause__ is error
