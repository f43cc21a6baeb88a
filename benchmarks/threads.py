"""Threads that read against loader workers and bare decoding: throughput, memory, photographs by scale.

Run it alone on a quiet machine: `python benchmarks/threads.py --json runs/threads.json`. With `--peers DIR`
loaders of other libraries stand beside, which are installed into an environment of their own in that folder.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import threads_peers
import torch
from contenders import BareDecoding, Elastic, Plain, ThreadedDecoding
from harness import Contest, Result, Round, measure, parser, print_result, results_as_json, write_json
from pictures import find_pictures, write_photograph
from records import SIDE, RepeatedImages, ToTensor, resized

from edl_torch.readers import MapDatasetReader
from edl_torch.readers.images.decode import EXTENSIONS, read_image

Transform = Callable[[Any], Any]

THREADS, ONE_WORKER, PLAIN, BARE = (
    "two threads",
    "two threads in a worker",
    "plain, two workers",
    "bare decode",
)
FOLDER, OWN = "two threads, reader and transform", "two threads, a dataset of one's own"
BY_HAND = "two threads by hand"
WHOLE, SCALED = "whole photograph", "min_side=256"
KINDS = ["uint8", "float", "random", "albumentations", "rng", "beside", "memory", "scaled"]
OF_BARE = {"uint8": 0.95, "float": 0.93}
RANDOM_OF_BARE = 0.92
OVER_PLAIN, BESIDE_TRAINING, OF_MEMORY, OVER_WHOLE, AHEAD = 1.25, 1.2, 0.6, 3.0, 1.0

_MATRIX = 304  # the side of what the loop multiplies


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all contests, print and write them."""
    options = _options(arguments)
    if options.peers is not None:
        threads_peers.enter(options.peers)
    rounds = options.rounds or (2 if options.quick else 9)
    cv2.setNumThreads(0)  # as in loader workers
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        race = Race(Path(scratch), options.images, quick=options.quick, with_peers=options.peers is not None)
        results = [result for name in options.only for result in race.results(name, rounds)]
        body: dict[str, object] = {
            "rounds": rounds,
            "quick": options.quick,
            "results": results_as_json(results),
        }
        if "memory" in options.only:
            body["memory"] = race.memory()
    if options.json is not None:
        write_json(options.json, body)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("Throughput and memory of ElasticDataLoader(num_threads=2).")
    made.add_argument("--images", type=Path, metavar="DIR", help="JPEGs to decode (default: COCO's)")
    made.add_argument("--rounds", type=int, help="rounds that are counted, at least 2")
    made.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="contests to run")
    made.add_argument("--peers", type=Path, metavar="DIR", help="race other libraries too, installed there")
    return made.parse_args(arguments)


class Race:
    """The contests over one folder of pictures."""

    def __init__(self, scratch: Path, images: Path | None, *, quick: bool, with_peers: bool) -> None:
        self._scratch = scratch
        self._with_peers = with_peers
        self._quick = quick
        self._folder = find_pictures(images, scratch, 4 if quick else 64)
        files = sorted(self._folder.iterdir())
        self._paths = [str(path) for path in files if path.suffix.lower() in EXTENSIONS]
        self._count, self._batch_size = (16, 4) if quick else (1024, 32)
        self._reader = RepeatedImages(self._folder, self._count)

    def results(self, name: str, rounds: int) -> Iterator[Result]:
        """One contest; none for memory, which is no throughput."""
        contests: dict[str, Callable[[ExitStack], Contest]] = {
            "uint8": partial(self._decoding, "uint8"),
            "float": partial(self._decoding, "float"),
            "random": partial(self._random, "torchvision", augmentation),
            "albumentations": partial(self._random, "Albumentations", Albumented),
            "rng": partial(self._random, "numpy with rng", Cropped),
            "beside": self._beside,
            "scaled": self._scaled,
        }
        if name in contests:
            with ExitStack() as stack:
                result = measure(contests[name](stack), rounds)
            print_result(result)
            yield result

    def _decoding(self, kind: str, stack: ExitStack) -> Contest:
        transform = ToTensor(as_float=True) if kind == "float" else resized
        bare = BareDecoding(self._paths, self._count, processes=2, transform=transform)
        stack.callback(bare.close)
        peers = self._peers(transform)
        return Contest(
            title=f"JPEG to 224×224, {kind}",
            contenders={
                THREADS: self._elastic(stack, transform),
                PLAIN: self._plain(transform),
                BARE: bare,
                **peers,
            },
            ratios=[
                (THREADS, BARE, OF_BARE[kind]),
                (THREADS, PLAIN, OVER_PLAIN),
                (PLAIN, BARE, None),
                *((THREADS, peer, AHEAD) for peer in peers),
            ],
        )

    def _random(self, kind: str, make: Callable[[], Transform], stack: ExitStack) -> Contest:
        """A random pipeline by all threads, seeded by the record; by hand and bare it is not seeded."""
        pipeline = make()
        bare = BareDecoding(self._paths, self._count, processes=2, transform=pipeline)
        stack.callback(bare.close)
        own = MapDatasetReader(Augmented(self._paths, self._count, pipeline), thread_safe=True)
        return Contest(
            title=f"JPEG to 224×224 by random transforms: {kind}",
            contenders={
                FOLDER: self._elastic(stack, getattr(pipeline, "seeded", pipeline)),
                BY_HAND: ThreadedDecoding(self._paths, self._count, pipeline),
                OWN: self._elastic(stack, None, reader=own),
                BARE: bare,
            },
            ratios=[
                (FOLDER, BARE, RANDOM_OF_BARE),
                (OWN, BARE, RANDOM_OF_BARE),
                (FOLDER, OWN, None),
                (FOLDER, BY_HAND, None),
                (BY_HAND, BARE, None),
            ],
        )

    def _peers(self, transform: Transform) -> dict[str, Round]:
        if not self._with_peers:
            return {}
        size = self._batch_size
        return threads_peers.peers(
            self._paths, self._count, transform, batch_size=size, scratch=self._scratch
        )

    def _beside(self, stack: ExitStack) -> Contest:
        to_tensor = ToTensor(as_float=False)
        return Contest(
            title="JPEG to 224×224 tensors, beside a loop that computes",
            contenders={
                THREADS: self._elastic(stack, to_tensor, train=compute),
                ONE_WORKER: self._elastic(stack, to_tensor, workers=1, train=compute),
                PLAIN: self._plain(to_tensor, train=compute),
            },
            ratios=[(ONE_WORKER, PLAIN, BESIDE_TRAINING), (THREADS, PLAIN, None)],
        )

    def _scaled(self, stack: ExitStack) -> Contest:
        path, size = self._scratch / "large.jpg", (300, 400) if self._quick else (3000, 4000)
        write_photograph(path, *size)
        return Contest(
            title=f"a photograph of {size[1]}×{size[0]} to 224×224",
            contenders={WHOLE: partial(shrink, path, None), SCALED: partial(shrink, path, 256)},
            ratios=[(SCALED, WHOLE, OVER_WHOLE)],
        )

    def _elastic(
        self,
        stack: ExitStack,
        transform: Transform | None,
        *,
        workers: int = 0,
        train: Any = None,
        reader: Any = None,
    ) -> Elastic:
        made = Elastic(
            self._reader if reader is None else reader,
            transform,
            batch_size=self._batch_size,
            workers=workers,
            threads=2,
            shuffle=True,
            train=train,
        )
        stack.callback(made.close)
        return made

    def _plain(self, transform: Transform, *, train: Any = None) -> Plain:
        return Plain(
            self._reader, transform, batch_size=self._batch_size, workers=2, shuffle=True, train=train
        )

    def memory(self) -> dict[str, object]:
        """What a trainer and its loader workers hold at the most, in a process of its own for each."""
        held = {name: _held(partial(self._read, name)) for name in (THREADS, ONE_WORKER, PLAIN)}
        ratios = {name: held[name] / held[PLAIN] for name in (THREADS, ONE_WORKER)}
        print("\nproportional set size beyond that of a trainer before its first batch")
        for name, size in held.items():
            print(f"  {name:<34}{size / 2**20:>10,.0f} MB")
        verdict = "met" if ratios[THREADS] <= OF_MEMORY else "MISSED"
        print(f"  {THREADS} / {PLAIN}: {ratios[THREADS]:.2f}  target {OF_MEMORY:.2f}  {verdict}")
        print(f"  {ONE_WORKER} / {PLAIN}: {ratios[ONE_WORKER]:.2f}")
        return {"bytes": held, "ratios": ratios}

    def _read(self, name: str, note: Callable[[Any], object]) -> None:
        to_tensor = ToTensor(as_float=False)
        with ExitStack() as stack:
            workers = int(name == ONE_WORKER)
            if name == PLAIN:
                self._plain(to_tensor, train=note)()
            else:
                self._elastic(stack, to_tensor, workers=workers, train=note)()


class Augmented:
    """Decoded and transformed in `__getitem__`, as torchvision's own datasets do it."""

    def __init__(self, paths: list[str], count: int, pipeline: Transform) -> None:
        self.paths, self.count, self.pipeline = paths, count, pipeline

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        image: torch.Tensor = self.pipeline(read_image(self.paths[index % len(self.paths)]))
        return image


def augmentation() -> Transform:
    """A usual pipeline of torchvision's, on uint8 until its end."""
    from torchvision.transforms import v2

    made: Transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(p=0.5),
        ]
    )
    return made


def cropped(image: Any, rng: np.random.Generator) -> Any:
    """A random part of an image as float32 [224, 224, 3], flipped or not, brighter or darker, with noise."""
    height, width = image.shape[:2]
    side = int(min(height, width) * rng.uniform(0.5, 1.0))
    top, left = rng.integers(height - side + 1), rng.integers(width - side + 1)
    small = cv2.resize(image[top : top + side, left : left + side], (SIDE, SIDE))
    if rng.random() < 0.5:
        small = cv2.flip(small, 1)
    noise = rng.standard_normal(small.shape, np.float32) * np.float32(0.02)
    return small * np.float32(rng.uniform(0.6, 1.4) / 255) + noise


class Albumented:
    """Much the same by Albumentations; `seeded` is what a loader is given."""

    def __init__(self) -> None:
        import albumentations as a

        self.seeded = a.Compose(
            [
                a.RandomResizedCrop(size=(SIDE, SIDE)),
                a.HorizontalFlip(),
                a.ColorJitter(0.4, 0.4, 0.4, 0.1),
                a.Normalize(),
            ]
        )
        self._of_threads = threading.local()

    def __call__(self, image: Any) -> Any:
        own = self._of_threads.__dict__
        if "compose" not in own:
            own["compose"] = copy.deepcopy(self.seeded)
        return own["compose"](image=image)["image"]


class Cropped:
    """Crop, flip, brightness and noise by numpy and OpenCV; `seeded` is what a loader is given."""

    seeded = staticmethod(cropped)

    def __call__(self, image: Any) -> Any:
        return cropped(image, np.random.default_rng())


def compute(batch: torch.Tensor) -> None:
    """What a small model costs on a core: half as long as decoding a batch of 32 takes on two, some 20 ms."""
    matrix = torch.ones(_MATRIX, _MATRIX)
    for _ in range(len(batch)):
        matrix = matrix @ matrix / _MATRIX


def shrink(path: Path, min_side: int | None) -> int:
    """One photograph, as a transform would have it."""
    cv2.resize(read_image(str(path), min_side), (224, 224), interpolation=cv2.INTER_AREA)
    return 1


def _held(read: Callable[[Callable[[Any], object]], None]) -> int:
    """Bytes beyond those at the beginning, in a forked process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_watch, args=(read, theirs))
    process.start()
    held = int(ours.recv_bytes())
    process.join()
    return held


def _watch(read: Callable[[Callable[[Any], object]], None], pipe: Connection[Any, Any]) -> None:
    before, most = _set_size(), 0
    batches = 0

    def note(batch: object) -> None:
        nonlocal most, batches
        batches += 1
        if batches % 8 == 0 or not most:
            most = max(most, _set_size())

    read(note)
    pipe.send_bytes(str(most - before).encode())


def _set_size() -> int:
    """The proportional set size of this process and its children, in bytes."""
    family = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    return sum(_of_process(pid) for pid in family if pid is not None)


def _of_process(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    return 1024 * int(found[1]) if found else 0


if __name__ == "__main__":
    main()
