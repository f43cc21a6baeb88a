"""Readers that go wrong in one way each; in a module of their own, so that other processes find them."""

from __future__ import annotations

import os
import signal
from typing import Any

from edl_torch import AbstractDataReader
from edl_torch.errors import BadRecord, ReaderUnavailable, SourceChanged


class Numbers(AbstractDataReader):
    """Records 0 … count - 1 of the source 'n'."""

    def __init__(self, count: int = 100, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.count, self.bad = count, bad

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"n": self.count}

    def read_records(self, task: Any) -> Any:
        for number in range(task.start, task.end):
            if number in self.bad:
                self.fail(number)
            yield number

    def fail(self, number: int) -> None:
        raise BadRecord(f"{number} is bad")


class Lethal(Numbers):
    """Some records kill the process that reads them, as a decoder with a bug does."""

    def fail(self, number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Forgetful(Numbers):
    """Ends before its bad record."""

    def read_records(self, task: Any) -> Any:
        yield from (n for n in range(task.start, min([task.end, *self.bad])) if n < self.bad[0])


class Homeless(Numbers):
    """Names a package that is not there."""

    def fail(self, number: int) -> None:
        raise ReaderUnavailable("reader 'homeless' needs nothing: pip install nothing")


class Unreachable(Numbers):
    """The server behind it is gone."""

    def fail(self, number: int) -> None:
        raise ConnectionResetError("the server hung up")


class Lost(Numbers):
    """A file behind a record is gone."""

    def fail(self, number: int) -> None:
        raise BadRecord(f"file {number} is missing") from FileNotFoundError(number)


class Stillborn(Numbers):
    """Ends each process that it arrives in."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


class Rooted(Numbers):
    """Cannot travel."""

    def __reduce__(self) -> Any:
        raise TypeError("a lock is in it")


class Slow(Numbers):
    """Takes for ever, and says where it is."""

    def read_records(self, task: Any) -> Any:
        with open(os.environ["SLOW_PIDS"], "a", encoding="ascii") as out:
            out.write(f"{os.getpid()}\n")
        signal.pause()
        yield 0


class Unmade(AbstractDataReader):
    """Wants a parameter that nobody gave."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder = kwargs["data_dir"]

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {}

    def read_records(self, task: Any) -> Any:
        return ()


class Shardless(Numbers):
    """Does not get to its sources."""

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        raise OSError("no disk")


class Rewritten(Numbers):
    """Its data was written to since it was listed; counts how often it was asked."""

    asked = 0

    def fail(self, number: int) -> None:
        type(self).asked += 1
        raise SourceChanged("the file 'n' was written to")
