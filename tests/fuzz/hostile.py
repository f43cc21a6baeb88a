"""Calls that no honest trainer makes, and a master to make them to, with an honest trainer at work in it.

Hypothesis and atheris both drive this: they bring a source of choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any, Protocol

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.limits import Limits
from edl_torch.elasticdl import elasticdl_pb2, wire
from edl_torch.elasticdl.adapter import ElasticDLAdapter
from edl_torch.elasticdl.servicer import ElasticDLServicer
from edl_torch.master.host import MasterHost
from edl_torch.master.servicer import MasterServicer, Unreadable, reader
from edl_torch.rpc import edl_torch_pb2 as pb

METHODS = pb.DESCRIPTOR.services_by_name["Master"].methods_by_name
ELASTICDL = {
    wire.GET_TASK: elasticdl_pb2.GetTaskRequest,
    wire.REPORT_TASK_RESULT: elasticdl_pb2.ReportTaskResultRequest,
    wire.REPORT_TRAINING_PARAMS: elasticdl_pb2.ReportTrainingParamsRequest,
}
INPUTS = {name: method.input_type for name, method in METHODS.items()}
INPUTS |= {name: kind.DESCRIPTOR for name, kind in ELASTICDL.items()}
READERS: dict[str, Any] = dict.fromkeys(ELASTICDL, bytes)  # which read for themselves
READERS |= {name: reader(message_factory.GetMessageClass(m.input_type)) for name, m in METHODS.items()}
SIZE = 40
STEPS = 12  # of the event loop that a call gets before its connection breaks

INTEGERS = (0, 1, 2, 3, 4, 8, -1, -2, 40, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
DOUBLES = (0.0, 0.01, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324)
LIKELY: dict[str, tuple[Any, ...]] = {  # what gets a call further than the first check
    "session": ("h1", "h2"),
    "dataset": ("training", "e"),
    "name": ("training", "e", ""),
    "ledger": ("ledger", "ledger", "ledger", ""),
    "lineage": (1, 1, 1, 2),
    "member": (2, 2, 3, 3, 0, 1, 4),  # those of h1 and h2 first
    "attempt": (1, 1, 2),
    "epoch": (-1, 0),
    "count": (1, 2, 4),
    "batch_size": (1, 2, 3),
    "task": tuple(range(1, 12)),
    "start": (0, 1, 2, 3, 4, 9, 39),
}
TEXTS = (
    *(
        "",
        " ",
        ".",
        "..",
        "../../../etc/passwd",
        "/dev/zero",
        "~",
        "C:\\",
        "a/b",
        "-rf",
        "%s%n",
        "$(id)",
        "`id`",
    ),
    *("a\0b", "line\nbreak", "\r", "\x1b[2J", "\u202eabc", "\ufeff", "\U0010ffff", "é" * 512, "é" * 513),
    *("__import__('os').abort()", "cos\nabort\n(tR.", "!!python/object:os.abort {}", "x" * 5000, "{}", "[]"),
    *('["session","x"]', "'; DROP TABLE state; --", '{"version":1}', "[" * 3000, "null", "NaN"),
)


class Choices(Protocol):
    """Where decisions come from."""

    def below(self, stop: int) -> int:
        """A number from 0 to `stop - 1`."""

    def raw(self) -> bytes:
        """Some bytes."""


def pick(choices: Choices, options: Any) -> Any:
    return options[choices.below(len(options))]


# Messages -------------------------------------------------------------------------------------------------


def message(descriptor: Any, choices: Choices, tokens: list[str]) -> Any:
    """A message of the right structure; its values are what nobody expects, or almost right."""
    made = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(made, field.name)[pick(choices, ("fail_count", *TEXTS))] = choices.below(1 << 31)
        elif field.is_repeated:
            for _ in range(choices.below(4)):
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    getattr(made, field.name).append(message(field.message_type, choices, tokens))
                else:
                    getattr(made, field.name).append(scalar(field, choices, tokens))
        elif choices.below(8) == 0:
            continue
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(made, field.name).CopyFrom(message(field.message_type, choices, tokens))
        else:
            setattr(made, field.name, scalar(field, choices, tokens))
    return made


def scalar(field: Any, choices: Choices, tokens: list[str]) -> Any:
    if field.name in LIKELY and choices.below(6):
        return pick(choices, LIKELY[field.name])
    match field.type:
        case FieldDescriptor.TYPE_STRING if field.name == "token" and choices.below(4):
            return pick(choices, tokens)
        case FieldDescriptor.TYPE_STRING:
            return pick(choices, TEXTS)
        case FieldDescriptor.TYPE_BOOL:
            return bool(choices.below(2))
        case FieldDescriptor.TYPE_DOUBLE:
            return pick(choices, DOUBLES)
        case FieldDescriptor.TYPE_ENUM:
            return pick(choices, (0, 1, 2, 3, 4, 5, 77, -1))
        case FieldDescriptor.TYPE_INT32:
            return pick(choices, (*INTEGERS[:9], 2**31 - 1, -(2**31)))
        case _:
            return pick(choices, INTEGERS[:8] if choices.below(3) else INTEGERS)


def damaged(value: Any, choices: Choices) -> Any:
    """A JSON value with one part of it replaced, left out or doubled."""
    strange = (
        None,
        True,
        -1,
        0,
        1,
        2**62,
        2**62 + 1,
        2**64,
        10**400,
        0.5,
        float("nan"),
        "",
        "x",
        [],
        {},
        [[]],
    )
    if isinstance(value, dict) and value and choices.below(8):
        key = pick(choices, sorted(value))
        return value | {key: damaged(value[key], choices)}
    if isinstance(value, list | tuple) and value and choices.below(8):
        place = choices.below(len(value))
        match choices.below(8):
            case 0:
                return [*value[:place], *value[place + 1 :]]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], damaged(value[place], choices), *value[place + 1 :]]
    return pick(choices, strange)


# The master -----------------------------------------------------------------------------------------------


class Refused(Exception):
    """The master has said no."""


class Context:
    """What grpc gives a handler."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def write(self, answer: Any) -> None:
        answer.SerializeToString()
        self.told.append(answer)

    async def abort(self, code: Any, details: str = "", metadata: Any = ()) -> None:
        assert metadata, "every refusal carries its class"
        raise Refused(f"{code}: {details}")

    def time_remaining(self) -> float | None:
        return None


class Master:
    """The real servicer, host and dispatcher, without a network, on a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(ledger_id="ledger", limits=Limits(sessions=8, datasets=5, quarantine=30))
        self.host = MasterHost(self.dispatcher, clock=lambda: self.now)
        self.servicer = MasterServicer(self.host)
        self.elasticdl = ElasticDLServicer(self.host, ElasticDLAdapter(self.dispatcher))
        self.calls: list[tuple[str, bytes]] = []
        self.lent: list[tuple[str, Any]] = []  # session and grant

    async def call(self, method: str, raw: bytes) -> Any:
        """The answer; None where the call was cut off. Raises Refused; anything else is a bug."""
        request = READERS[method](raw)
        self.calls.append((method, raw))
        context = Context()
        answer = getattr(self.elasticdl, method) if method in ELASTICDL else self.servicer.answers[method]
        task = asyncio.ensure_future(answer(request, context))
        for _ in range(STEPS):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
        try:
            answer = await task
        except asyncio.CancelledError:
            return context.told or None
        if answer is not None and method not in ELASTICDL:
            answer.SerializeToString()
        if method == "Lease":
            self.lent += [(request.session, grant) for grant in answer.grants]
        return answer or context.told


class Honest:
    """A trainer that does everything right, and keeps book of it."""

    session = "honest-7b1f"

    def __init__(self, master: Master) -> None:
        self.master = master
        self.trained: Counter[tuple[int, int]] = Counter()
        self.request = 0
        self.finished = False
        self.report: Any = None  # of what it holds

    async def start(self) -> None:
        registration = pb.Registration(name="training", records_per_shard=4, max_bad_records=1000)
        registration.sources.sources.add(name="", count=SIZE)
        await self.tell(
            "Register", pb.RegisterRequest(worker_id="w", batch_size=2, registration=registration)
        )

    async def tell(self, method: str, request: Any) -> Any:
        request.session = self.session
        return await self.master.call(method, request.SerializeToString())

    async def step(self) -> None:
        """Lease a slice; the next time say that it was trained on. So calls of others come in between."""
        if self.report is not None:
            told = await self.tell("Report", self.report)
            assert not told.stale, "a lease of an honest trainer was taken"
            self.report = None
            return
        self.request += 1
        same = {**fenced(self.master, self.session), "request": self.request}
        answer = await self.tell("Lease", pb.LeaseRequest(epoch=NEW_PASS, count=1, **same))
        self.finished = answer.state == pb.PassState.FINISHED
        if answer.grants:
            self.report = pb.ReportRequest(**same)
        for grant in answer.grants:
            stop = grant.skip + grant.limit
            self.trained.update((grant.shard, position) for position in range(grant.skip, stop))
            self.report.acknowledgements.add(task=grant.task, attempt=grant.attempt, upto=stop)

    async def beat(self) -> None:
        member = fenced(self.master, self.session)["member"]
        await self.tell("Heartbeat", pb.HeartbeatRequest(progress=self.request, member=member, measures={}))


def fenced(master: Master, session: str, dataset: str = "training") -> dict[str, Any]:
    """A session's fence, as the master has it."""
    known = master.dispatcher.members.get(session)
    ledger = master.dispatcher.find_ledger(dataset)
    return {
        "session": session,
        "dataset": dataset,
        "ledger": master.dispatcher.ledger_id,
        "lineage": 1 if ledger is None else ledger.lineage,
        "member": 0 if known is None else known.number,
    }


def registration(dataset: str, batch_size: int) -> Any:
    described = pb.Registration(name=dataset, records_per_shard=4, max_bad_records=1000)
    described.sources.sources.add(name="", count=SIZE)
    return pb.RegisterRequest(worker_id="w", batch_size=batch_size, registration=described)


def check(master: Master) -> None:
    """Every record of the honest trainer's dataset is in exactly one place, and the status can be told."""
    status = master.dispatcher.dataset_status("training")
    places = status.todo, status.leased, status.acknowledged, status.quarantined, status.dropped
    assert min(places) >= 0, places
    assert sum(places) == SIZE, places


# The attack -----------------------------------------------------------------------------------------------


async def attack(choices: Choices, moves: int) -> None:
    """Hostile calls between those of an honest trainer, whose job then ends with exact books."""
    master = Master()
    honest = Honest(master)
    await honest.start()
    for session, dataset, batch_size in (("h1", "training", 1), ("h2", "training", 3), ("h1", "e", 2)):
        request = registration(dataset, batch_size)
        request.session = session
        await master.call("Register", request.SerializeToString())
    tokens = [master.dispatcher.token("training")]
    for _ in range(moves):
        await move(master, honest, choices, tokens)
        check(master)
    await finish(master, honest)


async def move(master: Master, honest: Honest, choices: Choices, tokens: list[str]) -> None:
    match choices.below(12):
        case 0 | 1:
            await honest.step()
        case 2 | 3 | 4:
            await hostile(master, "Lease", lease(master, choices).SerializeToString())
        case 5 | 6:
            await hostile(master, "Report", trick(master, choices).SerializeToString())
        case 7 if not choices.below(3):
            await honest.beat()
            master.now += 20.0
            await honest.beat()
            master.dispatcher.expire(master.now)
        case 8:
            token = json.loads(tokens[0])
            tokens.append(json.dumps(damaged(token, choices)))
        case 9:
            method, raw = pick(choices, master.calls)
            cut = choices.below(len(raw) + 1)
            await hostile(master, method, raw if choices.below(2) else raw[:cut])
        case 10:
            await hostile(master, pick(choices, sorted(INPUTS)), choices.raw())
        case _:
            method = pick(choices, sorted(INPUTS))
            made = message(INPUTS[method], choices, tokens)
            await hostile(master, method, made.SerializeToString())


def lease(master: Master, choices: Choices) -> Any:
    """An order of a hostile trainer that is in order."""
    session = pick(choices, ("h1", "h2"))
    return pb.LeaseRequest(
        **fenced(master, session),
        request=len(master.calls),
        epoch=NEW_PASS,
        count=1 + choices.below(2),
    )


def trick(master: Master, choices: Choices) -> Any:
    """A report on leases that are lent: to the caller or not, of records that are theirs or nearly so."""
    session = pick(choices, ("h1", "h2"))
    report = pb.ReportRequest(**fenced(master, session), request=len(master.calls))
    for _ in range(1 + choices.below(3)):
        _, grant = pick(choices, master.lent) if master.lent else ("", pb.Grant(task=1, attempt=1))
        where = {"task": grant.task, "attempt": grant.attempt + (not choices.below(6))}
        position = grant.skip + choices.below(grant.limit + 4) - 1
        match choices.below(4):
            case 0:
                report.failures.add(position=position, reason="x", **where)
            case 1:
                report.give_backs.add(start=position, remainder=bool(choices.below(2)), **where)
            case _:
                report.acknowledgements.add(upto=position, **where)
    return report


async def hostile(master: Master, method: str, raw: bytes) -> None:
    request = READERS[method](raw)
    if method == "Restore" and not isinstance(request, Unreadable) and request.dataset == "training":
        return  # who may call may take a dataset back: that is no attack on the books
    with contextlib.suppress(Refused):
        await master.call(method, raw)
    master.dispatcher.status(master.now)


async def finish(master: Master, honest: Honest) -> None:
    """The hostile leave; the honest trainer ends the epoch."""
    for member in tuple(master.dispatcher.members):
        if member.session != honest.session:
            master.dispatcher.leave(member.session, member.number)
    for _ in range(3 * SIZE):
        if honest.finished:
            break
        await honest.step()
        check(master)
    status = master.dispatcher.dataset_status("training")
    assert status.finished
    assert status.acknowledged + status.quarantined + status.dropped == SIZE
    assert set(honest.trained.values()) <= {1}, honest.trained
