"""Conversion of errors to grpc statuses and back, by one table.

The class travels by name in the trailing metadata, the message as the status' details. An unknown failure is
never turned into a known one.
"""

from __future__ import annotations

from typing import Any

import grpc

from edl_torch import errors
from edl_torch.errors import EdlError, MasterUnavailable
from edl_torch.protocols import DOORS

ERROR_KEY = "edl-error"
MESSAGE_BYTES = 2000  # headers of grpc end at 8 KiB, and percent-encoding triples what is not ASCII

_Code = grpc.StatusCode

# Class by class; what is not here travels as its nearest ancestor that is.
STATUS: dict[type[EdlError], grpc.StatusCode] = {
    EdlError: _Code.INTERNAL,
    errors.InvalidArgument: _Code.INVALID_ARGUMENT,
    errors.ForeignLoop: _Code.INVALID_ARGUMENT,
    errors.LimitExceeded: _Code.RESOURCE_EXHAUSTED,
    errors.AccessDenied: _Code.UNAUTHENTICATED,
    errors.UnknownDataset: _Code.NOT_FOUND,
    errors.DatasetConflict: _Code.ALREADY_EXISTS,
    errors.StaleLease: _Code.ABORTED,
    errors.SessionLost: _Code.ABORTED,
    errors.JournalWentBack: _Code.ABORTED,
    errors.TokenError: _Code.INVALID_ARGUMENT,
    errors.TooManyBadRecords: _Code.FAILED_PRECONDITION,
    errors.AccountingError: _Code.FAILED_PRECONDITION,
    errors.ConcurrentIteration: _Code.FAILED_PRECONDITION,
    errors.ServiceClosed: _Code.FAILED_PRECONDITION,
    errors.MasterUnavailable: _Code.UNAVAILABLE,
    errors.Unsupported: _Code.UNIMPLEMENTED,
    errors.PeerFailed: _Code.ABORTED,
    errors.CheckpointError: _Code.FAILED_PRECONDITION,
    errors.MasterStartError: _Code.FAILED_PRECONDITION,
    errors.JournalError: _Code.UNAVAILABLE,
    errors.IntegrationUnavailable: _Code.FAILED_PRECONDITION,
    errors.ReaderError: _Code.FAILED_PRECONDITION,
    errors.ReaderUnavailable: _Code.FAILED_PRECONDITION,
    errors.DataFormatError: _Code.INVALID_ARGUMENT,
    errors.SourceChanged: _Code.FAILED_PRECONDITION,
    errors.SourceUnavailable: _Code.FAILED_PRECONDITION,
    errors.BadRecord: _Code.DATA_LOSS,
    errors.OutputError: _Code.FAILED_PRECONDITION,
    errors.LoaderWorkerDied: _Code.ABORTED,
    errors.AuditError: _Code.FAILED_PRECONDITION,
}
_BY_NAME = {cls.__name__: cls for cls in STATUS}

# What grpc says of a connection that TLS ended, and what that means. None of it goes away by waiting.
_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted: give the authority that signed it, "
    "EDL_MASTER_TLS_CA=PATH, or renew one that has expired",
    "Hostname Verification Check failed": "its certificate is for other names: call it by one of those, or "
    "have one made for this one",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: start it with --tls-cert and --tls-key, or leave out "
    "EDL_MASTER_TLS, EDL_MASTER_TLS_CA and EDL_MASTER_TLS_CERT here",
    "Failed to create security handshaker": "the certificates that this caller was given cannot be used",
}

_TOO_LARGE = "larger than max"

# Without a class of ours: the master is away, or on its way out, and the same call may succeed later.
_AWAY = frozenset({_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED})

_NO_GRPC = ("Failed parsing HTTP/2", "http1.x server")  # what grpc says of a web server
_FAILED_INSIDE = ("Unexpected <class", "Exception calling application")  # a bug of who knows the call


class AnotherAnswers(MasterUnavailable):
    """Error: something other than the master answers at its address, while the master is away."""


class NoTrust(errors.AccessDenied):
    """Error: TLS with the other side has failed."""


def to_status(error: EdlError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return code, details and trailing metadata of an error."""
    cls = next(c for c in type(error).__mro__ if c in STATUS)
    return STATUS[cls], shorten(str(error)), ((ERROR_KEY, cls.__name__),)


def from_status(error: grpc.RpcError, address: str) -> EdlError:
    """Return the error that the master raised, MasterUnavailable if there is none, NoTrust if TLS failed.

    AnotherAnswers, a MasterUnavailable, where something else is there.
    """
    code, details = error.code(), error.details() or ""
    cls = _BY_NAME.get(_error_name(error))
    if cls is not None:
        return cls(details)
    if code is _Code.UNAVAILABLE:
        for sign, meaning in _TLS.items():
            if sign in details:
                return NoTrust(f"no connection to the master at {address}: {meaning}. {details}")
    if code is _Code.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return errors.LimitExceeded(f"the call is too large for the master at {address}: {details}")
    if code is _Code.UNAVAILABLE and any(sign in details for sign in _NO_GRPC):
        return AnotherAnswers(f"what answers at {address} does not speak gRPC: {details}")
    if code in _AWAY:
        return MasterUnavailable(f"the master at {address} does not answer ({code.name}: {details})")
    if is_masters_own(error) or details.startswith(_FAILED_INSIDE):
        return EdlError(f"the master at {address} failed ({code.name}): {details}")
    return AnotherAnswers(
        f"what answers at {address} is no master that knows this call ({code.name}: {details}); if it is "
        f"another project's master, give EDL_MASTER_PROTOCOL={' or '.join(DOORS)}"
    )


def is_masters_own(error: grpc.RpcError) -> bool:
    """Return whether a master of ours refused the call: only it names the class of an error."""
    return bool(_error_name(error))


def _error_name(error: grpc.RpcError) -> str:
    metadata: Any = error.trailing_metadata() or ()  # pairs, which the stubs do not know
    return next((str(value) for key, value in metadata if key == ERROR_KEY), "")


def shorten(message: str) -> str:
    """Return the message, its middle left out when it is too long to travel."""
    raw = message.encode("utf-8", "backslashreplace")
    if len(raw) <= MESSAGE_BYTES:
        return raw.decode()
    half = MESSAGE_BYTES // 2
    return f"{raw[:half].decode(errors='ignore')} … {raw[-half:].decode(errors='ignore')}"
