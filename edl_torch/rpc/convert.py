"""Conversion of calls and answers to protobuf messages and back: one pair of functions for each.

It also checks what protobuf cannot express (enum members, missing parts). Every lease and report passes
through here, so those are written and read attribute by attribute: by name it takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from edl_torch.core import calls
from edl_torch.core.events import Departed, Event, EventKind
from edl_torch.core.measures import Histogram, Measures, padded, trimmed
from edl_torch.core.picture import Picture
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import DatasetSpec, Slice, Source, TaskType

A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E")

_STATE_FROM_WIRE = {int(state): state for state in calls.PassState}
_TYPE_FROM_WIRE = {int(kind): kind for kind in TaskType}


def checked(convert: Callable[[A], B], value: A) -> B:
    """Convert a value; what the other side cannot express raises InvalidArgument.

    Such are a text that is not Unicode, a number beyond 64 bits, an unknown member of an enum.
    """
    try:
        return convert(value)
    except (TypeError, ValueError, KeyError) as exc:
        raise InvalidArgument(f"{type(value).__name__} does not fit the wire format: {exc}") from exc


def _member(members: Mapping[int, E], number: int) -> E:
    """Return a member of an enum in an answer; a newer master may have one that is not known here."""
    try:
        return members[number]
    except KeyError:
        kind = type(next(iter(members.values()))).__name__
        raise EdlError(
            f"the master answers with {kind} {number}, which this edl_torch does not know: it is older than "
            "the master, upgrade it"
        ) from None


def taker(*names: str) -> Callable[[object], dict[str, Any]]:
    """Return a function that takes these attributes of a value, a call or a message, by name."""
    get = attrgetter(*names)
    return lambda value: dict(zip(names, get(value), strict=True))


_take_fence = taker("ledger", "lineage", "member")
_take_caller = taker("session", "dataset", "asked", "reported")


def _fenced_to_wire(value: calls.FencedCall) -> dict[str, Any]:
    return _take_caller(value) | _take_fence(value.fence)


def _fenced_from_wire(message: Any) -> dict[str, Any]:
    return {"fence": calls.Fence(**_take_fence(message)), **_take_caller(message)}


# Register ---------------------------------------------------------------------------------------------

_OPTIONAL = (
    *("records_per_shard", "seed", "shuffle", "shuffle_shards", "shuffle_in_shard", "task_type"),
    *("num_epochs", "epoch_barrier", "max_bad_records", "shuffle_window", "fingerprint"),
)
_take_optional = taker(*_OPTIONAL)
_take_source = taker("name", "start", "count")
_take_trainer = taker("session", "worker_id", "batch_size")


def registration_to_wire(value: calls.Registration) -> pb.Registration:
    message = pb.Registration(name=value.name, **_take_optional(value))
    if value.sources is not None:
        sources = [pb.Source(**_take_source(source)) for source in value.sources]
        message.sources.CopyFrom(pb.SourceList(sources=sources))
    return message


def registration_from_wire(message: pb.Registration) -> calls.Registration:
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    if "task_type" in given:
        given["task_type"] = TaskType(given["task_type"])
    sources = _sources_from_wire(message.sources.sources) if message.HasField("sources") else None
    return calls.Registration(name=message.name, sources=sources, **given)


def _sources_from_wire(sources: Iterable[pb.Source]) -> tuple[Source, ...]:
    return tuple(Source(**_take_source(source)) for source in sources)


def spec_to_wire(value: DatasetSpec) -> pb.DatasetSpec:
    sources = [pb.Source(**_take_source(source)) for source in value.sources]
    return pb.DatasetSpec(name=value.name, sources=sources, **_take_optional(value))


def spec_from_wire(message: pb.DatasetSpec) -> DatasetSpec:
    fields = _take_optional(message)
    fields["task_type"] = _member(_TYPE_FROM_WIRE, message.task_type)
    fields["shuffle_in_shard"] = message.shuffle_in_shard if message.HasField("shuffle_in_shard") else None
    fields["shuffle_window"] = message.shuffle_window or 1
    return DatasetSpec(name=message.name, sources=_sources_from_wire(message.sources), **fields)


def register_call_to_wire(value: calls.RegisterCall) -> pb.RegisterRequest:
    return pb.RegisterRequest(registration=registration_to_wire(value.registration), **_take_trainer(value))


def register_call_from_wire(message: pb.RegisterRequest) -> calls.RegisterCall:
    return calls.RegisterCall(
        registration=registration_from_wire(message.registration), **_take_trainer(message)
    )


def register_answer_to_wire(value: calls.RegisterAnswer) -> pb.RegisterResponse:
    return pb.RegisterResponse(spec=spec_to_wire(value.spec), epoch=value.epoch, **_take_fence(value.fence))


def register_answer_from_wire(message: pb.RegisterResponse) -> calls.RegisterAnswer:
    fence = calls.Fence(**_take_fence(message))
    return calls.RegisterAnswer(spec=spec_from_wire(message.spec), fence=fence, epoch=message.epoch)


# Lease ------------------------------------------------------------------------------------------------


def lease_call_to_wire(value: calls.LeaseCall, wait_s: float = 0.0) -> pb.LeaseRequest:
    return pb.LeaseRequest(
        session=value.session,
        dataset=value.dataset,
        ledger=value.fence.ledger,
        lineage=value.fence.lineage,
        member=value.fence.member,
        asked=value.asked,
        reported=value.reported,
        request=value.request,
        epoch=value.epoch,
        count=value.count,
        drained=value.drained,
        ahead=value.ahead,
        wait_s=wait_s,
    )


def lease_call_from_wire(message: pb.LeaseRequest) -> calls.LeaseCall:
    return calls.LeaseCall(
        session=message.session,
        dataset=message.dataset,
        fence=calls.Fence(ledger=message.ledger, lineage=message.lineage, member=message.member),
        asked=message.asked,
        reported=message.reported,
        request=message.request,
        epoch=message.epoch,
        count=message.count,
        drained=message.drained,
        ahead=message.ahead,
    )


def lease_answer_to_wire(value: calls.LeaseAnswer) -> pb.LeaseResponse:
    message = pb.LeaseResponse(request=value.request, epoch=value.epoch, state=int(value.state))  # type: ignore[arg-type]
    add = message.grants.add
    for grant in value.grants:
        _fill_grant(add(), grant)
    return message


def _fill_grant(message: pb.Grant, grant: calls.Grant) -> None:
    # One by one, where they will travel: by keywords, and then copied, they would cost twice as much.
    cut = grant.slice
    message.task = grant.task
    message.attempt = grant.attempt
    message.epoch = cut.epoch
    message.shard = cut.shard
    message.skip = cut.skip
    message.limit = cut.limit
    message.bundle = grant.bundle


def lease_answer_from_wire(message: pb.LeaseResponse) -> calls.LeaseAnswer:
    return calls.LeaseAnswer(
        request=message.request,
        epoch=message.epoch,
        state=_member(_STATE_FROM_WIRE, message.state),
        grants=tuple([_grant_from_wire(grant) for grant in message.grants]),
    )


def _grant_from_wire(grant: pb.Grant) -> calls.Grant:
    cut = Slice(epoch=grant.epoch, shard=grant.shard, skip=grant.skip, limit=grant.limit)
    return calls.Grant(task=grant.task, attempt=grant.attempt, slice=cut, bundle=grant.bundle)


# Report -----------------------------------------------------------------------------------------------


def report_call_to_wire(value: calls.ReportCall) -> pb.ReportRequest:
    return pb.ReportRequest(
        session=value.session,
        dataset=value.dataset,
        ledger=value.fence.ledger,
        lineage=value.fence.lineage,
        member=value.fence.member,
        asked=value.asked,
        reported=value.reported,
        request=value.request,
        failures=[
            pb.Failure(task=f.task, attempt=f.attempt, position=f.position, reason=f.reason)
            for f in value.failures
        ],
        acknowledgements=[
            pb.Acknowledgement(task=a.task, attempt=a.attempt, upto=a.upto) for a in value.acknowledgements
        ],
        give_backs=[
            pb.GiveBack(task=g.task, attempt=g.attempt, start=g.start, remainder=g.remainder)
            for g in value.give_backs
        ],
    )


def report_call_from_wire(message: pb.ReportRequest) -> calls.ReportCall:
    # Parts are copied into a list, [:], before they are gone through: the end of an iteration over protobuf's
    # own container is an exception, which costs more than the one part that most calls have.
    return calls.ReportCall(
        session=message.session,
        dataset=message.dataset,
        fence=calls.Fence(ledger=message.ledger, lineage=message.lineage, member=message.member),
        asked=message.asked,
        reported=message.reported,
        request=message.request,
        failures=tuple(
            [
                calls.Failure(task=f.task, attempt=f.attempt, position=f.position, reason=f.reason)
                for f in message.failures[:]
            ]
        ),
        acknowledgements=tuple(
            [
                calls.Acknowledgement(task=a.task, attempt=a.attempt, upto=a.upto)
                for a in message.acknowledgements[:]
            ]
        ),
        give_backs=tuple(
            [
                calls.GiveBack(task=g.task, attempt=g.attempt, start=g.start, remainder=g.remainder)
                for g in message.give_backs[:]
            ]
        ),
    )


def report_answer_to_wire(value: calls.ReportAnswer) -> pb.ReportResponse:
    message = pb.ReportResponse(request=value.request)
    if value.stale:
        message.stale.extend(value.stale)
    message.wanted = value.wanted
    return message


def report_answer_from_wire(message: pb.ReportResponse) -> calls.ReportAnswer:
    return calls.ReportAnswer(request=message.request, stale=tuple(message.stale), wanted=message.wanted)


# Confirm ----------------------------------------------------------------------------------------------


def confirm_call_to_wire(value: calls.ConfirmCall) -> pb.ConfirmRequest:
    leases = [pb.LeaseId(task=task, attempt=attempt) for task, attempt in value.leases]
    return pb.ConfirmRequest(**_fenced_to_wire(value), leases=leases)


def confirm_call_from_wire(message: pb.ConfirmRequest) -> calls.ConfirmCall:
    leases = tuple([(held.task, held.attempt) for held in message.leases])
    return calls.ConfirmCall(**_fenced_from_wire(message), leases=leases)


def confirm_answer_to_wire(value: calls.ConfirmAnswer) -> pb.ConfirmResponse:
    return pb.ConfirmResponse(void=value.void)


def confirm_answer_from_wire(message: pb.ConfirmResponse) -> calls.ConfirmAnswer:
    return calls.ConfirmAnswer(void=tuple(message.void))


# Tokens and progress ------------------------------------------------------------------------------------


def snapshot_call_to_wire(value: calls.FencedCall) -> pb.SnapshotRequest:
    return pb.SnapshotRequest(**_fenced_to_wire(value))


def progress_call_to_wire(value: calls.FencedCall) -> pb.ProgressRequest:
    return pb.ProgressRequest(**_fenced_to_wire(value))


def fenced_call_from_wire(message: pb.SnapshotRequest | pb.ProgressRequest) -> calls.FencedCall:
    return calls.FencedCall(**_fenced_from_wire(message))


def restore_call_to_wire(value: calls.RestoreCall) -> pb.RestoreRequest:
    return pb.RestoreRequest(**_fenced_to_wire(value), request=value.request, token=value.token)


def restore_call_from_wire(message: pb.RestoreRequest) -> calls.RestoreCall:
    token = message.token if message.HasField("token") else None
    return calls.RestoreCall(token=token, request=message.request, **_fenced_from_wire(message))


# Measures ---------------------------------------------------------------------------------------------

_take_measures = taker("batches", "records", "waited_for_ranks_s", "timed", "read_s", "transform_s")


def measures_to_wire(value: Measures) -> pb.Measures:
    return pb.Measures(
        waited=_histogram_to_wire(value.waited),
        stepped=_histogram_to_wire(value.stepped),
        **_take_measures(value),
    )


def measures_from_wire(message: pb.Measures) -> Measures:
    return Measures(
        waited=_histogram_from_wire(message.waited),
        stepped=_histogram_from_wire(message.stepped),
        **_take_measures(message),
    )


def _histogram_to_wire(value: Histogram) -> pb.Histogram:
    return pb.Histogram(counts=trimmed(value.counts), sum_s=value.sum_s)


def _histogram_from_wire(message: pb.Histogram) -> Histogram:
    return Histogram(counts=padded(message.counts[:]), sum_s=message.sum_s)


# Status -----------------------------------------------------------------------------------------------

_take_counts = taker(
    *("dataset", "epoch", "num_epochs", "size", "shards", "shards_left", "todo", "leased", "leases"),
    *("acknowledged", "quarantined", "dropped", "finished", "trainers", "failure", "ledger", "lineage"),
    *("rate", "returned_slices", "returned_records", "given_back", "checkpoints", "restores"),
)
_take_quarantined = taker("epoch", "shard", "position", "name", "index", "reason")
_take_session = taker(
    *("session", "worker_id", "leased", "idle_s", "since_progress_s", "pace", "slow", "trained", "leases"),
    "oldest_lease_s",
)
_take_departed = taker("session", "worker_id", "at", "died", "why", "trained", "slices", "records")
_take_event = taker("number", "at", "dataset", "worker_id", "count", "slices", "records", "text")
_KINDS = {kind.value: kind for kind in EventKind}  # those of a newer master are left out
_TRAINER_STATES = {state.value: state for state in calls.TrainerState}
_STATES = ("waiting", "lent", "done", "returned", "quarantined")
_take_cells = taker(*_STATES)
_MOST = (1 << 63) - 1


def _fit(value: Any) -> Any:
    """What people see, where it would not fit otherwise: nothing that is in a token may spoil the status."""
    if type(value) is int:
        return min(value, _MOST)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _all_fit(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _fit(value) for name, value in values.items()}


def dataset_status_to_wire(value: calls.DatasetStatus) -> pb.DatasetStatus:
    quarantine = [pb.QuarantinedRecord(**_all_fit(_take_quarantined(q))) for q in value.quarantine]
    return pb.DatasetStatus(
        task_type=value.task_type.name,
        quarantine=quarantine,
        picture=None if value.picture is None else _picture_to_wire(value.picture),
        **_all_fit(_take_counts(value)),
    )


def _picture_to_wire(value: Picture) -> pb.Picture:
    return pb.Picture(epoch=value.epoch, **_take_cells(value))


def _picture_from_wire(message: pb.Picture) -> Picture:
    return Picture(
        epoch=message.epoch, **{name: tuple(cells) for name, cells in _take_cells(message).items()}
    )


def dataset_status_from_wire(message: pb.DatasetStatus) -> calls.DatasetStatus:
    return calls.DatasetStatus(
        task_type=_member(_TYPE_FROM_WIRE, message.task_type),
        quarantine=tuple(calls.QuarantinedRecord(**_take_quarantined(q)) for q in message.quarantine),
        picture=_picture_from_wire(message.picture) if message.HasField("picture") else None,
        **_take_counts(message),
    )


def status_to_wire(value: calls.MasterStatus) -> pb.StatusResponse:
    return pb.StatusResponse(
        ledger=value.ledger,
        durable=value.durable,
        datasets=[dataset_status_to_wire(d) for d in value.datasets],
        trainers=[_trainer_to_wire(trainer) for trainer in value.trainers],
        suspended={_fit(name): _fit(why) for name, why in value.suspended.items()},
        time=value.time,
        started_at=value.started_at,
        events=[pb.Event(kind=e.kind.value, **_all_fit(_take_event(e))) for e in value.events],
        departed=[pb.Departed(**_all_fit(_take_departed(d))) for d in value.departed],
        event_counts=value.event_counts,
    )


def status_from_wire(message: pb.StatusResponse) -> calls.MasterStatus:
    return calls.MasterStatus(
        ledger=message.ledger,
        durable=message.durable,
        datasets=tuple(dataset_status_from_wire(d) for d in message.datasets),
        trainers=tuple(_trainer_from_wire(trainer) for trainer in message.trainers),
        suspended=dict(message.suspended),
        time=message.time,
        started_at=message.started_at,
        events=tuple(
            Event(kind=_KINDS[e.kind], **_take_event(e)) for e in message.events if e.kind in _KINDS
        ),
        departed=tuple(Departed(**_take_departed(d)) for d in message.departed),
        event_counts=dict(message.event_counts),
    )


def _trainer_to_wire(value: calls.TrainerStatus) -> pb.TrainerStatus:
    measures = None if value.measures is None else measures_to_wire(value.measures)
    return pb.TrainerStatus(
        datasets=value.datasets, state=value.state.value, measures=measures, **_take_session(value)
    )


def _trainer_from_wire(message: pb.TrainerStatus) -> calls.TrainerStatus:
    measures = measures_from_wire(message.measures) if message.HasField("measures") else None
    return calls.TrainerStatus(
        datasets=tuple(message.datasets),
        state=_TRAINER_STATES.get(message.state, calls.TrainerState.LIVE),
        measures=measures,
        **_take_session(message),
    )
