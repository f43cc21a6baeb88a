"""Page and metrics of a master over HTTP, for people and for Prometheus; needs `edl-torch[web]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edl_torch.errors import MasterStartError

if TYPE_CHECKING:
    from edl_torch.core.calls import MasterStatus
    from edl_torch.master.web.app import WebPort
    from edl_torch.rpc.credentials import ServerCredentials


def web_port(
    status: Callable[[], MasterStatus],
    latest: Callable[[], int],
    address: str,
    *,
    insecure: bool = False,
    credentials: ServerCredentials | None = None,
) -> WebPort:
    """Return a server of the page, not started. Raises MasterStartError where its packages are missing."""
    try:
        from edl_torch.master.web.app import WebPort
    except ModuleNotFoundError as exc:
        raise MasterStartError(
            f"the page needs {exc.name}, which is not installed: pip install 'edl-torch[web]'"
        ) from exc
    return WebPort(status, latest, address, insecure=insecure, credentials=credentials)
