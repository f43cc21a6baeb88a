"""`edl-torch index`: an index beside each tar, so that no job has to pass over its headers.

Reads options and prints; the work is in `readers.tar.index`.
"""

from __future__ import annotations

import argparse

from edl_torch.cli.datasets import ProgressLine
from edl_torch.errors import InvalidArgument


def run(options: argparse.Namespace) -> int:
    """Index each tar that has no index that fits; returns the exit status. What is written stays."""
    from edl_torch.readers.registry import parse_reader_params
    from edl_torch.readers.storage import Storage
    from edl_torch.readers.tar.index import TARS, OpenTar, index_beside, made_index, write_beside

    params = parse_reader_params(options.custom_data_reader_params)
    if strange := params.keys() - {"storage_options"}:
        raise InvalidArgument(f"--custom_data_reader_params: {min(strange)!r} is no option of an index")
    storage = Storage(params.get("storage_options"))
    with storage.apart() as first:  # which is told sooner that nobody answers
        names = TARS.files(options.data, first)
        total = sum(found.size for found in map(first.look, names) if found is not None)
    samples = written = done = 0

    def shown(at: int) -> None:
        progress(done + at)

    with ProgressLine(total, "bytes") as progress:
        for name in names:
            tar = OpenTar.of(name, storage)
            found = index_beside(tar)
            starts = made_index(tar, shown) if found is None else found[1]
            if found is None:
                tar.stamp.check()
                write_beside(name, starts, storage)
                written += 1
            samples, done = samples + len(starts) - 1, done + tar.size
            shown(0)
    print(f"{samples:,} samples in {len(names):,} tar(s) of {done:,} bytes: {written:,} index(es) written")
    return 0
