"""Arrays that are kept under a prefix of a store, for all processes and hosts that reach it.

Who makes them says so by a claim, an object beside them that only one of several can create, and writes it
again while it works. Another one waits until the arrays are there, or until the claim has stood unchanged for
so long that its writer must be dead; it compares the claim with itself, so no clocks are compared. A claim
saves work and nothing hangs on it: arrays are created whole, and of two that were made at once all take those
that came first.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from edl_torch.errors import DataFormatError, EdlError, OutputError, SourceChanged
from edl_torch.readers.shared.mapped import Array, MappedArrays, arrays_as_bytes, not_kept
from edl_torch.system.backoff import backoff

if TYPE_CHECKING:
    from edl_torch.readers.storage import Storage

log = logging.getLogger("edl_torch.readers")

_PIECE = 4 << 20  # bytes of a request
_LONGEST_PAUSE_S = 2.0
_WRITTEN_EVERY_S = 5.0
_SAID_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class KeptAway:
    """Arrays in an object of this name; who has not written his claim for so long is dead."""

    name: str
    storage: Storage
    dead_after_s: float = 40.0

    def version(self) -> object:
        """Its tag; where the store has none, a checksum of it."""
        one = self.storage.look(self.name)
        return one and (one.size, one.tag or zlib.crc32(self.storage.read(one)))

    def load(self, header: Mapping[str, Any]) -> MappedArrays | None:
        """Read it to a temporary file. One that cannot be used is none, with a warning."""
        one = self.storage.look(self.name)
        if one is None:
            return None
        wanted = [(one, at, min(_PIECE, one.size - at)) for at in range(0, one.size, _PIECE)]
        try:
            found = MappedArrays.of_bytes(self.storage.read_many(wanted), str(header["kind"]))
        except DataFormatError as exc:
            log.warning("index=%s cannot be used and is built again: %s", self.name, exc)
            return None
        except SourceChanged:  # another one was written meanwhile
            return self.load(header)
        return found if found.header == header else None

    def save(
        self, arrays: Mapping[str, Array], header: Mapping[str, Any], instead_of: object
    ) -> MappedArrays:
        """Create it, or write it over another; one that was created meanwhile is taken instead."""
        data = arrays_as_bytes(arrays, header)
        try:
            if instead_of is not None or not self.storage.put(self.name, data, new=True):
                there = self.load(header) if instead_of is None else None
                if there is not None:
                    return there
                self.storage.put(self.name, data)
        except OutputError as exc:
            return not_kept(arrays, header, self.name, exc)
        return MappedArrays.of_bytes([data], str(header["kind"]))

    @contextmanager
    def alone(self, found: Callable[[], MappedArrays | None]) -> Iterator[MappedArrays | None]:
        """Hold the claim, where the store lets one be written."""
        claim, own = f"{self.name}.claim", uuid4().hex
        try:
            kept = self._claimed(claim, own, found)
        except OutputError as exc:
            log.debug("claim=%s cannot be written: %s", claim, exc)
            yield found()
            return
        if kept is not None:
            yield kept
            return
        ended = threading.Event()
        keeper = threading.Thread(target=self._renew, args=(claim, own, ended), name="edl-claim", daemon=True)
        keeper.start()
        try:
            yield found()
        finally:
            ended.set()
            keeper.join()
            with suppress(EdlError):  # one that stays is taken for a dead process'
                self.storage.remove(claim)

    def _claimed(self, claim: str, own: str, found: Callable[[], MappedArrays | None]) -> MappedArrays | None:
        """Wait until the claim is ours (None), or until what others make is there."""
        pauses, seen, began, told = backoff(longest_s=_LONGEST_PAUSE_S), b"", time.monotonic(), False
        since = began
        while not self.storage.put(claim, own.encode(), new=True):
            there = self._said(claim)
            if there == own.encode():  # an answer was lost, and the request sent again
                return None
            if (kept := found()) is not None:
                return kept
            if there != seen:
                seen, since = there, time.monotonic()
            elif there and time.monotonic() - since > self.dead_after_s:
                log.warning("claim=%s its process is dead: this one does its work", claim)
                self.storage.remove(claim)
            if not told and time.monotonic() - began > _SAID_AFTER_S:
                told = True
                log.warning("index=%s another process makes it: waiting for that one", self.name)
            time.sleep(next(pauses))
        return None

    def _said(self, claim: str) -> bytes:
        one = self.storage.look(claim)
        if one is None:
            return b""
        try:
            return self.storage.read(one)
        except SourceChanged:
            return uuid4().bytes  # it is written at this moment: its process lives

    def _renew(self, claim: str, own: str, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(_WRITTEN_EVERY_S):
            count += 1
            with suppress(EdlError):  # without it others take this process for dead, and work twice
                self.storage.put(claim, f"{own} {count}".encode())
