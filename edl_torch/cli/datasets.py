"""Datasets that `edl-torch master` makes by itself: from its options to registrations.

Opens readers to learn names and sizes; it reads no record, and must not know the dispatcher.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from edl_torch.core.calls import Registration
from edl_torch.errors import EdlError, InvalidArgument, ReaderError
from edl_torch.readers.base import AbstractDataReader, reader_fingerprint, reader_sources
from edl_torch.shard import OPTIONS, Source, TaskType

_KINDS = (
    ("training", "training_data", TaskType.TRAINING),
    ("evaluation", "validation_data", TaskType.EVALUATION),
    ("prediction", "prediction_data", TaskType.PREDICTION),
)


def described(options: argparse.Namespace) -> Iterator[Registration]:
    """One registration for each kind of data that is given.

    Evaluation has as many epochs as training, one after each; prediction has one. Shuffles are training's.
    """
    given = [(name, getattr(options, option), kind) for name, option, kind in _KINDS]
    if options.custom_data_reader and not any(path for _, path, _ in given):
        raise InvalidArgument(
            "--custom_data_reader needs --training_data, --validation_data or --prediction_data"
        )
    for name, path, kind in given:
        if path is not None:
            yield _registration(options, name, path, kind)


def _registration(options: argparse.Namespace, name: str, path: str, kind: TaskType) -> Registration:
    reader, sources = open_data(options, path, kind)
    given = {option: value for option, value in vars(options).items() if option in OPTIONS}
    if kind is not TaskType.TRAINING:
        given = {option: value for option, value in given.items() if not option.startswith("shuffle")}
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
