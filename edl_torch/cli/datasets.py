"""Data of commands: from options to readers and registrations, and how far a command has come with them.

Opens readers to learn names and sizes; it reads no record, and must not know the dispatcher.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from edl_torch.core.calls import Registration
from edl_torch.errors import EdlError, InvalidArgument, ReaderError
from edl_torch.readers.base import AbstractDataReader, reader_fingerprint, reader_sources
from edl_torch.shard import OPTIONS, Source, TaskType

_KINDS = (
    ("training", "training_data", TaskType.TRAINING),
    ("evaluation", "validation_data", TaskType.EVALUATION),
    ("prediction", "prediction_data", TaskType.PREDICTION),
)


# What says something of the master's own datasets, where it is said.
_SHUFFLES = [option for option in OPTIONS if option.startswith("shuffle")]
_OF_DATA = ["custom_data_reader", "custom_data_reader_params", *_SHUFFLES]


def described(options: argparse.Namespace) -> Iterator[Registration]:
    """One registration for each kind of data that is given.

    Evaluation has as many epochs as training, one after each; prediction has one. Shuffles are training's.
    """
    given = [(name, getattr(options, option), kind) for name, option, kind in _KINDS]
    if not any(path for _, path, _ in given):
        for option in _OF_DATA:
            if getattr(options, option, None):
                raise InvalidArgument(
                    f"--{option} needs --training_data, --validation_data or --prediction_data: "
                    "trainers say it of the datasets that they bring"
                )
    for name, path, kind in given:
        if path is not None:
            yield _registration(options, name, path, kind)


def _registration(options: argparse.Namespace, name: str, path: str, kind: TaskType) -> Registration:
    reader, sources = open_data(options, path, kind)
    given = {option: value for option, value in vars(options).items() if option in OPTIONS}
    if kind is not TaskType.TRAINING:
        given = {option: value for option, value in given.items() if option not in _SHUFFLES}
    if kind is TaskType.PREDICTION:
        given["num_epochs"] = 1
    return Registration(
        **given,
        name=name,
        sources=sources,
        records_per_shard=options.records_per_task,
        task_type=kind,
        fingerprint=reader_fingerprint(reader) or None,
    )


def open_data(
    options: argparse.Namespace, path: str, kind: TaskType
) -> tuple[AbstractDataReader, tuple[Source, ...]]:
    """The reader that the options name, else the one that knows `path`, and its sources.

    Raises ReaderError for whatever else a reader raises: a command says one line.
    """
    try:
        reader = _reader(options, path, kind)
        return reader, reader_sources(reader, kind)
    except EdlError:
        raise
    except Exception as exc:
        raise ReaderError(f"'{path}' cannot be opened: {type(exc).__name__}: {exc}") from exc


def _reader(options: argparse.Namespace, path: str, kind: TaskType) -> AbstractDataReader:
    from edl_torch.readers.registry import load_reader, open_reader, parse_reader_params

    params = parse_reader_params(options.custom_data_reader_params)
    if not options.custom_data_reader:
        return open_reader(path, kind, **params)
    sys.path.insert(0, os.getcwd())  # as `python -m` has it: the class is often beside the job
    return load_reader(options.custom_data_reader, params, path, kind)


# How far a command is ---------------------------------------------------------------------------------

_WIDTH = 30
_EVERY_S = 0.1


class ProgressLine:
    """`with ProgressLine(total, "records") as show: show(count)`; the line is gone at the end."""

    def __init__(
        self,
        total: int,
        what: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._what = total, what
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._clock = clock
        self._began = clock()
        self._next = self._began
        self._drawn = False

    def __call__(self, count: int, nbytes: int | None = None) -> None:
        """Show that `count` are done, which have so many bytes, at most ten times a second."""
        if self._shown and (now := self._clock()) >= self._next:
            self._next = now + _EVERY_S
            self._draw(count, nbytes, now)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self, count: int, nbytes: int | None, now: float) -> None:
        part = min(1.0, count / self._total) if self._total else 1.0
        bar = "#" * int(part * _WIDTH)
        rate = count / max(now - self._began, 1e-9)
        left = f", {max(0, self._total - count) / rate:,.0f} s left" if count else ""
        size = "" if nbytes is None else f", {nbytes:,} bytes"
        line = f"[{bar:<{_WIDTH}}] {part:4.0%}  {count:,} of {self._total:,} {self._what}{size}{left}"
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._drawn = True
