"""A trainer whose whole process group gets SIGTERM; `test_interrupted_workers.py` runs it.

    python signalled_trainer.py METHOD PERSISTENT ENDING

It prints `ready`, waits for the signal, takes more batches, and ends as ENDING says.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

import torch

from edl_torch import ElasticDataLoader
from edl_torch.testing import wait_until

BATCHES, PATIENCE_S = 10, 60.0
EASY = 64  # records of the first two shards
came: list[int] = []


class Numbers:
    """Record `i` is `i`; a worker that reads one of the later ones stays at it for `slow_s`."""

    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        if index >= EASY:
            time.sleep(self._slow_s)
        return index


def note(number: int, frame: FrameType | None) -> None:
    came.append(number)


def own_signals(worker_id: int) -> None:
    """A worker's own choice."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ends_when_terminated(index: int) -> int:
    """Run a program, and end it as programs are ended."""
    if index == 3:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
            child.terminate()
            assert child.wait(30) == -signal.SIGTERM
    return index


def train(loader: ElasticDataLoader) -> Iterator[int]:
    """Batches by number; the signal comes in the middle."""
    for step, _ in enumerate(loader):
        if step == BATCHES // 2:
            print(
                "ready", os.getpid(), *(child.pid for child in multiprocessing.active_children()), flush=True
            )
            wait_until(lambda: bool(came), timeout_s=PATIENCE_S)
            time.sleep(0.2)  # a worker that it killed would be missed now
        yield step


def main(method: str, persistent: str, ending: str) -> None:
    if ending == "stuck":
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # so long torch waits for a worker, not 5 s
    signal.signal(signal.SIGTERM, note)
    loader = ElasticDataLoader(
        Numbers(600.0 if ending == "stuck" else 0.0),
        4,
        transform=ends_when_terminated,
        num_workers=2,
        prefetch_factor=4,  # by the end of the loop each worker is at the later ones
        multiprocessing_context=method,
        persistent_workers=persistent == "persistent",
        worker_init_fn=own_signals if ending == "own" else None,
    )
    for step in train(loader):
        if step == BATCHES:
            break
    print("trained", flush=True)
    match ending:
        case "closed" | "stuck":
            loader.close()
            assert multiprocessing.active_children() == []
        case "open":
            globals()["kept"] = iter(loader)
            next(globals()["kept"])
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
