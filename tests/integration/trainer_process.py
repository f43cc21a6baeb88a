"""Trainers as processes of their own, for tests: they read COCO captions and note every record.

    python trainer_process.py IMAGES ANNOTATIONS OUT --workers 2 --delays 0.01 0.04

One trainer for each delay, forked before anything of the package runs, so that torch is imported once. Each
writes one line to OUT.<number> for each record that its loop was done with: epoch and caption number.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch

from edl_torch import DataShardService, ElasticDataLoader, ImageDataset
from edl_torch.readers import CocoCaptionsReader
from edl_torch.shard import Task


class NumberedCaptions(CocoCaptionsReader):
    """Captions with their record numbers; pictures are decoded for real and cut to one pixel."""

    def read_record(self, name: str, index: int) -> tuple[Any, int]:
        image, _ = super().read_record(name, index)
        return image[:1, :1], index

    def read_records(self, task: Task) -> Any:
        return (self.read_record(task.shard_name, index) for index in range(task.start, task.end))


def main() -> int:
    """Run every trainer; the exit status is 0 when all of them ended well."""
    torch.set_num_threads(1)
    options = parse()
    children = []
    for number, delay in enumerate(options.delays):
        pid = os.fork()
        if pid == 0:
            train(options, f"{options.out}.{number}", delay)
            return 0
        children.append(pid)
    return int(any(os.waitpid(pid, 0)[1] for pid in children))


def train(options: argparse.Namespace, path: str, delay: float) -> None:
    """Read the whole job as one trainer."""
    reader = NumberedCaptions(options.images, options.annotations)
    with (
        open(path, "w", encoding="ascii", buffering=1) as out,
        DataShardService(
            options.batch_size, reader=reader, num_epochs=options.epochs, shuffle_shards=True, seed=5
        ) as service,
    ):
        dataset = ImageDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(
            dataset, num_workers=options.workers, persistent_workers=options.workers > 0
        )
        while not service.finished:
            for _, numbers in loader:
                time.sleep(delay)  # the training step
                out.write("".join(f"{loader.epoch} {number}\n" for number in numbers.tolist()))


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images")
    parser.add_argument("annotations")
    parser.add_argument("out")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
