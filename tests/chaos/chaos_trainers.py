"""Starts trainer processes on command, so that torch is imported once: one line of JSON each on stdin.

The answer is the process number. Its end is written to `exit`, its errors to `errors`, and one line for each
batch that its loop was done with (the epoch and the record numbers) to `notes`. SIGUSR1 shows its threads.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import select
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset
from edl_torch.readers import AbstractDataReader, MapDatasetReader

CLONE_NEWNET = 0x40000000


def main() -> None:
    """Fork and reap until stdin ends."""
    torch.set_num_threads(1)
    children: dict[int, Path] = {}
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        for pid in tuple(children):
            reap(children, pid)
        if not ready:
            continue
        line = read_line()
        if not line:
            return
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(job)
            return
        children[pid] = Path(job["exit"])
        print(pid, flush=True)


def read_line() -> bytes:
    """Without a buffer, which `select` would not see."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def reap(children: dict[int, Path], pid: int) -> None:
    """Write down how the child ended, if it has."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        path = children.pop(pid)
        new = path.with_suffix(".new")
        new.write_text(str(os.waitstatus_to_exitcode(status)))
        new.replace(path)


def run(job: dict[str, Any]) -> None:
    """Be the trainer, in a group of its own with its loader workers."""
    os.setpgid(0, 0)
    errors = os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "namespace" in job:
        enter(job["namespace"])
    time.sleep(job["nap_s"])
    try:
        train(job)
    except Exception:  # noqa: BLE001  the top of a process
        traceback.print_exc()
        end(1)
    end(0)


def end(status: int) -> None:
    """As `multiprocessing` ends a forked process: a second less than it takes to throw all of torch away."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(status)


def enter(namespace: str) -> None:
    """Move to a network namespace of `ip netns`. (`os.setns` is younger than Python 3.11.)"""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def train(job: dict[str, Any]) -> None:
    """Read the whole job. Steps take no time once the file `hurry` is there."""
    make_reader = InOrder if job.get("in_order") else MapDatasetReader
    reader = make_reader(range(job["size"]), thread_safe=True)
    workers, window = job["workers"], job.get("window")
    with (
        open(job["notes"], "w", encoding="ascii", buffering=1) as notes,
        MasterClient(
            job["address"], job["worker_id"], master_timeout_s=job.get("master_timeout_s", 60.0)
        ) as client,
        DataShardService(
            job["batch"],
            client,
            reader=reader,
            num_epochs=job["epochs"],
            records_per_shard=job["records_per_shard"],
            shuffle=job["shuffle"],
            shuffle_shards=bool(window),
            shuffle_window=window or None,
            seed=job["seed"],
            audit_dir=job["audit_dir"],
        ) as service,
    ):
        loader = ElasticDataLoader(
            ShardedDataset(service, reader),
            num_workers=workers,
            persistent_workers=workers > 0,
            num_threads=job.get("threads") or None,
        )
        while not service.finished:
            for batch in loader:
                if not os.path.exists(job["hurry"]):
                    time.sleep(job["step_s"])
                hang(Path(job["hang"]))
                notes.write(f"{loader.epoch} {' '.join(map(str, batch.tolist()))}\n")


class InOrder(MapDatasetReader):
    """Reads whole shards from their beginning, as one of blocks does."""

    read_record = AbstractDataReader.read_record


def hang(order: Path) -> None:
    """Stand still, once, if that was ordered."""
    if order.exists():
        seconds = float(order.read_text())
        order.unlink()
        time.sleep(seconds)


if __name__ == "__main__":
    main()
