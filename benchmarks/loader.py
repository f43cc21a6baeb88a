"""`ElasticDataLoader` against plain `DataLoader`, bare decoding, a PIL image folder and map-style rows.

Run it alone on a quiet machine: `python benchmarks/loader.py --json runs/loader.json`. What is compared with
what, and why, is in the README beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import cv2
import numpy as np
import torch
from contenders import BareDecoding, Elastic, MapStyle, PilFolder, Plain, ReaderRows, loopback_master
from harness import Contest, Result, Round, measure, parser, print_result, results_as_json, write_json
from pictures import find_pictures
from records import MapBatches, MapRows, RepeatedImages, TinyRows, ToTensor
from torch.utils.data import TensorDataset, default_collate

from edl_torch import LocalMaster, MasterClient
from edl_torch.core.calls import MasterApi
from edl_torch.readers import MapDatasetReader
from edl_torch.readers.images.decode import EXTENSIONS

ELASTIC, UNSEEDED, GRPC, PLAIN = "elastic", "elastic, unseeded", "elastic over grpc", "plain DataLoader"
SAME_COLLATE = "elastic, torch's collate"
BARE, PIL = "bare decode + resize", "PIL image folder"
COLUMNS, COLUMNS_GRPC, ROWS = "elastic, columnar", "elastic, columnar over grpc", "map-style per record"
BATCHES, SHUFFLED = "map-style __getitems__", ", shuffled"
ELASTIC_TENSORS, TENSORS = "elastic, TensorDataset", "TensorDataset"

KINDS = ["jpeg", "tiny", "columns", "map"]
SAME = 0.98
OF_BARE, OF_BARE_WITH_WORKERS = 0.97, 0.74
OVER_PIL = 1.15
OVER_ROWS = 10.0
OF_BATCHES, OF_ROWS = 0.9, 1.0

Maker = Callable[[ExitStack, MasterClient, int], Contest]


class Shape(TypedDict):
    """Arguments that all loaders share."""

    batch_size: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Records in a round, and how many rounds."""

    rounds: int
    pictures: int
    images: int
    rows: int
    image_batch: int = 32
    row_batch: int = 256
    column_batch: int = 2048


FULL = Sizes(rounds=9, pictures=64, images=1024, rows=131_072)
QUICK = Sizes(rounds=2, pictures=4, images=16, rows=512, image_batch=4, row_batch=64, column_batch=128)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all contests, print and write them."""
    options = _options(arguments)
    sizes = QUICK if options.quick else FULL
    rounds = options.rounds or sizes.rounds
    multiprocessing.set_start_method("fork")  # as before Python 3.14: no worker imports torch for itself
    cv2.setNumThreads(0)  # as in loader workers, so that 0 and 2 workers can be compared
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = find_pictures(options.images, Path(scratch), sizes.pictures)
        results = list(_results(options, sizes, folder, rounds))
    if options.json is not None:
        body = {"rounds": rounds, "quick": options.quick, "results": results_as_json(results)}
        write_json(options.json, body)


def _results(options: argparse.Namespace, sizes: Sizes, folder: Path, rounds: int) -> Iterator[Result]:
    jpeg = Jpeg(folder, sizes, ToTensor(as_float=options.float))
    makers: dict[str, Maker] = {
        "jpeg": jpeg.contest,
        "tiny": partial(tiny, sizes),
        "columns": partial(columns, sizes),
        "map": partial(map_style, sizes),
    }
    with loopback_master() as client:
        for name in options.only:
            for workers in options.workers:
                with ExitStack() as stack:
                    result = measure(makers[name](stack, client, workers), rounds)
                print_result(result)
                yield result


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("Throughput of ElasticDataLoader against its alternatives.")
    made.add_argument(
        "--images", type=Path, metavar="DIR", help="JPEGs to decode (default: COCO's, or generated)"
    )
    made.add_argument("--float", action="store_true", help="float32 tensors instead of uint8")
    made.add_argument("--rounds", type=int, help="rounds that are counted, at least 2")
    made.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="loader workers (default: 0 2)")
    made.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="contests to run")
    return made.parse_args(arguments)


class Jpeg:
    """Real JPEG files to tensors [3, 224, 224]."""

    def __init__(self, folder: Path, sizes: Sizes, to_tensor: ToTensor) -> None:
        self._reader = RepeatedImages(folder, sizes.images)
        self._paths = sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
        self._count = sizes.images
        self._batch_size = sizes.image_batch
        self._to_tensor = to_tensor

    def contest(self, stack: ExitStack, client: MasterClient, workers: int) -> Contest:
        """Shuffled images through every loader, and decoding alone in as many processes."""
        bare = BareDecoding(self._paths, self._count, processes=workers)
        stack.callback(bare.close)
        return Contest(
            title=f"JPEG to 224×224 tensors, {workers} workers",
            contenders={
                ELASTIC: self._elastic(stack, LocalMaster(), workers),
                UNSEEDED: self._elastic(stack, LocalMaster(), workers, seeded=False),
                GRPC: self._elastic(stack, client, workers),
                PLAIN: Plain(self._reader, self._to_tensor, shuffle=True, **self._shape(workers)),
                BARE: bare,
                PIL: PilFolder(self._paths, self._count, self._to_tensor, **self._shape(workers)),
            },
            ratios=[
                (ELASTIC, PLAIN, SAME),
                (UNSEEDED, PLAIN, SAME),
                (GRPC, PLAIN, SAME),
                (ELASTIC, BARE, OF_BARE_WITH_WORKERS if workers else OF_BARE),
                (PLAIN, BARE, None),
                (ELASTIC, PIL, OVER_PIL),
            ],
        )

    def _elastic(self, stack: ExitStack, master: MasterApi, workers: int, *, seeded: bool = True) -> Elastic:
        shape = self._shape(workers)
        return opened(
            stack,
            Elastic(self._reader, self._to_tensor, master=master, shuffle=True, seeded=seeded, **shape),
        )

    def _shape(self, workers: int) -> Shape:
        return {"batch_size": self._batch_size, "workers": workers}


def tiny(sizes: Sizes, stack: ExitStack, client: MasterClient, workers: int) -> Contest:
    """Rows of 16 numbers, read in order: what is left is what a loader itself costs."""
    reader = TinyRows(sizes.rows)
    shape: Shape = {"batch_size": sizes.row_batch, "workers": workers}
    return Contest(
        title=f"tiny records in batches of {sizes.row_batch}, {workers} workers",
        contenders={
            ELASTIC: opened(stack, Elastic(reader, master=LocalMaster(), **shape)),
            SAME_COLLATE: opened(
                stack, Elastic(reader, master=LocalMaster(), collate=default_collate, **shape)
            ),
            GRPC: opened(stack, Elastic(reader, master=client, **shape)),
            PLAIN: Plain(reader, **shape),
        },
        ratios=[(ELASTIC, PLAIN, SAME), (SAME_COLLATE, PLAIN, SAME), (GRPC, PLAIN, SAME)],
    )


def columns(sizes: Sizes, stack: ExitStack, client: MasterClient, workers: int) -> Contest:
    """The same rows, a batch in one call of the reader, against one call a row."""
    reader = TinyRows(sizes.rows)
    shape: Shape = {"batch_size": sizes.column_batch, "workers": workers}
    return Contest(
        title=f"columnar reads in batches of {sizes.column_batch}, {workers} workers",
        contenders={
            COLUMNS: opened(stack, Elastic(reader, master=LocalMaster(), columnar=True, **shape)),
            COLUMNS_GRPC: opened(stack, Elastic(reader, master=client, columnar=True, **shape)),
            ROWS: MapStyle(ReaderRows(reader), **shape),
        },
        ratios=[(COLUMNS, ROWS, OVER_ROWS), (COLUMNS_GRPC, ROWS, None)],
    )


def map_style(sizes: Sizes, stack: ExitStack, client: MasterClient, workers: int) -> Contest:
    """Map-style datasets of the same rows, in order and shuffled: row by row, and whole batches."""
    reader = TinyRows(sizes.rows)
    rows, batches = MapRows(reader), MapBatches(reader)
    tensors = TensorDataset(*map(torch.from_numpy, reader.read_batch("rows", np.arange(sizes.rows))))
    shape: Shape = {"batch_size": sizes.row_batch, "workers": workers}
    contenders: dict[str, Round] = {}
    ratios: list[tuple[str, str, float | None]] = []
    for shuffle, order in ((False, ""), (True, SHUFFLED)):
        made = partial(Elastic, shuffle=shuffle, **shape)
        by_row = MapDatasetReader(rows)
        contenders |= {
            ELASTIC + order: opened(stack, made(by_row, master=LocalMaster())),
            SAME_COLLATE + order: opened(stack, made(by_row, master=LocalMaster(), collate=default_collate)),
            ROWS + order: MapStyle(rows, shuffle=shuffle, **shape),
            COLUMNS + order: opened(stack, made(reader, master=LocalMaster(), columnar=True)),
            BATCHES + order: MapStyle(batches, shuffle=shuffle, collate=as_it_is, **shape),
            ELASTIC_TENSORS + order: opened(stack, made(MapDatasetReader(tensors), master=LocalMaster())),
            TENSORS + order: MapStyle(tensors, shuffle=shuffle, **shape),
        }
        ratios += [
            (ELASTIC + order, ROWS + order, OF_ROWS),
            (SAME_COLLATE + order, ROWS + order, OF_ROWS),
            (COLUMNS + order, BATCHES + order, OF_BATCHES),
            (ELASTIC_TENSORS + order, TENSORS + order, OF_ROWS),
        ]
    title = f"map-style rows and batches of {sizes.row_batch}, {workers} workers"
    return Contest(title=title, contenders=contenders, ratios=ratios)


def as_it_is(batch: Any) -> Any:
    """A collate function for what is a batch already."""
    return batch


def opened(stack: ExitStack, elastic: Elastic) -> Elastic:
    """The contender, which is closed with the stack."""
    stack.callback(elastic.close)
    return elastic


if __name__ == "__main__":
    main()
