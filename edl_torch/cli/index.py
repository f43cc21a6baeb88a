"""`edl-torch index`: an index beside each tar, so that no job has to pass over its headers.

Reads options and prints; the work is in `readers.tar.index`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from edl_torch.cli.datasets import ProgressLine
from edl_torch.errors import OutputError


def run(options: argparse.Namespace) -> int:
    """Index each tar that has no index that fits; returns the exit status. What is written stays."""
    from edl_torch.readers.tar.index import write_beside, written_index
    from edl_torch.readers.tar.reader import tars

    files = tars(options.data)
    sizes = [os.path.getsize(file) for file in files]
    samples = written = done = 0
    with ProgressLine(sum(sizes), "bytes") as progress:
        for file, size in zip(files, sizes, strict=True):
            before = done
            starts, is_there = written_index(file, lambda at: progress(before + at))  # noqa: B023  it is called now
            if not is_there:
                try:
                    write_beside(file, starts)
                except OSError as exc:
                    folder = Path(file).parent
                    raise OutputError(f"no index can be written in '{folder}': {exc.strerror}") from exc
                written += 1
            samples, done = samples + len(starts) - 1, done + size
            progress(done)
    print(f"{samples:,} samples in {len(files):,} tar(s) of {done:,} bytes: {written:,} index(es) written")
    return 0
