"""Two ranks over gloo that hold one model in parts, one job after the other, for `test_mesh_ranks.py`.

    python parts_process.py FOLDER

In the first job batches are large, and loops overwrite them at once. In the next ones the holder is killed,
then the follower, then a rank that lends a batch to another one. Ranks write JSON into the folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from edl_torch import AbstractDataReader, ElasticDataLoader
from edl_torch.data.ranks.process_group import ProcessGroupPeers
from edl_torch.errors import PeerFailed

WORLD, RECORDS, SIDE = 2, 24, 1024
LENT = 16 << 20
KILLED = {"large": None, "holder dies": 0, "follower dies": 1}
LENDER_DIES = "lender dies"


class SquareReader(AbstractDataReader):
    """Record `i` is a large square of the number `i`, with a long name."""

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"squares": RECORDS}

    def read_records(self, task: Any) -> Iterator[dict[str, Any]]:
        for index in range(task.start, task.end):
            yield {"square": np.full((SIDE, SIDE), index, np.float32), "name": f"{index:04}" * 1000}


def train(job: str, rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    seen: list[list[float]] = []
    error = ""
    with ElasticDataLoader(SquareReader(), 4, dataset_name=job, records_per_shard=4, mesh=mesh) as loader:
        loader.load_state_dict(None)
        try:
            for step, batch in enumerate(loader):
                if KILLED[job] == rank and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                squares = batch["square"]
                assert bool((squares == squares[:, :1, :1]).all()), "a batch that came in part"
                assert [float(name[:4]) for name in batch["name"]] == squares[:, 0, 0].tolist()
                seen.append(squares[:, 0, 0].tolist())
                squares.fill_(-1.0)
        except PeerFailed as exc:
            error = str(exc)
    return {"seen": seen, "error": error}


class Dying:
    """The connections of a rank that is killed when a part of a large message has left."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def send(self, tensors: list[torch.Tensor], *where: int) -> Any:
        work = self._gloo.send(tensors, *where)
        if tensors[0].numel() > LENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return work


def lend(rank: int) -> dict[str, Any]:
    """Rank 0 lends a batch, and is killed meanwhile."""
    peers = ProcessGroupPeers()
    if rank == 0:
        peers._gloo = Dying(peers._gloo)
    try:
        peers.lend(torch.zeros(LENT) if rank == 0 else None)
    except PeerFailed as exc:
        return {"error": str(exc)}
    return {"error": ""}


def run_rank(rank: int, job: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / job}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = lend(rank) if job == LENDER_DIES else train(job, rank)
    (folder / f"{job}.{rank}.json").write_text(json.dumps(found))


def main(folder: str) -> None:
    context = multiprocessing.get_context("fork")
    for job in (*KILLED, LENDER_DIES):
        ranks = [context.Process(target=run_rank, args=(rank, job, Path(folder))) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            rank.kill()


if __name__ == "__main__":
    main(sys.argv[1])
