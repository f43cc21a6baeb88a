"""The calls of `service Master` over a grpc channel, made from the service's descriptor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from edl_torch.rpc import edl_torch_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Master"]


class MasterStub:
    """One callable for each method: it takes the request, and by name the options of a grpc call."""

    Register: Callable[..., pb.RegisterResponse]
    Attend: Callable[..., Iterator[pb.AttendEvent]]
    Heartbeat: Callable[..., pb.HeartbeatResponse]
    Lease: Callable[..., pb.LeaseResponse]
    Report: Callable[..., pb.ReportResponse]
    Confirm: Callable[..., pb.ConfirmResponse]
    Snapshot: Callable[..., pb.SnapshotResponse]
    Restore: Callable[..., pb.RestoreResponse]
    Progress: Callable[..., pb.ProgressResponse]
    Status: Callable[..., pb.StatusResponse]
    Leave: Callable[..., pb.LeaveResponse]

    def __init__(self, channel: Any) -> None:
        for method in SERVICE.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)
