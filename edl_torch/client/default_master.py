"""Which master a service speaks to when it is given none.

An address in the environment means a server; without one torchrun's workers share a master of their own, and
else it lives in this process.
"""

from __future__ import annotations

from edl_torch.client.environment import (
    finds_master_through_torchrun,
    master_address_from_env,
    master_timeout_from_env,
)
from edl_torch.client.port import MasterPort


def default_master(master_timeout_s: float | None = None) -> MasterPort:
    """A `MasterClient` for the address in the environment, or of the torchrun job; else a `LocalMaster`.

    `master_timeout_s` is the client's; None takes it from the environment too.
    """
    if finds_master_through_torchrun():
        from edl_torch.integrations.torchrun import master_of_job

        address: str | None = master_of_job()
    else:
        address = master_address_from_env()
    if address is None:
        from edl_torch.master.embedded import LocalMaster

        return LocalMaster()
    from edl_torch.client.transport import MasterClient

    timeout_s = master_timeout_from_env() if master_timeout_s is None else master_timeout_s
    return MasterClient(address, master_timeout_s=timeout_s)
