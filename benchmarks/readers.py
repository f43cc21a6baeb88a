"""Every reader's scan, random access and columns against its peer; a loader worker's start with a huge index.

Run it alone on a quiet machine: `python benchmarks/readers.py --json runs/readers.json`. What is compared
with what, and why, is in the README beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import reader_contests as contests
import torch
from harness import Contest, Result, measure, parser, print_result, results_as_json, write_json
from reader_contests import Sizes
from reader_start import METHODS, READERS, Start, measure_starts, print_starts

Maker = Callable[[Sizes, ExitStack, Iterable[int]], Iterator[Contest]]

MAKERS: dict[str, Maker] = {
    "recordio": contests.recordio,
    "tar": contests.tar,
    "csv": contests.csv,
    "text": contests.text,
    "parquet": contests.parquet,
    "odps": contests.odps,
}
START = "start"
KINDS = [*MAKERS, START]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all contests, print and write them."""
    options = _options(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["EDL_INDEX_DIR"] = scratch  # loader workers find it too, and nothing of it stays
        sizes = _sizes(Path(scratch), quick=options.quick)
        rounds = options.rounds or sizes.rounds
        results = list(_results(options, sizes, rounds))
        starts = _starts(options, sizes, rounds)
    if options.json is not None:
        body = {"rounds": rounds, "quick": options.quick, "results": results_as_json(results)}
        write_json(options.json, {**body, "starts": [asdict(start) for start in starts]})


def _sizes(folder: Path, *, quick: bool) -> Sizes:
    if quick:
        few = {"lines": 500, "documents": 100, "pictures": 20}
        return Sizes(folder=folder, rounds=2, rows=1000, records=few, picked=10, huge=10_000, batch=128)
    many = {"lines": 100_000, "documents": 20_000, "pictures": 4_000}
    return Sizes(folder=folder, rounds=7, rows=131_072, records=many, picked=300, huge=10_000_000)


def _results(options: argparse.Namespace, sizes: Sizes, rounds: int) -> Iterator[Result]:
    for name in options.only:
        with ExitStack() as stack:
            for contest in MAKERS[name](sizes, stack, options.workers) if name in MAKERS else ():
                result = measure(contest, rounds)
                print_result(result)
                yield result


def _starts(options: argparse.Namespace, sizes: Sizes, rounds: int) -> list[Start]:
    if START not in options.only:
        return []
    few = 1 if options.quick else min(rounds, 5)  # each is a process of its own
    starts = measure_starts(sizes.folder, sizes.huge, options.readers, options.methods, few)
    print_starts(starts)
    return starts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("Every reader against its peer, and a loader worker's start with a huge index.")
    made.add_argument("--rounds", type=int, help="rounds that are counted, at least 2")
    made.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="loader workers (default: 0 2)")
    made.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="contests to run")
    made.add_argument(
        "--methods", choices=METHODS, nargs="+", default=list(METHODS), help="of starting workers"
    )
    made.add_argument(
        "--readers", choices=READERS, nargs="+", default=list(READERS), help="whose start it is"
    )
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
