"""One of two ranks on hosts of their own whose default group is not over gloo, as with nccl.

    python peers_process.py RANK HOST_OF_RANK_0

Prints what rank 0 shares.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import quick_imports
import torch.distributed as dist
from lockstep_process import elsewhere

from edl_torch.data.ranks.process_group import ProcessGroupPeers

PORT = 29_999
TIMEOUT_S = 30.0


def main(rank: int, host: str) -> None:
    quick_imports.over()
    dist.Backend.register_backend("elsewhere", elsewhere, devices=["meta"])
    store = dist.TCPStore(host, PORT, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("elsewhere", store=store, rank=rank, world_size=2)
    peers = ProcessGroupPeers(timeout_s=TIMEOUT_S)
    print(peers.share(f"said by rank {rank}"), flush=True)
    peers.share("")  # rank 0 keeps the store until all have read


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
