"""Masters of ours and workers of theirs: one that knows nothing but bytes, and a loop in virtual time."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
from by_number import WireTask, get_task_request, params_request, result_request
from master_kit import ServerThread
from their_master import TheirMaster

from edl_torch import ElasticDLMasterClient
from edl_torch.elasticdl import make_servicer
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import TaskType

TIMEOUT_S = 20.0  # of a call: a test that hangs says where


class Server(ServerThread):
    """A master on a loop of its own, and workers of theirs."""

    def __init__(self, *arguments: Any, task_timeout_s: float = 300.0) -> None:
        foreign = [make_servicer({"elasticdl_task_timeout_s": task_timeout_s})]
        super().__init__(*arguments, foreign=foreign)

    def worker(self, worker_id: int = 0) -> Worker:
        self._clients.append(Worker(self.address, worker_id))
        return self._clients[-1]

    @property
    def training(self) -> Any:
        return self.dispatcher.dataset_status("training")


class Worker:
    """ElasticDL's calls over grpc, by method path and bytes."""

    def __init__(self, address: str, worker_id: int) -> None:
        self.worker_id = worker_id
        size = 64 << 20
        options = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]
        options += [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]
        self._channel = grpc.insecure_channel(address, options=options)
        calls = ("get_task", "report_task_result", "report_training_params")
        self._get, self._report, self._params = (
            self._channel.unary_unary(f"/proto.Master/{name}") for name in calls
        )

    def get(self, task_type: int = 0, timeout_s: float = TIMEOUT_S) -> WireTask:
        request = get_task_request(self.worker_id, task_type)
        return WireTask.decode(self._get(request, timeout=timeout_s))

    def later(self, task_type: int = 0) -> Any:
        """A call that is under way: a future of a task's bytes. It has no deadline, as theirs has none."""
        return self._get.future(get_task_request(self.worker_id, task_type))

    def report(self, task: WireTask | int, err_message: str = "", fail_count: int = 0) -> None:
        task_id = task if isinstance(task, int) else task.task_id
        counters = {"fail_count": fail_count} if fail_count else None
        assert self._report(result_request(task_id, err_message, counters), timeout=TIMEOUT_S) == b""

    def params(self, **params: Any) -> None:
        assert self._params(params_request(**params), timeout=TIMEOUT_S) == b""

    def drain(self, seen: Counter[tuple[int, int]]) -> WireTask:
        """Train until the master says something else than a task, counting (epoch, record)."""
        while (task := self.get()).type == 1:
            seen.update((task.epoch, number) for number in task.numbers)
            self.report(task)
        return task

    def close(self) -> None:
        self._channel.close()


# A reader of numbers ----------------------------------------------------------------------------------------


SIZE = 40

Start = Callable[..., TheirMaster]
Connect = Callable[..., ElasticDLMasterClient]


class Numbers(AbstractDataReader):
    """Record i of the storage called name is base + i; those in `bad` cannot be read."""

    def __init__(self, counts: dict[str, int] | None = None, bad: frozenset[int] = frozenset()) -> None:
        self.counts = {"": SIZE} if counts is None else counts
        self.bases = dict(zip(self.counts, (1000 * n for n in range(len(self.counts))), strict=True))
        self.bad = bad

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        return self.counts

    def read_records(self, task: Any) -> Iterator[int]:
        return (self.read_record(task.shard.name, index) for index in range(task.start, task.end))

    def read_record(self, name: str, index: int) -> int:
        if self.bases[name] + index in self.bad:
            raise ValueError("broken")
        return self.bases[name] + index


# Virtual time -----------------------------------------------------------------------------------------------
# An event loop whose time stands still while anybody can act, and then jumps to what is due next.
#
# It knows no master; nothing on it may wait for another thread or for the network.


LONGEST_S = 86_400.0


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing is due"
            self.now += max(timeout, 0.0)
            assert self.now < LONGEST_S, "it waits for ever"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in no time; `time()` says how long they took."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on such a loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **fixtures))

    return run
