"""What an `ElasticDataLoader` tells its dataset of the iteration to come; pickled with it to loader workers.

It reads nothing itself.
"""

from __future__ import annotations

from edl_torch.data.reading.reading_times import ReadingTimes
from edl_torch.data.reading.seeding import Generators
from edl_torch.data.reading.threaded_reading import Threading
from edl_torch.trainer.vocabulary import Tally


class IterationSetup:
    """How an iteration yields samples, and what counts them.

    The iteration yields lists of `list_size` samples, by several threads where `threading` says so; samples
    one by one where `list_size` is 0. Where it `collates`, it may yield what `to_batch` makes of a list.
    """

    __slots__ = ("collates", "columnar", "generators", "list_size", "tally", "threading", "times")

    def __init__(
        self, *, columnar: bool, list_size: int, collates: bool = False, threading: Threading | None = None
    ) -> None:
        self.columnar = columnar
        self.list_size = list_size
        self.collates = collates
        self.threading = threading
        self.generators = Generators(after_each=False)
        self.tally = Tally()
        self.times = ReadingTimes()
