"""Replicas of a torchft job on threads, whose model counts how often it has learnt each record.

Lighthouse, managers, process groups, transport of state and optimizer wrapper are torchft's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

from edl_torch import ElasticDataLoader, MasterClient
from edl_torch.integrations.torchft import attach_manager
from edl_torch.master.embedded import LocalMaster
from edl_torch.readers import MapDatasetReader

Fault = Callable[["Replica"], None]


def no_fault(_: Replica) -> None:
    """Nothing goes wrong."""


class Replica:
    """One replica group of one rank. `before` and `after` are called around the sum of the gradients.

    For other replicas it waits `timeout_s`: one that leaves closes its connections, one that is killed while
    they are made does not.

    With a `checkpoint` it saves each step that was committed there, and goes on from it: where it is alone.
    """

    def __init__(
        self,
        number: int,
        lighthouse: str,
        master: LocalMaster | MasterClient,
        records: int,
        *,
        epochs: int = 2,
        window: int = 1,
        num_workers: int = 0,
        audit_dir: Path | None = None,
        checkpoint: Path | None = None,
        before: Fault = no_fault,
        after: Fault = no_fault,
        timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        self.number = number
        self.window = window
        self.counts = torch.nn.Parameter(torch.zeros(records))
        self._checkpoint = checkpoint
        self._before = before
        self._after = after
        self.attempts = 0
        self.begin: Callable[[], object] = lambda: None  # waits, before the first step, for the others
        self.failures: list[float] = []  # when a commit failed
        self.ended = float("inf")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(timeout=timedelta(seconds=timeout_s))
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self._load,
            state_dict=lambda: {"counts": self.counts.detach().clone()},
            min_replica_size=1,
            timeout=timedelta(seconds=timeout_s),
            quorum_timeout=timedelta(seconds=20),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{number}",
            **options,
        )
        self.loader = ElasticDataLoader(
            MapDatasetReader(range(records)),
            4,
            num_epochs=epochs,
            shuffle=True,
            records_per_shard=8,
            master_client=master,
            audit_dir=audit_dir,
            synchronous=False,
            num_workers=num_workers,
        )

    def _load(self, state: Any) -> None:
        with torch.no_grad():
            self.counts.copy_(state["counts"])

    def train(self) -> None:
        """The loop."""
        attach_manager(self.loader, self.manager)
        commit = self.manager.should_commit

        def counted() -> bool:
            committed = commit()
            if not committed:
                self.failures.append(time.monotonic())
            return committed

        self.manager.should_commit = counted
        optimizer = Optimizer(self.manager, torch.optim.SGD([self.counts], lr=1.0))
        if self._checkpoint:
            self._restore(self._checkpoint)
        gathered = 0
        for _ in self.loader.epochs():
            for batch in self.loader:
                if not gathered:
                    optimizer.zero_grad()
                self.backward(batch)
                gathered += 1
                if gathered == self.window:
                    self.step(optimizer)
                    gathered = 0
            if gathered:
                self.step(optimizer)
                gathered = 0
        self.ended = time.monotonic()

    @property
    def failed(self) -> int:
        """How many commits failed."""
        return len(self.failures)

    def backward(self, batch: torch.Tensor) -> None:
        """Each record of the batch counts one."""
        self.loader.weigh(self.counts[batch].mean().neg()).backward()

    def step(self, optimizer: Any) -> None:
        """Add up what all replicas have, and step on it, or not."""
        self.attempts += 1
        if self.attempts == 1:
            self.begin()
        self._before(self)
        self.manager.allreduce(self.counts.grad, reduce_op=dist.ReduceOp.SUM).wait()
        self._after(self)
        failed = self.failed
        optimizer.step()
        if self._checkpoint and self.failed == failed:
            self._save(self._checkpoint)

    def _restore(self, path: Path) -> None:
        saved = torch.load(path) if path.exists() else None
        self.loader.load_state_dict(saved and saved["loader"])
        if saved:
            self._load(saved["model"])
            self.manager.load_state_dict(saved["torchft"])

    def _save(self, path: Path) -> None:
        state = {
            "model": {"counts": self.counts.detach()},
            "torchft": self.manager.state_dict(),
            "loader": self.loader.state_dict(),
        }
        torch.save(state, path.with_suffix(".half"))
        path.with_suffix(".half").rename(path)

    def close(self) -> None:
        """Leave the master and the lighthouse."""
        self.loader.close()
        self.manager.shutdown(wait=False)
        self.group.abort()


def run(*replicas: Replica, delays_s: tuple[float, ...] = (), timeout_s: float = 120.0) -> None:
    """Train on all of them at once, or after their delays, to the end of the data."""
    errors: list[BaseException] = []

    def one(replica: Replica, delay_s: float) -> None:
        time.sleep(delay_s)
        try:
            replica.train()
        except BaseException as exc:  # noqa: BLE001  raised below
            errors.append(exc)
        finally:
            replica.close()

    if not delays_s:
        barrier = threading.Barrier(len(replicas), timeout=timeout_s)
        for replica in replicas:
            replica.begin = barrier.wait
    waits = [*delays_s, *[0.0] * (len(replicas) - len(delays_s))]
    threads = [
        threading.Thread(target=one, args=pair, daemon=True) for pair in zip(replicas, waits, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a replica did not come to its end"
