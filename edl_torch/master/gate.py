"""Authentication of calls: those without the master's token are refused before their message is read.

Health checks of an orchestrator carry no token, and learn only whether the master serves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from edl_torch.errors import AccessDenied
from edl_torch.master.health import SERVICE
from edl_torch.rpc.credentials import METADATA_KEY, AccessToken
from edl_torch.rpc.status import to_status

_OPEN = f"/{SERVICE}/"

Details = grpc.HandlerCallDetails
Continuation = Callable[[Details], Awaitable[Any]]


class Gate(grpc.aio.ServerInterceptor):
    """Interceptor that checks every call for the token."""

    def __init__(self, token: AccessToken) -> None:
        self._token = token
        # As a stream, which is never read: the message of a stranger costs no memory.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Continuation, details: Details) -> Any:
        """Return the call's own handler, or one that refuses it."""
        if details.method.startswith(_OPEN) or self._has_token(details):
            return await continuation(details)
        return self._refusal

    def _has_token(self, details: Details) -> bool:
        given = [value for key, value in details.invocation_metadata if key == METADATA_KEY]
        return len(given) == 1 and self._token.opens(given[0])


async def _refuse(requests: Any, context: Any) -> None:
    refusal = AccessDenied(
        "the master wants the token that it was started with, and the call has not that one: "
        "give EDL_MASTER_TOKEN_FILE=PATH, or token_file= of Credentials.read()"
    )
    await context.abort(*to_status(refusal))
