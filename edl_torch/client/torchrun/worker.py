"""A worker of a torchrun job: it opens the job's store, and ends with its agent.

It must not know what is written in the store.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from edl_torch.client.torchrun.job import Job
from edl_torch.errors import MasterStartError
from edl_torch.system.processes import until_gone

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

STORE_S = 300.0
KILL_S = 30.0  # what torchrun itself gives a worker after SIGTERM
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # each incarnation gets a store of its own

log = logging.getLogger("edl_torch.torchrun")


def join_job(job: Job) -> Store:
    """Open the store of the job; from now on this process ends when its agent is gone.

    Raises MasterStartError where the store cannot be reached.
    """
    _end_with(job.agent)
    _warn_of_store(job)
    return _store(job.host, job.port, is_master=job.rank == 0 and not job.agents_store)


@cache  # a store that this process keeps must live as long as it
def _store(host: str, port: int, *, is_master: bool) -> Store:
    import torch.distributed as dist

    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=is_master, multi_tenant=True, timeout=timedelta(seconds=STORE_S)
        )
    except RuntimeError as exc:  # torch's errors of the network are such
        raise MasterStartError(
            f"the store of this job at {host}:{port} (MASTER_ADDR, MASTER_PORT) cannot be reached. Where "
            f"nodes come and go, give all of them {VARIABLE} in their environment: without it torchrun's "
            f"agents may name the store of a node that has left. {exc}"
        ) from exc
    return store


@cache
def _warn_of_store(job: Job) -> None:
    """Say at the start what would else be seen when the node of rank 0 has left."""
    if job.agents_store and job.least_nodes != job.most_nodes and job.rank == 0:
        log.warning(
            "this job runs on %d to %d nodes: give all of them %s in their environment, else torchrun's "
            "agents may name the store of a node that has left, and the job ends",
            *(job.least_nodes, job.most_nodes, VARIABLE),
        )


@cache
def _end_with(agent: int) -> None:
    """End this process, as its torchrun agent would, when the agent is gone.

    Nobody else would: it would go on in the job, unwatched, and hold back the restart of the others.
    """

    def watch() -> None:
        until_gone(agent)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(KILL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="edl-torchrun-agent", daemon=True).start()
