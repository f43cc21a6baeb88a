"""Errors travel by class and message, both ways."""

from __future__ import annotations

import grpc
import pytest

from edl_torch import errors
from edl_torch.errors import EdlError, MasterUnavailable, StaleLease
from edl_torch.rpc.status import MESSAGE_BYTES, STATUS, AnotherAnswers, from_status, shorten, to_status

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, EdlError)]


class Status(grpc.RpcError):
    """What grpc raises in a client."""

    def __init__(self, code, details, metadata=()):
        self.parts = code, details, metadata

    def code(self):
        return self.parts[0]

    def details(self):
        return self.parts[1]

    def trailing_metadata(self):
        return self.parts[2]


@pytest.mark.parametrize("cls", ALL)
def test_every_error_comes_back_as_itself(cls):
    back = from_status(Status(*to_status(cls("shard 7 of 'é' is gone"))), "h:1")
    assert type(back) is cls
    assert str(back) == "shard 7 of 'é' is gone"


def test_every_error_has_its_own_row():
    assert set(STATUS) == set(ALL)


def test_subclass_without_a_row_travels_as_its_parent():
    class VeryStale(StaleLease):
        pass

    assert type(from_status(Status(*to_status(VeryStale("x"))), "h:1")) is StaleLease


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_no_answer_is_master_unavailable_and_names_the_address(code):
    error = from_status(Status(grpc.StatusCode[code], "gone"), "h:1")
    assert type(error) is MasterUnavailable
    assert "h:1" in str(error)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("UNIMPLEMENTED", "Method not found!"),
        ("UNKNOWN", "Received http2 header with status: 500"),
        ("INTERNAL", "Exception deserializing response!"),
        ("PERMISSION_DENIED", "RBAC: access denied"),
        ("UNAUTHENTICATED", "who are you?"),
        ("UNAVAILABLE", "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)"),
    ],
)
def test_status_of_something_else_is_no_answer_of_the_master(code, details):
    error = from_status(Status(grpc.StatusCode[code], details), "h:1")
    assert isinstance(error, MasterUnavailable)
    assert type(error) is AnotherAnswers
    assert details in str(error)


@pytest.mark.parametrize(
    "details", ["Unexpected <class 'KeyError'>: 7", "Exception calling application: 'NoneType'"]
)
def test_a_masters_own_bug_is_no_end_of_data_and_no_waiting(details):
    error = from_status(Status(grpc.StatusCode.UNKNOWN, details), "h:1")
    assert type(error) is EdlError
    assert details in str(error)


def test_unknown_class_name_is_not_trusted():
    error = from_status(Status(grpc.StatusCode.ABORTED, "x", (("edl-error", "SystemExit"),)), "h:1")
    assert type(error) is EdlError


@pytest.mark.parametrize("letter", ["a", "é", "語", "\udcff"])
def test_long_message_is_cut_in_the_middle_and_fits_a_header(letter):
    message = shorten("begin " + letter * 5000 + " end")
    assert message.startswith("begin")
    assert message.endswith("end")
    assert len(message.encode()) <= MESSAGE_BYTES + 10
