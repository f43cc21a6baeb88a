"""The calls of the service, as its descriptor has them, over a channel."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.convert import ROUTES, MasterStub

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Master"].methods}


class Made(NamedTuple):
    kind: str
    path: str
    write: Any
    read: Any


class Channel:
    """Notes what it is asked to make."""

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any) -> Made:
        return Made("unary_unary", path, request_serializer, response_deserializer)

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any) -> Made:
        return Made("unary_stream", path, request_serializer, response_deserializer)


def test_each_method_of_the_service_carries_a_call_or_keeps_a_session_alive() -> None:
    routes = [route.method for route in ROUTES.values()]
    assert sorted([*routes, "Attend", "Heartbeat", "Leave"]) == sorted(METHODS)
    assert set(MasterStub(Channel()).methods) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_each_call_has_its_path_and_its_messages(name: str) -> None:
    made = MasterStub(Channel()).methods[name]
    assert made.kind == ("unary_stream" if name == "Attend" else "unary_unary")
    assert made.path == f"/edl_torch.v1.Master/{name}"
    request = getattr(pb, METHODS[name].input_type.name)
    answer = getattr(pb, METHODS[name].output_type.name)
    assert request.FromString(made.write(request())) == request()
    assert type(made.read(answer().SerializeToString())) is answer
