"""What is in the files that open doors, and that none of it is ever shown."""

from __future__ import annotations

import copy
import pickle
from contextlib import closing

import pytest
from door_kit import SECRET, credentials, door, token_file

from edl_torch.client.grpc.channel import build_channel
from edl_torch.errors import InvalidArgument
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.credentials import AccessToken, Credentials, ServerCredentials


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
