"""Any map-style dataset as a reader: an object with `__len__` and `__getitem__`.

It must not import torch: a `torch.utils.data.Dataset` is used through these methods alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice, repeat
from numbers import Number
from types import MethodType
from typing import Any

import numpy as np

from edl_torch.errors import InvalidArgument, ReaderError, SourceChanged
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.base import IndexedReader
from edl_torch.readers.shared.dataset_looks import fingerprint_of
from edl_torch.readers.shared.files import FileStamp
from edl_torch.readers.shared.looks import parents_of
from edl_torch.system.termination import is_of_a_handler

_READ_AHEAD = 32  # records: what one call of __getitems__ may hold in memory
_MOST_INSIDE, _MOST_MET = 256, 4096  # parts of a list, and objects, in which mapped arrays are looked for


class MapDatasetReader(IndexedReader):
    """Records `dataset[0] … dataset[len(dataset) - 1]`, as they are.

    A dataset with `__getitems__` (a list of numbers to a list of records) is read 32 records a call, but for
    threads (`num_threads`) that may each read a record. The dataset travels to loader workers as a plain
    DataLoader would send it.

    Args:
        dataset: The dataset; its length is taken once, here.
        name: The source's name; default the name of the dataset's class.
        thread_safe: Whether several threads of a loader (`num_threads`) may call `dataset[…]` at once. Else
            one thread reads at a time, and only `transform` runs in several.
        fingerprint: What tells this data from other data, such as a version. Default: what the dataset
            holds, as far as that is tensors, arrays, lists or tables; see docs/readers.md.

    Raises InvalidArgument for an object that is not map-style.
    """

    looks_again = True

    def __init__(
        self,
        dataset: Any,
        name: str | None = None,
        *,
        thread_safe: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(type(dataset).__name__ if name is None else name)
        if (
            isinstance(dataset, Mapping)
            or not isinstance(dataset, Sized)
            or not hasattr(dataset, "__getitem__")
        ):
            raise InvalidArgument(
                f"{type(dataset).__name__} is no map-style dataset: it needs __len__ and __getitem__ "
                "by number; for other data write a reader (AbstractDataReader)"
            )
        try:
            count = len(dataset)
        except (TypeError, ValueError) as exc:
            raise InvalidArgument(
                f"{type(dataset).__name__} is no map-style dataset: it has no number of records, "
                f"as len() says: {exc}"
            ) from exc
        self.dataset: Any = dataset
        self.thread_safe = thread_safe
        self.count = count
        self._mapped = _mapped_files(dataset)
        self._given = None if fingerprint is None else Fingerprint.given(fingerprint)

    @property
    def targets(self) -> Any:
        """The dataset's `targets`, the class of each record, where it has them, as torchvision's have."""
        return getattr(self.dataset, "targets", None)

    def fingerprint(self, *, whole: bool = False) -> Fingerprint | None:
        """What was given, else of what the dataset holds; None where that tells nothing. Its records may
        differ each time: there is no whole to look at."""
        return self._given or fingerprint_of(self.dataset)

    def check_unchanged(self) -> None:
        """Raise SourceChanged where the dataset has fewer records than when this reader was made."""
        if (now := len(self.dataset)) < self.count:
            raise SourceChanged(
                f"{self.name} had {self.count:,} records when the job began, and has {now:,} now: data must "
                f"stay as it is while a job uses it; start the job again"
            )

    def load(self, index: int) -> Any:
        """`dataset[index]`. Raises SourceChanged where an array is mapped from a file that was written to."""
        record = self.dataset[index]
        self._check_mapped()
        return record

    def _check_mapped(self) -> None:
        for stamp in self._mapped:
            stamp.check_content()

    @property
    def load_alone(self) -> Callable[[int], Any] | None:
        """As a reader's, where the dataset has no `__getitems__`."""
        if hasattr(self.dataset, "__getitems__"):
            return None
        return self.load if self._mapped else self.dataset.__getitem__  # no Python runs but the dataset's

    def load_each(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield `dataset[index]` for each of `indices`; see the class."""
        read = self.load_alone
        if read is None:
            return chain.from_iterable(self._read_ahead(indices))
        if isinstance(read, MethodType):  # a method of Python's is a function with a detour
            return map(read.__func__, repeat(read.__self__), indices)
        return map(read, indices)

    def _read_ahead(self, indices: Sequence[int]) -> Iterator[Iterable[Any]]:
        """Yield the records of each call. To yield every record by itself would run Python for it."""
        for first in range(0, len(indices), _READ_AHEAD):
            numbers = list(indices[first : first + _READ_AHEAD])
            try:
                records = self.dataset.__getitems__(numbers.copy())  # it may do with its list what it likes
            except Exception as exc:  # it does not say which record is bad: reading one by one does
                if is_of_a_handler(exc):
                    raise
                yield map(self.load, numbers)
                continue
            if isinstance(records, Mapping):
                raise ReaderError(
                    f"{self.name}.__getitems__ gave a {type(records).__name__} of {len(records)} columns, "
                    f"and not a list of one record for each number; without __getitems__ records are read "
                    f"one by one"
                )
            if len(records) != len(numbers):
                raise ReaderError(
                    f"{self.name}.__getitems__ gave {len(records)} records for {len(numbers)} numbers"
                )
            self._check_mapped()
            yield records


def _mapped_files(dataset: Any) -> list[FileStamp]:
    """Return the files that arrays of a dataset are mapped from (`np.load(mmap_mode="r")`), as they are, in
    datasets inside of it too. An array that is a part of a mapped one, as `np.asarray` gives, is mapped."""
    files: dict[str, None] = {}
    ahead, met = [dataset], set[int]()
    while ahead and len(met) < _MOST_MET:
        value = ahead.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if base := next((kind for kind in (list, tuple) if isinstance(value, kind)), None):
            each = islice(base.__iter__(value), _MOST_INSIDE)  # without the code of a class of the user's
            ahead += [one for one in each if not issubclass(type(one), str | Number)]
        elif isinstance(value, dict):
            ahead += islice(value.values(), _MOST_INSIDE)
        elif isinstance(value, np.ndarray):
            for one in parents_of(value):
                if isinstance(one, np.memmap) and one.mode in ("r", "c") and one.filename:
                    files[os.fspath(one.filename)] = None
        elif issubclass(type(value), Sized) and not isinstance(value, type):  # it may not answer to __class__
            ahead += getattr(value, "__dict__", {}).values()
    return [FileStamp.of(file) for file in files if os.path.isfile(file)]
