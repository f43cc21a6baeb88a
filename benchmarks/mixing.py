"""Mixtures against one dataset: rows in memory of 5 and of 1,000 components, and JPEG files of 5.

`python benchmarks/mixing.py --json runs/mixing.json`. All shuffle, in one process. With `--peers DIR` mixers
of other libraries stand beside, over the same rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import mixing_peers
import numpy as np
import torch
from harness import Contest, Round, measure, parser, print_result, results_as_json, write_json
from pictures import write_pictures
from records import MapRows, RepeatedImages, TinyRows, ToTensor
from threads_peers import enter
from torch.utils.data import TensorDataset

from edl_torch import ElasticDataLoader, Mixture

SHARES = (60, 20, 10, 5, 5)
BATCH = 64
GOAL_ROWS, GOAL_JPEG = 0.9, 0.98


class Endless:
    """A loader without end, of which a round takes so many batches."""

    def __init__(self, data: Any, batches: int, **options: Any) -> None:
        more: dict[str, Any] = {} if isinstance(data, Mixture) else {"num_epochs": 0}
        self._loader = ElasticDataLoader(data, BATCH, shuffle=True, seed=1, **more, **options)
        self._left = self._iterations()
        self._batches = batches

    def _iterations(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def __call__(self) -> int:
        return BATCH * sum(1 for _ in islice(self._left, self._batches))


def mixed(parts: Sequence[Any]) -> Mixture:
    """The datasets as components: five by `SHARES`, others alike."""
    shares = SHARES if len(parts) == len(SHARES) else (1,) * len(parts)
    names = [f"part {number:04}" for number in range(len(parts))]
    return Mixture(dict(zip(names, parts, strict=True)), dict(zip(names, shares, strict=True)))


def rows_of(count: int) -> MapRows:
    """Rows of 16 numbers with a label, each made into tensors as it is asked for."""
    return MapRows(TinyRows(count))


def tensors_of(count: int) -> TensorDataset:
    """The same as tensors."""
    features, labels = TinyRows(count).read_batch("rows", np.arange(count))
    return TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))


def rows_contest(title: str, make: Callable[[int], Any], batches: int, *, most: int) -> Contest:
    """One dataset, 5 components, and `most` where that is more."""
    each = 20_000
    contenders: dict[str, Round] = {
        "one dataset": Endless(make(5 * each), batches),
        "5 components": Endless(mixed([make(each) for _ in SHARES]), batches),
    }
    ratios: list[tuple[str, str, float | None]] = [("5 components", "one dataset", GOAL_ROWS)]
    if most > len(SHARES):
        name = f"{most:,} components"
        contenders[name] = Endless(mixed([make(each // 10)] * most), batches)
        ratios.append((name, "one dataset", None))
    return Contest(title=title, contenders=contenders, ratios=ratios)


def jpeg_contest(folder: Path, batches: int) -> Contest:
    """Pictures, decoded and resized."""
    write_pictures(folder, 64)
    options: dict[str, Any] = {"transform": ToTensor(as_float=False), "seed_transforms": True}
    parts = [RepeatedImages(folder, 2000) for _ in SHARES]
    return Contest(
        title="JPEG, 5 components",
        contenders={
            "one dataset": Endless(RepeatedImages(folder, 10_000), batches, **options),
            "5 components": Endless(mixed(parts), batches, **options),
        },
        ratios=[("5 components", "one dataset", GOAL_JPEG)],
    )


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--peers", type=Path, metavar="DIR", help="make their environment there")
    options = arguments.parse_args()
    if options.peers is not None:
        enter(options.peers, mixing_peers.PACKAGES)
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    batches, rounds, most = (8, 1, 8) if options.quick else (1600, 15, 1000)
    with tempfile.TemporaryDirectory() as scratch:
        contests = [
            rows_contest("rows of 16 numbers, map-style", rows_of, batches, most=most),
            rows_contest("rows of 16 numbers, TensorDataset", tensors_of, batches, most=0),
            jpeg_contest(Path(scratch), max(1, batches // 200)),
        ]
        if options.peers is not None:
            parts = [rows_of(20_000) for _ in SHARES]
            peers = mixing_peers.peers(parts, SHARES, batches // 4, BATCH, Path(scratch))
            ours = {"edl_torch": Endless(mixed(parts), batches // 4)}
            ratios = [("edl_torch", name, 1.0) for name in peers]
            contests.append(Contest(title="mixers of 5", contenders={**ours, **peers}, ratios=ratios))
        results = []
        for contest in contests:
            results.append(measure(contest, rounds))
            print_result(results[-1])
    if options.json is not None:
        write_json(options.json, {"contests": results_as_json(results)})


if __name__ == "__main__":
    main()
