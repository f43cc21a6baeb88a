"""A caller without the token learns nothing and changes nothing: for every call of every service."""

from __future__ import annotations

import grpc
import pytest
from door_kit import SECRET, credentials, door, lease, register, report, token_file
from fences import Onlooker
from google.protobuf import message_factory

from edl_torch.core.calls import Acknowledgement
from edl_torch.elasticdl import elasticdl_pb2, wire
from edl_torch.elasticdl.wire import GetTaskCall, TaskResult
from edl_torch.errors import AccessDenied
from edl_torch.master.health import SERVICE as HEALTH
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.credentials import Credentials
from edl_torch.shard import TaskType
from edl_torch.testing.fake_master import Listening

# Every call of every service of ours.
METHODS = [
    (f"/{service.full_name}/{method.name}", method)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ELASTICDL = {  # its service is in no descriptor of ours; these would each do something
    "/proto.Master/get_task": wire.CALL.write(GetTaskCall(worker_id=1, task_type=TaskType.TRAINING)),
    "/proto.Master/report_task_result": wire.RESULT.write(TaskResult(task_id=1)),
    "/proto.Master/report_training_params": elasticdl_pb2.ReportTrainingParamsRequest(
        batch_size=2, num_epochs=1, dataset_size=9, num_minibatches_per_shard=2
    ).SerializeToString(),
}
UNKNOWN = [
    "/edl_torch.v1.Master/NoSuchCall",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/x",
]

WRONG = {
    "none": (),
    "empty": (("authorization", ""),),
    "word alone": (("authorization", SECRET),),
    "another": (("authorization", "Bearer " + "y" * len(SECRET)),),
    "cut": (("authorization", f"Bearer {SECRET[:-1]}"),),
    "longer": (("authorization", f"Bearer {SECRET}0"),),
    "case": (("authorization", f"bearer {SECRET}"),),
    "twice": (("authorization", f"Bearer {SECRET}"),) * 2,
    "right and wrong": (("authorization", f"Bearer {SECRET}"), ("authorization", "Bearer other")),
    "other key": (("token", f"Bearer {SECRET}"),),
    "binary": (("authorization-bin", f"Bearer {SECRET}".encode()),),
}
RIGHT = (("authorization", f"Bearer {SECRET}"),)


def request_for(method):
    """A message that would change or tell something, were it let in."""
    made = message_factory.GetMessageClass(method.input_type)()
    for field in method.input_type.fields:
        value = {"session": "s", "dataset": "d", "count": 1, "epoch": -1, "lineage": 1, "request": 9}.get(
            field.name
        )
        if value is not None:
            setattr(made, field.name, value)
    if field := method.input_type.fields_by_name.get("registration"):
        getattr(made, field.name).name = "d"
    return made.SerializeToString()


def ask(channel, path, raw, metadata):
    """The refusal of one call, however it is made."""
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(path)(raw, metadata=metadata, timeout=10))
    return caught.value


@pytest.fixture
def guarded(start, token):
    """A master that asks for the token, with a session that holds a lease."""
    master = start(door(token=token))
    client = master.client(credentials(token=token))
    client.call(register())
    client.call(lease(1))
    with grpc.insecure_channel(master.address) as channel:
        yield master, channel


@pytest.mark.parametrize("kind", WRONG)
def test_every_call_is_refused_without_the_token(guarded, kind):
    master, channel = guarded
    before = master.digest
    told = set()
    for path, method in METHODS:
        error = ask(channel, path, request_for(method), WRONG[kind])
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED, path
        told.add((error.details(), tuple(error.trailing_metadata())))
    for path, raw in (ELASTICDL | dict.fromkeys(UNKNOWN, b"")).items():
        error = ask(channel, path, raw, WRONG[kind])
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED, path
        told.add((error.details(), tuple(error.trailing_metadata())))
    assert len(told) == 1, "what is there and what is not must look alike"
    ((words, _),) = told
    assert not [secret for secret in ("ledger-of-the-master", SECRET, "'d'") if secret in words]
    assert master.digest == before


def test_the_calls_above_are_all_and_would_have_done_something(guarded):
    """The same calls with the token get further: the test above would see a gate that is open."""
    master, channel = guarded
    assert {path.rpartition("/")[2] for path, _ in METHODS} >= {
        "Register",
        "Attend",
        "Leave",
        "Status",
        "Restore",
    }
    before = master.digest
    for path, raw in ({path: request_for(method) for path, method in METHODS} | ELASTICDL).items():
        call = channel.unary_stream(path)(raw, metadata=RIGHT, timeout=10)
        try:
            next(call)
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.UNAUTHENTICATED, path  # noqa: PT017
        call.cancel()
    assert master.digest != before


def test_message_of_a_stranger_is_not_read(guarded):
    """A message that can be no message is refused for the token that is missing, not for what it is."""
    _, channel = guarded
    error = ask(channel, "/edl_torch.v1.Master/Register", b"\xff" * 1_000_000, ())
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    too_large = ask(channel, "/edl_torch.v1.Master/Register", b"\xff" * (65 << 20), ())
    assert too_large.code() is grpc.StatusCode.UNAUTHENTICATED


def test_client_is_told_at_once_and_how_to_repair_it(guarded, tmp_path):
    master, _ = guarded
    for given in (Credentials(), credentials(token=token_file(tmp_path / "b", "an-other-token-than-that"))):
        with pytest.raises(AccessDenied, match="EDL_MASTER_TOKEN_FILE") as caught:
            master.client(given, master_timeout_s=600).call(register("intruder"))
        assert "an-other-token" not in str(caught.value)


def test_client_with_the_token_does_everything(start, token, certificates):
    master = start(door(certificates, client_ca=certificates.ca, token=token))
    client = master.client(credentials(certificates, own=certificates.trainer, token=token))
    client.call(register())
    client.attend("s", 1, Listening(1))
    (grant,) = client.call(lease(1)).grants
    done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)
    assert client.call(report(1, acknowledgements=(done,))).stale == ()
    onlooker = Onlooker(client, "d")
    assert onlooker.restore(onlooker.snapshot()) == 2
    assert client.status().datasets[0].acknowledged == 4
    client.leave("s", 1)
    client.leave("onlooker", 2)
    assert client.status().trainers == ()


def test_token_without_the_certificate_is_not_enough(start, token, certificates):
    master = start(door(certificates, client_ca=certificates.ca, token=token))
    before = master.digest
    with pytest.raises(AccessDenied, match="none was given"):
        master.client(credentials(certificates, token=token)).call(register())
    assert master.digest == before


def test_certificate_without_the_token_is_not_enough(start, token, certificates):
    master = start(door(certificates, client_ca=certificates.ca, token=token))
    before = master.digest
    with pytest.raises(AccessDenied, match="EDL_MASTER_TOKEN_FILE=PATH, --token-file PATH"):
        master.client(credentials(certificates, own=certificates.trainer)).call(register())
    assert master.digest == before


def test_health_needs_no_token_and_tells_nothing_else(guarded):
    _, channel = guarded
    check = channel.unary_unary(f"/{HEALTH}/Check")
    assert check(b"", timeout=10) == b"\x08\x01"  # SERVING
    for path in (f"/{HEALTH}/List", f"/{HEALTH}/", f"/{HEALTH}"):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path)(b"", timeout=10)
        assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
