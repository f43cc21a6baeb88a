"""A Python file that only knows how many records there are; the user reads them by number.

It must not know what the numbers stand for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers.base import AbstractDataReader, check_range, no_source
from edl_torch.shard import Task, TaskType

_SIZE_FUNCTION = {
    TaskType.TRAINING: "get_training_size",
    TaskType.EVALUATION: "get_evaluation_size",
    TaskType.PREDICTION: "get_prediction_size",
}


class PythonCustomReader(AbstractDataReader):
    """Records are the numbers `0 … size - 1`; `get_training_size()` of a Python file tells the size.

    `get_evaluation_size()` and `get_prediction_size()` are its twins for the other modes; `load_get_size_fn`
    names another function. The file runs once, when a size is first needed; known sizes travel with the
    reader's pickle, so that loader workers do not execute it again. Only use files that you trust.

    Args:
        filename: The Python file.
        records_per_task: Cut into the sources `shard_0`, `shard_1`, … of so many records, the last one with
            the rest; by default the file is one source, named by its path.

    Raises DataFormatError for a missing file or function and for a size that is not a positive integer;
    ReaderError, from the original, for an exception in the file.
    """

    def __init__(self, filename: str | os.PathLike[str], records_per_task: int | None = None) -> None:
        super().__init__(filename=filename, records_per_task=records_per_task)
        if records_per_task is not None and (type(records_per_task) is not int or records_per_task < 1):
            raise InvalidArgument(
                f"records_per_task={records_per_task!r}: expected a positive integer or None"
            )
        self.filename = os.fspath(filename)
        self.records_per_task = records_per_task
        self._sizes: dict[str, int] = {}  # by function
        self._chosen: str | None = None
        self._module: ModuleType | None = None
        if not os.path.isfile(self.filename):
            raise DataFormatError(f"the Python file '{self.filename}' does not exist; check the path")

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, tuple[int, int]]:
        """`{name: (start, count)}`, numbered through. Raises as the class says."""
        size = self.size(mode)
        step = self.records_per_task
        if step is None:
            return {self.filename: (0, size)}
        starts = range(0, size, step)
        return {f"shard_{number}": (start, min(step, size - start)) for number, start in enumerate(starts)}

    def load_get_size_fn(self, fn_name: str = "get_training_size") -> None:
        """From now on the file's function `fn_name` tells the size, whatever the mode.

        A reader that is made by every trainer for itself has to be told so in every trainer. Raises as the
        class says.
        """
        self._size_of(fn_name)
        self._chosen = fn_name

    def get_size(self) -> int:
        """`size()`, by ElasticDL's name."""
        return self.size()

    def size(self, mode: TaskType = TaskType.TRAINING) -> int:
        """The number of records for `mode`; each function of the file is asked once."""
        if mode not in _SIZE_FUNCTION:
            raise InvalidArgument(f"mode {mode!r} has no data: use TRAINING, EVALUATION or PREDICTION")
        return self._size_of(self._chosen or _SIZE_FUNCTION[mode])

    def _size_of(self, function: str) -> int:
        if function in self._sizes:
            return self._sizes[function]
        ask = getattr(self._execute(), function, None)
        if not callable(ask):
            raise DataFormatError(
                f"'{self.filename}' has no function {function}(): define it to return the size"
            )
        size = self._guard(ask, f"{function}()")
        if type(size) is bool or not hasattr(size, "__index__"):
            raise DataFormatError(f"{function}() of '{self.filename}' returned {size!r}, expected an integer")
        if size.__index__() < 1:
            raise DataFormatError(
                f"{function}() of '{self.filename}' returned {size}: there is nothing to read"
            )
        return self._sizes.setdefault(function, int(size))

    def read_records(self, task: Task) -> Iterator[int]:
        """Yield the record numbers. Raises ReaderError for another source or a range outside of it."""
        mode = task.type if task.type in _SIZE_FUNCTION else TaskType.TRAINING
        self._check(task.shard_name, task.start, task.end, self.size(mode))
        return iter(range(task.start, task.end))

    def read_record(self, name: str, index: int) -> int:
        """The number `index` itself. Raises ReaderError for another source or a number outside of it."""
        known = self._sizes.values() if self._chosen is None else ()  # for a mode that nobody tells us here
        self._check(name, index, index + 1, max(known, default=0) or self.size())
        return int(index)

    def _check(self, name: str, start: int, end: int, size: int) -> None:
        if self.records_per_task is None:
            if name != self.filename:
                raise no_source(name, [self.filename], self)
            check_range(start, end, 0, size, name)
            return
        number = name.removeprefix("shard_")
        first = int(number) * self.records_per_task if number.isdecimal() and number.isascii() else size
        if not 0 <= first < size or name != f"shard_{first // self.records_per_task}":
            last = (size - 1) // self.records_per_task
            raise ReaderError(f"PythonCustomReader has the sources shard_0 to shard_{last}, not {name!r}")
        check_range(start, end, first, min(first + self.records_per_task, size), name)

    def _execute(self) -> ModuleType:
        if self._module is not None:
            return self._module
        name = f"edl_torch_custom_{abs(hash(os.path.abspath(self.filename))):x}"
        spec = importlib.util.spec_from_file_location(name, self.filename)
        if spec is None or spec.loader is None:
            raise DataFormatError(f"'{self.filename}' is no Python file: its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickles of the file look their module up
        self._guard(partial(spec.loader.exec_module, module), "executing it")
        self._module = module
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None}

    def _guard(self, call: Any, what: str) -> Any:
        try:
            return call()
        except Exception as exc:
            raise ReaderError(f"'{self.filename}': {what} raised {type(exc).__name__}: {exc}") from exc

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for the file `data` if its name ends in `.py`, else None."""
        return {"filename": data} if data.endswith(".py") and os.path.isfile(data) else None

    def __repr__(self) -> str:
        sizes = " ".join(f"{function}()={size}" for function, size in self._sizes.items())
        return f"<PythonCustomReader {self.filename!r} {sizes or 'not asked'}>"
