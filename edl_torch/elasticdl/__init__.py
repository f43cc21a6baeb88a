"""ElasticDL's protocol, from both sides.

Its unmodified clients on our master's port (`servicer`, `adapter`), and its master as a trainer of ours sees
it (`client`, `tasks`). `wire` has its calls as values and bytes. The functions here are
the door of the room: see `edl_torch.protocols.Door`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_torch.core.calls import MasterApi
    from edl_torch.protocols import MakeServicer

_TIMEOUT = "elasticdl_task_timeout_s"
_SILENT = "a task of an ElasticDL client that is silent for so long is handed out again (default: 300)"
DURATIONS = {_TIMEOUT: (300.0, _SILENT)}


def make_servicer(options: Mapping[str, Any]) -> MakeServicer:
    """Return what serves ElasticDL's clients."""
    from edl_torch.elasticdl.adapter import ElasticDLAdapter, ElasticDLOptions
    from edl_torch.elasticdl.servicer import ElasticDLServicer

    given = ElasticDLOptions(
        task_timeout_s=options.get(_TIMEOUT, DURATIONS[_TIMEOUT][0]),
        max_bad_records=options.get("max_bad_records", 0),
    )
    return lambda host: ElasticDLServicer(host, ElasticDLAdapter(host.dispatcher, given))


def connect(address: str, timeout_s: float) -> MasterApi:
    """Return a client of ElasticDL's master; its number is `WORKER_ID`, else `RANK`, else 0."""
    from edl_torch.elasticdl.client import ElasticDLMasterClient

    return ElasticDLMasterClient(address, master_timeout_s=timeout_s)
