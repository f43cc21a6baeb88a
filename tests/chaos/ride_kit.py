"""A master that stops and starts in this process, and trainers in threads that note what they trained on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from loop_thread import LoopThread

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.status import DatasetStatus
from edl_torch.master.server import MasterServer
from edl_torch.readers import MapDatasetReader

BATCH = 4


class CountingDispatcher(Dispatcher):
    """Counts heartbeats, and the sessions that it gave up."""

    beats = 0
    expired = 0
    stalled = 0

    def heartbeat(self, *args: Any, **kwargs: Any) -> None:
        super().heartbeat(*args, **kwargs)
        self.beats += 1

    def expire(self, now: float) -> Any:
        released = super().expire(now)
        self.expired += len([item for item in released if not item.stalled])
        self.stalled += len([item for item in released if item.stalled])
        return released


class Master:
    """A real server over grpc on a loop of its own; `stop()` and `start()` keep the address."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.forget("first")
        self._loop = LoopThread()
        self.address = "127.0.0.1:0"
        self._server: MasterServer | None = None
        self.start()

    def forget(self, ledger_id: str) -> None:
        """The next start is that of a master without a journal."""
        self.dispatcher = CountingDispatcher(ledger_id=ledger_id, **self.options)

    def start(self) -> None:
        async def begin() -> str:
            self._server = MasterServer(self.dispatcher, self.address)
            return str(await self._server.start())

        self.address = self._run(begin())

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._run(server.stop())

    def status(self) -> DatasetStatus:
        return self.dispatcher.dataset_status("training")

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run(coroutine)

    def close(self) -> None:
        self.stop()
        self._loop.close()


class Trainer(threading.Thread):
    """Trains a whole job. `step(self)` runs for each batch, before it counts as trained on.

    `accumulate` is how many batches go into one step of the attached optimizer; 0 attaches none.
    """

    def __init__(
        self,
        address: str,
        step: Callable[[Trainer], None] = lambda _: None,
        *,
        size: int = 400,
        accumulate: int = 0,
        master_timeout_s: float = 20.0,
        **options: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.trained: list[int] = []
        self.when: list[float] = []
        self.error: Exception | None = None
        self._step = step
        self._accumulate = accumulate
        self._options = {"records_per_shard": 20, **options}
        self._reader = MapDatasetReader(range(size))
        self._client = MasterClient(address, "trainer", master_timeout_s=master_timeout_s)
        self.session = ""
        self.start()

    @property
    def batches(self) -> int:
        """How many it has trained on."""
        return len(self.when)

    @property
    def attending(self) -> bool:
        """Whether its stream stands."""
        return self._client._heartbeats[self.session].listener.standing

    def run(self) -> None:
        try:
            with DataShardService(BATCH, self._client, reader=self._reader, **self._options) as service:
                self._train(service)
        except Exception as error:  # noqa: BLE001  the top of a thread: `done` raises it
            self.error = error
        finally:
            self._client.close()

    def _train(self, service: DataShardService) -> None:
        self.session = service.session.id
        optimizer = Optimizer()
        if self._accumulate:
            service.attach(optimizer)
        loader = ElasticDataLoader(ShardedDataset(service, self._reader))
        while not service.finished:
            for batch in loader:
                self._step(self)
                self.trained += batch.tolist()
                self.when.append(time.monotonic())
                if self._accumulate and self.batches % self._accumulate == 0:
                    optimizer.step()
            optimizer.step()

    def done(self, timeout_s: float = 60.0) -> Trainer:
        """Wait for its end, and raise what it raised."""
        self.join(timeout_s)
        assert not self.is_alive(), f"still training after {timeout_s} s: {self.batches} batches"
        if self.error is not None:
            raise self.error
        return self


class Optimizer:
    """One that does nothing but call its hooks."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def register_step_post_hook(self, hook: Any) -> Any:
        self._hooks.append(hook)
        return self

    def remove(self) -> None:
        self._hooks.clear()

    def step(self) -> None:
        for hook in self._hooks:
            hook(self, (), {})


class Gate:
    """A step that passes so many batches and then waits, with one more in hand, for `open()`."""

    def __init__(self, batches: int) -> None:
        self._left = batches
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, trainer: Trainer) -> None:
        if trainer.batches < self._left:
            return
        self._reached.set()
        assert self._opened.wait(60), "the gate was never opened"

    def open(self) -> None:
        self._opened.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(60), f"nobody trained {self._left} batches"


def check(master: Master, *trained: list[int], size: int = 400, doubled: int = 0) -> None:
    """Every record has one outcome; all were trained on, and at most `doubled` of them twice."""
    status = master.status()
    assert status.finished
    assert status.acknowledged == size
    counts = Counter(record for records in trained for record in records)
    assert set(counts) == set(range(size))
    assert max(counts.values()) <= 2
    assert sum(count - 1 for count in counts.values()) <= doubled
