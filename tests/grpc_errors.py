"""What grpc raises in a client, for tests that stand in the place of a master."""

from __future__ import annotations

from typing import Any

import grpc


class CallFailed(grpc.RpcError):
    """How a call or a stream ends that was not answered; by default it did not reach the master."""

    def __init__(
        self,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        details: str = "connection refused",
        metadata: Any = (),
    ) -> None:
        self._parts = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]
