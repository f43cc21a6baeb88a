"""How long ElasticDL's workers wait for what: on a loop with a time of its own, without grpc."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from by_number import TRAINING, WAIT, WireTask, get_task_request, params_request, result_request
from virtual_time import in_virtual_time

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.elasticdl.adapter import ElasticDLAdapter, ElasticDLOptions
from edl_torch.elasticdl.servicer import MARGIN_S, ElasticDLServicer
from edl_torch.master.host import MasterHost

TASK_TIMEOUT_S = 300.0
ONE_TASK = {"batch_size": 5, "num_epochs": 1, "dataset_size": 5}


class Refused(Exception):
    """What a caller would be told."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class Call:
    """One call: how long its caller still waits, None for ever."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object) -> None:
        raise Refused(code, details)


class Adapters:
    """A master that workers ask without a network."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        clock = asyncio.get_running_loop().time
        self.host = MasterHost(dispatcher, clock=clock)
        adapter = ElasticDLAdapter(dispatcher, ElasticDLOptions(task_timeout_s=TASK_TIMEOUT_S))
        self.servicer = ElasticDLServicer(self.host, adapter)

    async def get(self, worker: int, *, within_s: float | None = None) -> WireTask:
        answer = await self.servicer.get_task(get_task_request(worker, 0), Call(within_s))  # type: ignore[arg-type]
        return WireTask.decode(answer)

    async def params(self, **params: int) -> None:
        await self.servicer.report_training_params(params_request(**params), Call(None))  # type: ignore[arg-type]

    async def report(self, task: WireTask, why: str = "") -> None:
        await self.servicer.report_task_result(result_request(task.task_id, why, None), Call(None))  # type: ignore[arg-type]

    @property
    def training(self) -> tuple[int, int, int]:
        """Records acknowledged, leased and in quarantine."""
        status = self.dispatcher.dataset_status("training")
        return status.acknowledged, status.leased, len(status.quarantine)


@asynccontextmanager
async def adapters(**options: float) -> AsyncIterator[Adapters]:
    made = Adapters(Dispatcher(ledger_id="ledger", **options))  # type: ignore[arg-type]
    made.host.start()
    made.servicer.start()
    yield made
    await made.servicer.close()
    await made.host.close()


def now() -> float:
    return asyncio.get_running_loop().time()


def test_where_nobody_describes_the_data_the_call_ends_in_an_error_that_says_so() -> None:
    async def work() -> None:
        async with adapters() as master:
            with pytest.raises(Refused) as refused:
                await master.get(0)
            assert now() == pytest.approx(TASK_TIMEOUT_S)
            assert refused.value.code is grpc.StatusCode.NOT_FOUND
            assert "--training_data" in refused.value.details

    in_virtual_time(work())


def test_a_call_with_a_deadline_is_told_before_it_to_ask_again() -> None:
    async def work() -> None:
        async with adapters() as master:
            assert (await master.get(0, within_s=10.0)).type == WAIT  # nobody has described the data
            assert now() == pytest.approx(10.0 - MARGIN_S)
            await master.params(**ONE_TASK)
            assert (await master.get(0)).type == TRAINING
            assert (await master.get(1, within_s=10.0)).type == WAIT  # another one has all of it
            assert now() == pytest.approx(2 * (10.0 - MARGIN_S))

    in_virtual_time(work())


def test_an_overdue_task_goes_to_another_and_its_late_report_is_ignored() -> None:
    async def work() -> None:
        async with adapters() as master:
            await master.params(**ONE_TASK | {"batch_size": 10, "dataset_size": 20})
            late = await master.get(0)
            assert late.numbers == list(range(10))
            await master.report(await master.get(1))
            again = await master.get(1)  # waits in the call until the time of the other is over
            assert TASK_TIMEOUT_S <= now() <= TASK_TIMEOUT_S + 11
            assert again.numbers == late.numbers
            assert again.task_id != late.task_id
            await master.report(late)
            await master.report(late, "it failed, too")
            assert master.training == (10, 10, 0)
            await master.report(again)
            assert (await master.get(1)).is_end
            assert master.training == (20, 0, 0)

    in_virtual_time(work())


def test_deaths_are_never_counted_against_a_task() -> None:
    async def work() -> None:
        async with adapters() as master:
            await master.params(**ONE_TASK)
            for number in range(4):
                assert (await master.get(number)).type == TRAINING  # and is never heard of again
            task = await master.get(7)
            await master.report(task)
            assert (await master.get(7)).is_end
            assert master.training == (5, 0, 0)

    in_virtual_time(work())


def test_a_silent_worker_keeps_its_task_far_beyond_the_lease_timeout_of_trainers() -> None:
    async def work() -> None:
        async with adapters(lease_timeout_s=30.0) as master:
            await master.params(**ONE_TASK)
            task = await master.get(0)
            await asyncio.sleep(TASK_TIMEOUT_S - 1)
            assert master.training == (0, 5, 0)
            await master.report(task)
            assert master.training == (5, 0, 0)

    in_virtual_time(work())
