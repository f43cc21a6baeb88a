"""An unmodified ElasticDL master as a trainer of ours sees it: `MasterApi` over that project's three calls.

It keeps what such a master can keep; what it cannot is refused with a remedy (docs/elasticdl.md). Used in the
trainer's process only.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from edl_torch.client.grpc.channel import MasterChannel, build_channel
from edl_torch.client.grpc.client import Caller
from edl_torch.core.calls import (
    NEW_PASS,
    ConfirmAnswer,
    ConfirmCall,
    Fence,
    LeaseAnswer,
    LeaseCall,
    Listener,
    MasterApi,
    PassState,
    ProgressCall,
    RegisterAnswer,
    RegisterCall,
    ReportAnswer,
    ReportCall,
    Request,
    StatusCall,
)
from edl_torch.core.status import DatasetStatus, MasterStatus
from edl_torch.elasticdl import wire
from edl_torch.elasticdl.tasks import ForeignDataset
from edl_torch.elasticdl.wire import MAX_INT32, ForeignTask, GetTaskCall, TaskResult
from edl_torch.errors import EdlError, InvalidArgument, TooManyBadRecords, UnknownDataset, Unsupported
from edl_torch.rpc.credentials import Credentials
from edl_torch.shard import TaskType
from edl_torch.system.backoff import backoff

log = logging.getLogger("edl_torch.client")

A = TypeVar("A")

ATTEMPT_S = 30.0  # of one call: a task may carry 64 MB of indices, and one whose answer is lost is late
LEAVE_S = 2.0
LONGEST_PAUSE_S = 2.0  # between two looks of a trainer that waits
EPOCH = 0  # of all passes: such a master does not tell epochs

FENCE = Fence(ledger="elasticdl", lineage=1, member=1)  # always: no session is ever given up


class ElasticDLMasterClient(MasterApi):
    """A master over ElasticDL's protocol. Takes what a `MasterClient` takes.

    All epochs of the job are one pass. WAIT is waited out, an error is retried for `master_timeout_s` and
    then raised as MasterUnavailable, and only the master's own word ends the data.
    """

    keeps_ledger = False

    def __init__(
        self,
        master: str | MasterChannel,
        worker_id: str | int | None = None,
        *,
        master_timeout_s: float = 600.0,
        credentials: Credentials | None = None,
    ) -> None:
        self._worker = _worker_number(worker_id)
        self.worker_id = str(self._worker)
        self._channel = build_channel(master, credentials) if isinstance(master, str) else master
        self._caller = Caller(self._channel, master_timeout_s)
        names = (wire.GET_TASK, wire.REPORT_TASK_RESULT, wire.REPORT_TRAINING_PARAMS)
        self._get, self._report, self._params = (
            self._channel.unary_unary(f"/{wire.SERVICE}/{name}") for name in names
        )
        self._lock = threading.RLock()  # of what is held; never held over a call
        self._telling = threading.Lock()  # results go out one by one
        self._datasets: dict[str, ForeignDataset] = {}
        atexit.register(self.close)

    @property
    def address(self) -> str:
        """Host and port of the master."""
        return str(self._channel.address)

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        """As `MasterApi.call`. Raises Unsupported where such a master has no call for it."""
        answer: Any
        match request:
            case LeaseCall():
                answer = self._lease(request, wait_s)
            case ReportCall():
                answer = self._apply(request)
            case RegisterCall():
                answer = self._register(request)
            case ConfirmCall():
                answer = ConfirmAnswer()  # no lease is ever known to be void
            case ProgressCall():
                answer = self._progress(request.dataset)  # such a master has one history
            case StatusCall():
                answer = self._observe(request)
            case _:
                self._refuse("state_dict() has no token to save, load_state_dict() no way back")
        return cast("A", answer)

    # Taking part ------------------------------------------------------------------------------------------

    def _register(self, call: RegisterCall) -> RegisterAnswer:
        """Tell the master size and shuffles, as its own clients do; it may know better and not say so."""
        name = call.registration.name
        with self._lock:
            known = self._datasets.get(name)
        if known is None:
            known = ForeignDataset(call)
            if known.params is not None:
                self._call(self._params, wire.PARAMS.write(known.params))
            with self._lock:
                known = self._datasets.setdefault(name, known)
        with self._lock:
            known.sessions.add(call.session)
        return RegisterAnswer(spec=known.plan.spec, fence=FENCE, epoch=EPOCH)

    def attend(self, session: str, member: int, listener: Listener) -> None:
        """There is no stream and no heartbeat: liveness is never in doubt, and never known."""
        return

    def _dataset(self, name: str) -> ForeignDataset:
        with self._lock:
            found = self._datasets.get(name)
        if found is None:
            raise UnknownDataset(f"dataset {name!r} is not registered with this client")
        return found

    # Lending and outcomes -----------------------------------------------------------------------------------

    def _lease(self, call: LeaseCall, wait_s: float) -> LeaseAnswer:
        """Records of the next task; with `wait_s` ask so long while the master says WAIT."""
        dataset = self._dataset(call.dataset)
        give_up_at = time.monotonic() + wait_s
        for pause_s in backoff(longest_s=LONGEST_PAUSE_S):
            answer = self._at_hand(dataset, call) or self._fetched(dataset, call)
            if answer is not None:
                return answer
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                break
            self._caller.pause(min(pause_s, left_s))
        # WAIT. A trainer that has handed out all its batches, and still holds some that its loop has not
        # stepped on, must not wait for itself: the next pass serves what else there is.
        if call.epoch == NEW_PASS:
            return LeaseAnswer(request=call.request, epoch=NEW_PASS, state=PassState.OPEN)
        over = call.drained and dataset.ledger.holds
        return _answer(call, PassState.EPOCH_OVER if over else PassState.OPEN)

    def _at_hand(self, dataset: ForeignDataset, call: LeaseCall) -> LeaseAnswer | None:
        with self._lock:
            if dataset.ledger.failure:
                raise TooManyBadRecords(dataset.ledger.failure)
            grants = dataset.ledger.lend(dataset.batch_size)
            if grants:
                return LeaseAnswer(request=call.request, epoch=EPOCH, state=PassState.OPEN, grants=grants)
        return _answer(call, PassState.FINISHED) if dataset.ended else None

    def _fetched(self, dataset: ForeignDataset, call: LeaseCall) -> LeaseAnswer | None:
        """What the master says: None for WAIT."""
        request = wire.CALL.write(GetTaskCall(worker_id=self._worker, task_type=dataset.kind))
        task = wire.TASK.read(self._call(self._get, request))
        if task.type is dataset.kind:
            with self._lock:
                dataset.take(task)
            return self._at_hand(dataset, call)
        if task.type is TaskType.TRAIN_END_CALLBACK:
            self._pass_over(task)
            return None
        if task.type is not TaskType.WAIT and not task.is_end:
            raise EdlError(
                f"the master at {self.address} answers a call for {dataset.kind.name} tasks with one of type "
                f"{task.type.name}: use ElasticDL's own worker for it"
            )
        with self._lock:
            if dataset.ledger.holds_remainders_only:
                dataset.ledger.drop_remainders()
            dataset.ended = task.is_end
        self._tell(dataset)
        return self._at_hand(dataset, call)

    def _pass_over(self, task: ForeignTask) -> None:
        log.warning("the master at %s wants its callback at the end of training: not ours", self.address)
        self._call(self._report, wire.RESULT.write(TaskResult(task_id=task.task_id)))

    def _apply(self, call: ReportCall) -> ReportAnswer:
        """Apply outcomes here; each task whose last record has got one is told to the master."""
        dataset = self._dataset(call.dataset)
        with self._lock:
            dataset.ledger.report(call)
        self._tell(dataset)
        return ReportAnswer(request=call.request)

    def _tell(self, dataset: ForeignDataset) -> None:
        """What no master answers is kept and told again with the next report."""
        with self._telling:
            with self._lock:
                results = dataset.ledger.results()
            for result in results:
                self._call(self._report, wire.RESULT.write(result))
                with self._lock:
                    dataset.ledger.told(result)

    def _call(self, rpc: Callable[..., Any], request: bytes) -> bytes:
        answer: bytes = self._caller.call(rpc, request, attempt_s=ATTEMPT_S)
        return answer

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(
            f"{what}: the master at {self.address} speaks ElasticDL's protocol, which has no call for it. "
            f"Start `edl-torch master` instead (ElasticDL's own clients work under it, too) and leave "
            f"EDL_MASTER_PROTOCOL out"
        )

    def _observe(self, call: StatusCall) -> MasterStatus:
        if call.dataset not in self._datasets:  # of no dataset, or before there is a position to save or load
            self._refuse("there is no position to save or to go back to, and no status to read")
        status = self._progress(call.dataset)
        return MasterStatus(ledger=FENCE.ledger, durable=False, datasets=(status,), trainers=())

    def _progress(self, dataset: str) -> DatasetStatus:
        """What this trainer did; `finished` is the master's word, and that nothing is left to be told."""
        found = self._dataset(dataset)
        with self._lock:
            return found.ledger.status(ended=found.ended)

    # The end ------------------------------------------------------------------------------------------------

    def leave(self, session: str, member: int) -> None:
        """Give back what is left, as failed tasks: the only way, and a timeout counts alike there."""
        if not self._caller.is_usable:
            return
        with self._lock:
            left = [found for found in self._datasets.values() if found.leave(session)]
            why = f"worker {self._worker} leaves before it has trained on all of it"
            results = [r for f in left for r in (*f.ledger.results(), *f.ledger.give_up(why))]
        give_up_at = time.monotonic() + LEAVE_S
        try:
            for result in results:
                left_s = max(0.1, give_up_at - time.monotonic())
                self._caller.attempt(self._report, wire.RESULT.write(result), left_s)
        except EdlError as error:
            log.debug("session %s could not give back its tasks: %s", session, error)

    def close(self) -> None:
        """End waiting calls and the connection. In a forked child, which shares it, nothing is touched."""
        if not self._caller.is_usable:
            return
        self._caller.close()
        atexit.unregister(self.close)
        self._channel.close()

    def __enter__(self) -> ElasticDLMasterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self._caller.is_closed else ""
        return f"<ElasticDLMasterClient {state}{self.address} worker={self._worker}>"


def _answer(call: LeaseCall, state: PassState) -> LeaseAnswer:
    return LeaseAnswer(request=call.request, epoch=EPOCH, state=state)


def _worker_number(worker_id: str | int | None) -> int:
    """Return the number as given, else `WORKER_ID`, else `RANK`, else 0."""
    env = os.environ
    text = str(env.get("WORKER_ID") or env.get("RANK") or 0 if worker_id is None else worker_id).strip()
    if not text.isdecimal() or int(text) > MAX_INT32:
        raise InvalidArgument(
            f"the worker id is {text!r}: ElasticDL's master knows workers by numbers, so set WORKER_ID to a "
            f"number that no other worker has"
        )
    return int(text)
