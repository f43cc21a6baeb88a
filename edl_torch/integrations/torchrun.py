"""A job under torchrun finds its master, or starts it, through the job's own store.

Workers agree who starts it; it runs beside the agents, so that it survives the workers' restarts. It must not
know what a master does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from edl_torch.data.fresh_names import fresh_name
from edl_torch.errors import EdlError, MasterStartError
from edl_torch.integrations.beside_agent import BesideAgent
from edl_torch.integrations.job import Job
from edl_torch.integrations.notice import Notice
from edl_torch.master.with_process import until_gone
from edl_torch.rpc.credentials import AccessToken, Credentials

START_S = 60.0  # from a worker's claim to start the master until the others try it
START_TOGETHER_S = 1800.0  # ranks may make their processes ready at unequal speed
NODES_S = 10.0  # how long a word from each node is waited for
STORE_S = 300.0
KILL_S = 30.0  # what torchrun itself gives a worker after SIGTERM
LOOK_S = 0.02
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # each incarnation gets a store of its own

log = logging.getLogger("edl_torch.torchrun")


def master_of_job() -> tuple[str, Credentials]:
    """The address of this job's master, which is started where there is none, and what opens its door.

    Also ties this process to its torchrun agent: it ends, as the agent would end it, when the agent is gone.
    Raises MasterStartError where no master can be started, InvalidArgument for an environment that is not
    torchrun's.
    """
    job = Job.from_env()
    _end_with(job.agent)
    _warn_of_store(job)
    store = _store(job.host, job.port, is_master=job.rank == 0 and not job.agents_store)
    notice = Finder(job, store).find()
    return notice.address, _credentials(notice)


def _credentials(notice: Notice) -> Credentials:
    """The user's own; a token of the job's may go where the job's other words go, without TLS too."""
    given = Credentials.from_env()
    if not notice.token:
        return given
    return replace(given, token=AccessToken(notice.token.encode()), insecure=True)


def init_process_group(
    backend: str | None = None, *, timeout_s: float | None = None, **arguments: Any
) -> None:
    """As `torch.distributed.init_process_group(backend, …)`, right after a restart too.

    torchrun's agents may keep the job's store over restarts, with the addresses of workers that are gone.
    Here each incarnation has names of its own. Elsewhere than under such agents it is torch's own function.
    Without `timeout_s` ranks wait for each other at the start for half an hour, and then as torch has it
    for that backend.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if "TORCHELASTIC_RUN_ID" not in os.environ or not (job := Job.from_env()).agents_store:
        dist.init_process_group(backend, timeout=timeout, **arguments)
        return
    _end_with(job.agent)
    _warn_of_store(job)
    store = _store(job.host, job.port, is_master=False)
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


class Finder:
    """One worker's part in the agreement on the master.

    Masters of a job have numbers, from 1. Whoever is first to claim a number starts that master and pins up a
    notice; the others read it. A master that does not answer is followed by the next number.
    """

    def __init__(self, job: Job, store: Store, beside: BesideAgent | None = None) -> None:
        self._job = job
        self._board = PrefixStore(f"edl_torch/{job.run_id}/master", store)
        self._beside = BesideAgent(job) if beside is None else beside

    def find(self) -> Notice:
        """A master that answers."""
        number, newest = self._seen()
        if newest is not None and newest.answers:
            return newest
        if number == 1:
            kept = self._beside.running() or Notice()
            self._board.set(f"node/{self._job.node}", kept.text)
        while True:
            if self._board.add(f"claim/{number}", 1) == 1:
                return self._pin(number, self._from_before if number == 1 else self._beside.start)
            if self._pinned(number):
                return self._read(number).here()
            number += 1

    def _seen(self) -> tuple[int, Notice | None]:
        """The first number without a notice that may still come, and the newest notice.

        A number whose notice is missing, with later ones claimed, belongs to a worker that died on the way.
        """
        number, newest = 1, None
        while self._board.check([f"claim/{number}"]):
            if self._board.check([f"notice/{number}"]):
                newest = self._read(number)
            elif not self._board.check([f"claim/{number + 1}"]):
                return number, newest
            number += 1
        return number, newest

    def _from_before(self) -> Notice:
        """A master that an agent has kept from before this store, else a new one."""
        keys = [f"node/{node}" for node in range(self._job.nodes)]
        _within(NODES_S, lambda: self._board.check(keys))
        for key in keys:
            if self._board.check([key]):
                kept = Notice.read(self._board.get(key))
                if kept.answers:
                    return kept
        return self._beside.start()

    def _pin(self, number: int, make: Callable[[], Notice]) -> Notice:
        try:
            notice = make()
        except EdlError as error:  # the others must not wait for it
            self._board.set(f"notice/{number}", Notice(error=str(error)).text)
            raise
        self._board.set(f"notice/{number}", notice.text)
        return notice

    def _pinned(self, number: int) -> bool:
        return _within(START_S, lambda: self._board.check([f"notice/{number}"]))

    def _read(self, number: int) -> Notice:
        return Notice.read(self._board.get(f"notice/{number}"))


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
    return True


@cache  # a store that this process keeps must live as long as it
def _store(host: str, port: int, *, is_master: bool) -> Store:
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
