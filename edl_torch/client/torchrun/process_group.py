"""The process group of a torchrun job, whose workers torchrun may have restarted.

It must not know of a master.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from edl_torch.client.torchrun.job import Job
from edl_torch.client.torchrun.worker import join_job
from edl_torch.system.fresh_names import fresh_name

START_TOGETHER_S = 1800.0  # ranks may make their processes ready at unequal speed


def init_process_group(
    backend: str | None = None, *, timeout_s: float | None = None, **arguments: Any
) -> None:
    """As `torch.distributed.init_process_group(backend, …)`, right after a restart too.

    torchrun's agents may keep the job's store over restarts, with the addresses of workers that are gone.
    Here each incarnation has names of its own. Elsewhere than under such agents it is torch's own function.
    Without `timeout_s` ranks wait for each other at the start for half an hour, and then as torch has it
    for that backend.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if "TORCHELASTIC_RUN_ID" not in os.environ or not (job := Job.from_env()).agents_store:
        dist.init_process_group(backend, timeout=timeout, **arguments)
        return
    store = join_job(job)
    patience_s = START_TOGETHER_S if timeout_s is None else timeout_s
    name = fresh_name(store, f"edl_torch/{job.run_id}/workers", job.rank, job.world_size, patience_s)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"edl_torch/{job.run_id}/{name}", store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
        **arguments,
    )
