"""Trainers as processes of their own, for tests: they train and evaluate by turns, and note every record.

    python evaluation_process.py TRAIN EVAL OUT --delays 0 0.02 --dies 1:1:2

One trainer for each delay, forked before anything runs. Each writes one line to OUT.<number> for each record
that its loop was done with: dataset, epoch, record. `--dies TRAINER:EPOCH:BATCHES` kills one in
that evaluation, and the others wait for that in their first batch of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset, TaskType
from edl_torch.readers import open_reader
from edl_torch.testing import wait_until


def main() -> int:
    """Run every trainer; the exit status is the number of those that did not end well."""
    torch.set_num_threads(1)
    options = parse()
    children = []
    for number, delay in enumerate(options.delays):
        pid = os.fork()
        if pid == 0:
            with open(f"{options.out}.{number}", "w", encoding="ascii", buffering=1) as out:
                work(options, number, delay, out)
            return 0
        children.append(pid)
    return sum(bool(os.waitpid(pid, 0)[1]) for pid in children)


def work(options: argparse.Namespace, number: int, delay: float, out: TextIO) -> None:
    """The job, as one trainer: an evaluation after each epoch."""
    training = DataShardService(options.batch_size, dataset_name="training")
    evaluation = DataShardService(
        options.batch_size, dataset_name="evaluation", task_type=TaskType.EVALUATION
    )
    with training, evaluation:
        train_loader = loader_of(training, options.train)
        eval_loader = loader_of(evaluation, options.eval)
        while not training.finished:
            for _ in train_loader:
                note(out, "training", train_loader)
                time.sleep(delay)  # the training step
            batches = eval_loader.through(train_loader.epoch)
            for count, _ in enumerate(batches, 1):
                if options.dies:
                    die_or_wait(options, number, eval_loader.epoch, count)
                note(out, "evaluation", eval_loader)
                time.sleep(delay)


def die_or_wait(options: argparse.Namespace, number: int, epoch: int, count: int) -> None:
    """Die in the batch that `--dies` names; where another one does, wait for it as that epoch begins."""
    who, when, batches = map(int, options.dies.split(":"))
    died = Path(f"{options.out}-died")
    if (who, when, batches) == (number, epoch, count):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif who != number and (when, 1) == (epoch, count):
        wait_until(died.exists, timeout_s=60.0)


def loader_of(service: DataShardService, path: str) -> ElasticDataLoader:
    """A loader of a file's lines."""
    return ElasticDataLoader(ShardedDataset(service, open_reader(path)))


def note(out: TextIO, dataset: str, loader: Any) -> None:
    """The records of the batch in hand."""
    out.write("".join(f"{dataset} {loader.epoch} {index}\n" for _, index in loader.records))


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("eval")
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0])
    parser.add_argument("--dies", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
