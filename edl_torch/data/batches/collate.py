"""Puts a ticket beside each batch while it travels from where it is collated to the training loop.

The envelope carries any batch type unchanged; it never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from edl_torch.data.batches.transport import packed, unpacked
from edl_torch.data.reading.sample_reading import ReadingTimes, Times
from edl_torch.data.reading.seeding import Generators
from edl_torch.errors import AccountingError
from edl_torch.trainer.vocabulary import Tally, Ticket


@dataclass(slots=True)
class Envelope:
    """A user's batch, the positions that it holds, how many these are, and how long reading took if timed."""

    batch: Any
    ticket: Ticket
    size: int
    times: Times | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (packed(self.batch), self.ticket, self.size, self.times)

    def pin_memory(self, device: Any = None) -> Envelope:
        """What torch's pinning thread calls: the batch is pinned as torch would, the ticket kept."""
        self.batch = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]
        return self


def _opened(message: bytes, ticket: Ticket, size: int, times: Times | None) -> Envelope:
    return Envelope(unpacked(message), ticket, size, times)


@dataclass(slots=True)
class Collated:
    """A batch of `size` samples that was collated where they were read."""

    batch: Any
    size: int


class TicketedCollate:
    """The user's `collate_fn` with the count of drawn positions, and `times`, taken *before* it is called.

    `batched` says that it is called with a list of samples, whose number must agree with the count. The
    `generators` of random numbers that were lent to the records are put back first.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        tally: Tally,
        times: ReadingTimes,
        generators: Generators,
        *,
        batched: bool,
    ) -> None:
        self._collate = collate
        self._tally = tally
        self._times = times
        self._generators = generators
        self._batched = batched

    def __call__(self, samples: Any) -> Envelope:
        if self._generators.lent is not None:  # a call less for each batch
            self._generators.put_back()
        ticket, size = self._tally.take()
        times = self._times.take() if self._times.timing else None
        made = type(samples) is Collated
        count = samples.size if made else len(samples) if self._batched else size
        if size != count:
            raise AccountingError(
                f"a batch of {count} samples was drawn from {size} positions: "
                f"something between ShardedDataset and the loader adds or drops samples; do it in "
                f"`transform` or `collate_fn` instead"
            )
        return Envelope(samples.batch if made else self._collate(samples), ticket, size, times)
