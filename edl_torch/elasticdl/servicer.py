"""ElasticDL's own calls on the master's port, for its unmodified clients.

Converts, waits and answers; `ElasticDLAdapter` decides which worker gets which task. Every answer must go
through `durably`: one that the journal does not have yet could be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc.aio

from edl_torch.core.calls import LeaseAnswer, LeaseCall, PassState
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.limits import printable
from edl_torch.elasticdl import wire
from edl_torch.elasticdl.adapter import ElasticDLAdapter
from edl_torch.elasticdl.wire import ForeignTask, GetTaskCall
from edl_torch.errors import EdlError, MasterUnavailable, StaleLease, UnknownDataset
from edl_torch.master.host import MasterHost, log_released
from edl_torch.rpc.status import to_status
from edl_torch.shard import TaskType

Context = grpc.aio.ServicerContext[bytes, bytes]

log = logging.getLogger("edl_torch.master")

MARGIN_S = 0.5  # before a caller's own deadline
LOOK_AGAIN_S = 0.05  # at what is about to change
TENDER_PAUSE_S = 1.0  # after a failure of the tender itself

END = ForeignTask()
WAIT = ForeignTask(type=TaskType.WAIT)


class ElasticDLServicer:
    """Servicer of ElasticDL's three calls, with a task for deadlines. `start()`, `close()` run on the loop.

    A worker that holds no task waits inside `get_task`, because clients of that protocol take WAIT for the
    end. One that holds a task is told WAIT at once: two such could wait for each other.
    """

    service = wire.SERVICE

    def __init__(self, host: MasterHost, adapter: ElasticDLAdapter) -> None:
        self._host = host
        self._adapter = adapter
        self._locks: dict[tuple[int, str], asyncio.Lock] = {}
        self._tender: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        methods = {
            wire.GET_TASK: self.get_task,
            wire.REPORT_TASK_RESULT: self.report_task_result,
            wire.REPORT_TRAINING_PARAMS: self.report_training_params,
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))

    def start(self) -> None:
        """Begin to watch deadlines; the host must have started."""
        self._host.apply(lambda _, now: self._adapter.resume(now))
        self._tender = asyncio.create_task(self._tend(), name="edl-elasticdl")

    async def close(self) -> None:
        """End the task that `start` began."""
        if self._tender is not None:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)

    # Calls ------------------------------------------------------------------------------------------------

    async def get_task(self, request: bytes, context: Context) -> bytes:
        """Answer with a `Task`."""
        lent: list[ForeignTask] = []

        async def answer() -> bytes:
            task = await self._task(wire.CALL.read(request), context.time_remaining())
            lent.append(task)
            return wire.TASK.write(task)

        try:
            return await self._answered(answer, context)
        except asyncio.CancelledError:  # nobody hears the answer any more
            self._host.apply(lambda _, now: self._adapter.take_back(lent, now))
            raise

    async def report_task_result(self, request: bytes, context: Context) -> bytes:
        """Apply a result. A task that is not lent any more is no error, as with ElasticDL's master."""

        async def answer() -> bytes:
            result = wire.RESULT.read(request)
            if result.failure:
                why = self._host.dispatcher.limits.shorten(result.failure)
                log.warning("elasticdl task=%d failed: %s", result.task_id, printable(why))
            if not self._host.apply(lambda _, now: self._adapter.report(result, now)):
                log.warning("elasticdl task=%d is not lent (any more): its report is ignored", result.task_id)
            return wire.EMPTY

        return await self._answered(answer, context)

    async def report_training_params(self, request: bytes, context: Context) -> bytes:
        """Register the training data; a registration that is there already stands."""

        async def answer() -> bytes:
            params = wire.PARAMS.read(request)
            for difference in self._host.apply(lambda *_: self._adapter.define(params)):
                log.warning("elasticdl: the dataset stays as it is: %s", difference)
            self._host.wake()
            return wire.EMPTY

        return await self._answered(answer, context)

    async def _answered(self, answer: Callable[[], Awaitable[bytes]], context: Context) -> bytes:
        try:
            return await self._host.durably(answer())
        except EdlError as error:
            log.warning("elasticdl call refused: %s", printable(str(error)))
            code, details, metadata = to_status(error)
            await context.abort(code, details, metadata)

    # Waiting ----------------------------------------------------------------------------------------------

    async def _task(self, call: GetTaskCall, remaining_s: float | None) -> ForeignTask:
        left_s = float("inf") if remaining_s is None else max(0.0, remaining_s - MARGIN_S)
        deadline = asyncio.get_running_loop().time() + left_s
        ledger = self._adapter.find(call.task_type)
        if ledger is None and self._adapter.find(TaskType.TRAINING) is not None:
            return WAIT if self._adapter.training_goes_on() else END
        dataset = await self._dataset(call, deadline) if ledger is None else ledger.spec.name
        if dataset is None:
            return WAIT
        lock = self._locks.setdefault((call.worker_id, dataset), asyncio.Lock())
        async with lock:  # a session's lease calls come one after another
            return await self._lease(call, dataset, deadline)

    async def _dataset(self, call: GetTaskCall, deadline: float) -> str | None:
        """Wait until somebody describes the data; None when the caller cannot wait so long."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._adapter.task_timeout_s
        while (ledger := self._adapter.find(call.task_type)) is None:
            self._check_serving()
            if loop.time() >= deadline:
                return None
            if loop.time() >= patience:
                raise UnknownDataset(
                    f"worker {call.worker_id} asks for tasks, and nobody has said of which data: give "
                    f"num_epochs and dataset_size to its DataShardService, or start the master with "
                    f"--training_data"
                )
            await self._host.changed(min(deadline, patience) - loop.time())
        return ledger.spec.name

    async def _lease(self, call: GetTaskCall, dataset: str, deadline: float) -> ForeignTask:
        loop = asyncio.get_running_loop()
        while True:
            self._check_serving()
            ask, may_wait = self._host.apply(lambda _, now: self._adapter.ask(call, dataset, now))
            longest_s = self._adapter.task_timeout_s / 3 if may_wait else 0.0
            wait_s = max(0.0, min(longest_s, deadline - loop.time()))
            answer = await self._lent(ask, wait_s)
            if answer is not None and answer.grants:
                return self._host.apply(partial(self._hand_out, ask, answer))
            if answer is not None and answer.state is PassState.FINISHED:
                return END
            if not may_wait or loop.time() >= deadline:
                return WAIT
            if answer is None or answer.state is not PassState.OPEN:
                await self._host.changed(LOOK_AGAIN_S)

    def _hand_out(self, ask: LeaseCall, answer: LeaseAnswer, _: Dispatcher, now: float) -> ForeignTask:
        return self._adapter.hand_out(ask, answer.grants, now)

    async def _lent(self, ask: LeaseCall, wait_s: float) -> LeaseAnswer | None:
        """The answer; None when the dataset went back to a checkpoint meanwhile, or the session was lost."""
        with contextlib.suppress(StaleLease):
            return await self._host.call(ask, wait_s)
        return None

    def _check_serving(self) -> None:
        if self._host.draining:
            raise MasterUnavailable("the master stops; its data is not finished")

    # Deadlines --------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        while True:
            try:
                self._tend_once()
            except Exception:  # the task must outlive any single failure: nobody else frees these tasks
                log.exception("tender failed; it goes on")
                await asyncio.sleep(TENDER_PAUSE_S)
            await asyncio.sleep(self._adapter.pause_s)

    def _tend_once(self) -> None:
        lost, released = self._host.apply(lambda _, now: self._adapter.tend(now))
        for item in lost:
            log.warning(
                "elasticdl task overdue dataset=%s worker=%s task=%d records=%d",
                *(item.dataset, item.session, item.task, item.records),
            )
        log_released(released, "silent")
        for key in [key for key, lock in self._locks.items() if not lock.locked()]:
            del self._locks[key]

    def __repr__(self) -> str:
        return f"<ElasticDLServicer {self._adapter!r}>"
