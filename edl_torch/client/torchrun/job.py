"""A worker of a torchrun job: what torchrun tells it, its agent, the job's store, and its process group.

The environment, the process tree and the agent's command line are read without torch. What is written in the
store is not known here.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edl_torch.errors import InvalidArgument, MasterStartError
from edl_torch.system.fresh_names import fresh_name
from edl_torch.system.processes import until_gone

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A worker's view of its job, in torchrun's own words.

    Attributes:
        run_id: `--rdzv-id`.
        rank: of this worker in this incarnation; it may have another one in the next.
        world_size: number of workers.
        node: of this agent among the agents.
        nodes: number of agents, in this incarnation.
        least_nodes, most_nodes: of agents in any incarnation, as torchrun was told; else 1.
        host, port: of the job's store.
        agents_store: whether an agent keeps that store, else the worker of rank 0 does.
        agent: the process that started this worker, and starts the next one.
        log_dir: a folder of this agent alone that lives as long as it does, where it has one.
    """

    run_id: str
    rank: int
    world_size: int
    node: int
    nodes: int
    least_nodes: int
    most_nodes: int
    host: str
    port: int
    agents_store: bool
    agent: int
    log_dir: Path | None

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Job:
        """Read it. Raises InvalidArgument that names the variable which is not as torchrun sets it."""
        run_id = _text(env, "TORCHELASTIC_RUN_ID")
        agent = _agent(run_id)
        least, most = _nodes(_arguments(agent), env)
        return cls(
            run_id=run_id,
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            node=_number(env, "GROUP_RANK"),
            nodes=_number(env, "GROUP_WORLD_SIZE"),
            least_nodes=least,
            most_nodes=most,
            host=_text(env, "MASTER_ADDR"),
            port=_number(env, "MASTER_PORT"),
            agents_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent=agent,
            log_dir=_log_dir(env.get("TORCHELASTIC_ERROR_FILE", "")),
        )


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise InvalidArgument(
            f"{name} is not set, though TORCHELASTIC_RUN_ID is: start this program with torchrun, or name "
            "the master in EDL_MASTER_ADDR"
        )
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = _text(env, name)
    if not (value.isascii() and value.isdigit()):
        raise InvalidArgument(f"{name} is {value!r}: torchrun sets it to a number")
    return int(value)


def _log_dir(error_file: str) -> Path | None:
    """torchrun tells each worker of a file `DIR/attempt_N/LOCAL_RANK/error.json`; DIR is the agent's own."""
    path = Path(error_file)
    if not (path.is_absolute() and path.parent.parent.name.startswith("attempt_")):
        return None
    folder = path.parents[2]
    return folder if os.access(folder, os.W_OK) else None


def _nodes(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[int, int]:
    """`--nnodes=LEAST:MOST`, or the variable for it. torchrun does not tell its workers; 1 without."""
    given = env.get("PET_NNODES", "1")
    for argument, following in pairwise((*arguments, "")):
        name, equals, value = argument.partition("=")
        if name == "--nnodes":
            given = value if equals else following
            break
    ends = [end.strip() for end in given.split(":")]
    if not all(end.isascii() and end.isdigit() for end in ends):
        return 1, 1
    return int(ends[0]), int(ends[-1])


def _arguments(pid: int) -> list[str]:
    """The command line of a process; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _agent(run_id: str) -> int:
    """The parent, or, behind shells that torchrun was told to start, the first that is none of the job's."""
    pid = os.getppid()
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    try:
        while mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            status = Path(f"/proc/{pid}/stat").read_text()
            pid = int(status.rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # no /proc, or another user's process
        return pid
    return pid


# The store, and the agent -----------------------------------------------------------------------------

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


# The process group ------------------------------------------------------------------------------------

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
