"""Which master a service speaks to when it is given none.

An address in the environment means a server; without one torchrun's workers share a master of their own, and
else it lives in this process.
"""

from __future__ import annotations

import logging

from edl_torch.client.environment import (
    finds_master_through_torchrun,
    master_address_from_env,
    master_protocol_from_env,
    master_timeout_from_env,
    page_address_from_env,
    trainer_name_from_env,
)
from edl_torch.client.master_api import MasterApi
from edl_torch.errors import InvalidArgument, MasterStartError

log = logging.getLogger("edl_torch")


def default_master(master_timeout_s: float | None = None) -> MasterApi:
    """Return a client for the master of the environment, or of the torchrun job; else a `LocalMaster`.

    `master_timeout_s` is the client's; None takes it from the environment too. Raises InvalidArgument for
    what cannot be used of the environment.
    """
    protocol = master_protocol_from_env()
    if protocol == "edl_torch" and finds_master_through_torchrun():
        from edl_torch.client.torchrun.discovery import master_of_job

        address: str | None
        address, credentials = master_of_job()
    else:
        address, credentials = master_address_from_env(), None
    if address is None:
        if protocol == "elasticdl":
            raise InvalidArgument(
                "EDL_MASTER_PROTOCOL is 'elasticdl', but no master is named: give EDL_MASTER_ADDR=HOST:PORT"
            )
        return _embedded_master()
    timeout_s = master_timeout_from_env() if master_timeout_s is None else master_timeout_s
    if protocol == "elasticdl":
        from edl_torch.client.elasticdl.client import ElasticDLMasterClient

        return ElasticDLMasterClient(address, master_timeout_s=timeout_s)
    from edl_torch.client.grpc.client import MasterClient

    return MasterClient(address, master_timeout_s=timeout_s, credentials=credentials)


def _embedded_master() -> MasterApi:
    """Return a master in this process, with a page where `EDL_HTTP` asks for one."""
    from edl_torch.master.embedded import LocalMaster

    master, page = LocalMaster(trainer_name_from_env()), page_address_from_env()
    if page is not None:
        from edl_torch.master.web.threaded import show

        try:
            show(master, page)
        except MasterStartError as error:  # another service, or trainer, of the same environment has the port
            log.warning("no page of this process's master: %s", error)
    return master
