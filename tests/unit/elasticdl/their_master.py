"""A master with the semantics of ElasticDL's task manager and servicer, by field number, with faults.

Written from that project's `task_manager.py` and `servicer.py`; what it does wrongly is wrong here: a task
that failed three times is dropped, the next epoch begins in the middle of one, unknown ids are passed over.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

import grpc
from by_number import (
    EVALUATION,
    NONE,
    TRAIN_END_CALLBACK,
    TRAINING,
    WAIT,
    WireTask,
    fields,
    number_field,
    one,
    read_map,
    signed,
)

Shards = list[tuple[str, int, int]]  # name, start, count


class TheirMaster:
    """Serves on loopback from its making to `close`. `lose` names calls whose next answers are lost."""

    def __init__(
        self, shards: Iterable[tuple[str, int, int]] = (), *, records_per_task: int = 8, num_epochs: int = 1
    ) -> None:
        self.lock = threading.Lock()
        self.params: list[dict[int, int]] = []
        self.failures: list[str] = []
        self.fail_count = 0
        self.outcomes: Counter[int] = Counter()  # record -> how often it was reported as done
        self.dropped: list[WireTask] = []
        self.waits = 0
        self.calls: Counter[str] = Counter()
        self.callback_wanted = False
        self.evaluation: list[WireTask] = []
        self.lose: Counter[str] = Counter()
        self.refuse: Counter[str] = Counter()
        self._shards: Shards = list(shards)
        self._per_task, self._num_epochs = records_per_task, num_epochs
        self._shuffle = self._shuffle_shards = False
        self._epoch = self._task_id = 0
        self._todo: list[WireTask] = []
        self.doing: dict[int, tuple[int, WireTask]] = {}
        self._retries: Counter[tuple[int, int, int]] = Counter()
        self._random = random.Random(5)
        if self._shards:
            self._create()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._faulty(name, answer))
            for name, answer in (
                ("get_task", self._get_task),
                ("report_task_result", self._report),
                ("report_training_params", self._set_params),
            )
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("proto.Master", handlers),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """End calls that wait, and return when no further one is answered."""
        self._server.stop(None).wait()

    def _faulty(self, name: str, answer: Callable[[bytes], bytes]) -> Any:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            with self.lock:
                self.calls[name] += 1
                refused, lost = self.refuse[name] > 0, self.lose[name] > 0
                self.refuse[name] -= refused
                self.lose[name] -= lost
            if refused:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            with self.lock:
                data = answer(request)
            if lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
            return data

        return handle

    def _set_params(self, request: bytes) -> bytes:
        params = {key: values[0] for key, values in fields(request).items()}
        self.params.append(params)  # type: ignore[arg-type]
        if self._shards:
            return b""
        self._per_task = params[1] * params.get(6, 8)  # type: ignore[operator]
        self._num_epochs = signed(params.get(2, 0), 32)  # type: ignore[arg-type]
        self._shuffle, self._shuffle_shards = bool(params.get(4)), bool(params.get(5))
        self._shards = [("", 0, params[3])]  # type: ignore[list-item]
        self._create()
        return b""

    def _create(self) -> None:
        size = sum(count for *_, count in self._shards)
        order = self._random.sample(range(size), size) if self._shuffle else []
        tasks = [
            WireTask(
                name=name,
                start=start,
                end=min(start + self._per_task, first + count),
                indices=order[start : min(start + self._per_task, first + count)],
                type=TRAINING,
            )
            for name, first, count in self._shards
            for start in range(first, first + count, self._per_task)
        ]
        if self._shuffle_shards:
            self._random.shuffle(tasks)
        self._todo += tasks

    def _get_task(self, request: bytes) -> bytes:
        asked = fields(request)
        worker: int = one(asked, 1, 0)  # type: ignore[assignment]
        queue = self.evaluation if one(asked, 2, NONE) == EVALUATION else self._todo
        if queue is self._todo and not self._todo:
            self._epoch += 1
            if self._num_epochs <= 0 or self._epoch < self._num_epochs:
                self._create()
        if queue:
            task = queue.pop(0)
            self._task_id += 1
            task.task_id = self._task_id
            self.doing[task.task_id] = worker, task
            return task.encode()
        if self.doing or self._todo:
            self.waits += 1
            return WireTask(type=WAIT).encode()
        if self.callback_wanted:
            self.callback_wanted = False
            self._todo.append(WireTask(start=0, end=1, type=TRAIN_END_CALLBACK))
            return WireTask(type=WAIT).encode()
        return number_field(3, 7) + WireTask().encode()  # a model version, and the end

    def _report(self, request: bytes) -> bytes:
        result = fields(request)
        _, task = self.doing.pop(one(result, 1, 0), (0, None))  # type: ignore[call-overload]
        if task is None:
            return b""
        error = one(result, 2, b"").decode()  # type: ignore[union-attr]
        self.fail_count += read_map(result.get(3, ())).get(b"fail_count", 0)  # type: ignore[operator]
        if not error:
            if task.type == TRAINING:
                self.outcomes.update(task.numbers)
            return b""
        self.failures.append(error)
        self._fail(task)
        return b""

    def _fail(self, task: WireTask) -> None:
        key = self._epoch, task.start, task.end
        self._retries[key] += 1
        if self._retries[key] >= 3:
            self.dropped.append(task)
        else:
            self._todo.append(task)

    def worker_died(self, worker_id: int) -> None:
        with self.lock:
            for number, (worker, task) in tuple(self.doing.items()):
                if worker == worker_id:
                    del self.doing[number]
                    self._fail(task)
