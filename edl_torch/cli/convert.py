"""`edl-torch convert`: the records of any reader, written to RecordIO files.

Reads options and prints; the work is in `readers.recordio.writer`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from edl_torch.cli.datasets import ProgressLine, open_data
from edl_torch.shard import TaskType


def run(options: argparse.Namespace) -> int:
    """Convert, all or nothing; returns the exit status. Ctrl-C and SIGTERM leave nothing."""
    from edl_torch.readers.recordio.writer import RecordIOWriter, convert

    mode = TaskType[options.mode.upper()]
    encode = _encoder(options.encode)
    with _terminated_as_interrupted():
        reader, sources = open_data(options, options.source, mode)
        total = sum(source.count for source in sources)
        with ProgressLine(total, "records") as progress:
            files = convert(
                reader,
                options.target,
                encode,
                mode=mode,
                records_per_file=options.records_per_file,
                writer=partial(
                    RecordIOWriter,
                    dialect=options.dialect,
                    compressor=options.compressor,
                    max_chunk_bytes=options.max_chunk_bytes,
                ),
                progress=progress,
            )
    kind = getattr(encode, "kind", None) or options.encode
    size = sum(map(os.path.getsize, files))
    print(f"{total:,} records as {kind} in {len(files):,} file(s) of {size:,} bytes: {options.target}")
    return 0


def _encoder(how: str) -> Callable[[Any], bytes]:
    from edl_torch.readers.base import imported
    from edl_torch.readers.recordio.record_bytes import ENCODERS, AutoEncode

    if how == "auto":
        return AutoEncode()
    if how in ENCODERS:
        return ENCODERS[how]
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    return imported(how, f"--encode {how!r}", "function", ENCODERS)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A machine that is taken away says SIGTERM: what is not finished goes then, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
