"""Who may call a master: credentials, and the gate that asks for them."""

from __future__ import annotations

import copy
import pickle
from contextlib import closing

import grpc
import pytest
from door_kit import SECRET, credentials, door, lease, register, report, token_file
from fences import Onlooker
from google.protobuf import message_factory

from edl_torch.client.grpc.channel import build_channel
from edl_torch.core.calls import Acknowledgement
from edl_torch.elasticdl import elasticdl_pb2, wire
from edl_torch.elasticdl.wire import GetTaskCall, TaskResult
from edl_torch.errors import AccessDenied, InvalidArgument
from edl_torch.master.health import SERVICE as HEALTH
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.credentials import AccessToken, Credentials, ServerCredentials
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


# What is in the files that open doors, and that none of it is ever shown ------------------------------------


def test_token_is_the_word_in_the_file(tmp_path):
    token = AccessToken.read(token_file(tmp_path, f"  {SECRET}\r\n"))
    assert token.opens(f"Bearer {SECRET}")
    assert token.opens(f"Bearer {SECRET}".encode())


@pytest.mark.parametrize(
    "header",
    [
        "",
        SECRET,
        "Bearer ",
        f"bearer {SECRET}",
        f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET}x",
        "Bearer ä\udcff",
    ],
)
def test_any_other_header_does_not_open(tmp_path, header):
    assert not AccessToken.read(token_file(tmp_path)).opens(header)


def test_tokens_are_compared_in_constant_time(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda *pair: compared.append(pair) or True)
    assert AccessToken.read(token_file(tmp_path)).opens("Bearer wrong")
    assert compared == [(b"Bearer wrong", f"Bearer {SECRET}".encode())]


@pytest.mark.parametrize(
    "content", ["", "\n", "a" * 15, "two words are not one", "ä" * 20, "a" * 20 + "\0", "a" * 20 + "\x7f"]
)
def test_token_that_cannot_be_used_names_the_file_and_not_the_content(tmp_path, content):
    path = token_file(tmp_path, content)
    with pytest.raises(InvalidArgument, match="16 or more ASCII") as caught:
        AccessToken.read(path)
    assert str(path) in str(caught.value)
    assert not content.strip() or content.strip() not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o666])
def test_a_token_that_others_may_read_or_write_is_refused(tmp_path, mode):
    path = token_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(InvalidArgument, match=rf"'{path}' \(mode {mode:04o}\): chmod 600 '{path}'"):
        AccessToken.read(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_token_that_a_group_may_read_is_taken(tmp_path, mode):
    path = token_file(tmp_path)
    path.chmod(mode)
    assert AccessToken.read(path).opens(f"Bearer {SECRET}")


def test_token_of_exactly_16_characters_is_long_enough(tmp_path):
    assert AccessToken.read(token_file(tmp_path, "a" * 16)).opens("Bearer " + "a" * 16)


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_file_that_cannot_be_read_is_named(tmp_path, kind):
    path = tmp_path / "token"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(InvalidArgument, match=f"the token file '{path}' cannot be read"):
        AccessToken.read(path)


def test_certificate_and_key_of_different_pairs_are_refused(certificates):
    (cert, _), (_, other) = certificates.master, certificates.trainer
    with pytest.raises(InvalidArgument, match=r"master.pem.*trainer.key.*do not belong together"):
        ServerCredentials.read(tls_cert=cert, tls_key=other)
    with pytest.raises(InvalidArgument, match="do not belong together"):
        Credentials.read(tls_cert=cert, tls_key=other)


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("no pem", "is no PEM file"),
        ("-----BEGIN CERTIFICATE-----\nrubbish\n", "damaged"),
        (None, "cannot be read"),
    ],
)
def test_damaged_file_of_a_door_is_named(certificates, tmp_path, which, content, match):
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_text(content)
    cert, key = certificates.master
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": certificates.ca} | {which: bad}
    with pytest.raises(InvalidArgument, match=match) as caught:
        ServerCredentials.read(**files)
    assert str(bad) in str(caught.value)


def test_key_with_a_pass_phrase_is_refused_without_asking(certificates, tmp_path):
    from cryptography.hazmat.primitives import serialization

    cert, key = certificates.master
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(InvalidArgument, match="is encrypted"):
        ServerCredentials.read(tls_cert=cert, tls_key=locked)


@pytest.mark.parametrize(
    "files",
    [{"tls_cert": "c"}, {"tls_key": "k"}, {"tls_client_ca": "a"}, {"tls_client_ca": "a", "tls_key": "k"}],
)
def test_door_needs_what_belongs_together(files):
    with pytest.raises(InvalidArgument, match=r"--tls-cert and --tls-key"):
        ServerCredentials.read(**files)


# The environment ------------------------------------------------------------------------------------------


def test_environment_names_the_files(certificates, tmp_path):
    cert, key = certificates.trainer
    given = Credentials.from_env(
        {
            "EDL_MASTER_TOKEN_FILE": str(token_file(tmp_path)),
            "EDL_MASTER_TLS_CA": str(certificates.ca),
            "EDL_MASTER_TLS_CERT": str(cert),
            "EDL_MASTER_TLS_KEY": f" {key} ",
            "EDL_MASTER_TLS_NAME": "the.master",
        }
    )
    token = tmp_path / "token"
    assert given == credentials(certificates, own=(cert, key), token=token, tls_name="the.master")
    assert given.tls
    assert Credentials.from_env({"EDL_MASTER_TLS_CA": "", "EDL_MASTER_TLS": "0"}) == Credentials()
    assert Credentials.from_env({"EDL_MASTER_TLS": "1"}) == Credentials(tls=True)


@pytest.mark.parametrize("name", ["EDL_MASTER_TLS", "EDL_MASTER_INSECURE"])
def test_switch_that_is_neither_0_nor_1_is_refused(name):
    with pytest.raises(InvalidArgument, match=f"{name} is 'yes'"):
        Credentials.from_env({name: "yes"})


def test_name_of_a_certificate_without_tls_is_refused():
    with pytest.raises(InvalidArgument, match=r"'the\.master'.*no TLS"):
        Credentials.from_env({"EDL_MASTER_TLS_NAME": "the.master"})


def test_half_a_certificate_in_the_environment_is_refused(certificates):
    with pytest.raises(InvalidArgument, match="belong together"):
        Credentials.from_env({"EDL_MASTER_TLS_CERT": str(certificates.trainer[0])})


@pytest.mark.parametrize("address", ["10.1.2.3:5", "master.example:5", "0.0.0.0:5"])
def test_token_does_not_cross_a_network_in_the_clear(tmp_path, certificates, address):
    token = token_file(tmp_path)
    with pytest.raises(InvalidArgument, match="could read the token"):
        build_channel(address, credentials(token=token))
    build_channel(address, credentials(token=token, insecure=True)).close()
    build_channel(address, credentials(certificates, token=token)).close()
    build_channel(address, Credentials()).close()


@pytest.mark.parametrize("address", ["127.0.0.1:5", "localhost:5", "[::1]:5"])
def test_token_may_stay_on_this_machine_without_tls(tmp_path, address):
    build_channel(address, credentials(token=token_file(tmp_path))).close()


def test_token_joins_the_metadata_of_a_caller_with_any_stub(start, token):
    master = start(door(token=token))
    path = "/edl_torch.v1.Master/Status"
    with closing(build_channel(master.address, credentials(token=token))) as channel:
        ask = channel.unary_unary(path)
        own = {"metadata": (("own", "entry"),), "timeout": 10}
        answers = [
            ask(b"", **own),
            ask.with_call(b"", **own)[0],
            ask.future(b"", timeout=10).result(),
            *channel.unary_stream(path)(b"", timeout=10),
        ]
        assert len(answers) == 4
        assert len({pb.StatusResponse.FromString(answer).ledger for answer in answers}) == 1


# Never shown ----------------------------------------------------------------------------------------------


def secrets_of(certificates):
    return [SECRET, certificates.master[1].read_text()[40:80], certificates.trainer[1].read_text()[40:80]]


def test_nothing_secret_is_in_a_repr(certificates, token):
    cert, key = certificates.trainer
    values = [
        AccessToken.read(token),
        credentials(certificates, own=(cert, key), token=token),
        door(certificates, client_ca=certificates.ca, token=token),
    ]
    for value in values:
        for shown in (repr(value), str(value), f"{value}"):
            assert "BEGIN" not in shown
            assert not [secret for secret in secrets_of(certificates) if secret in shown]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_token_is_not_pickled(token, protocol):
    for value in (AccessToken.read(token), credentials(token=token), door(token=token)):
        with pytest.raises(TypeError, match="stays in the process"):
            pickle.dumps(value, protocol)
    with pytest.raises(TypeError):
        copy.deepcopy(AccessToken.read(token))
