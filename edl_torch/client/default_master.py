"""Which master a service speaks to when it is given none.

An address in the environment means a server; without one the master lives in this process.
"""

from __future__ import annotations

from edl_torch.client.environment import master_address_from_env
from edl_torch.client.port import MasterPort


def default_master() -> MasterPort:
    """A `MasterClient` for the address in the environment, else a `LocalMaster`."""
    address = master_address_from_env()
    if address is None:
        from edl_torch.master.embedded import LocalMaster

        return LocalMaster()
    from edl_torch.client.transport import MasterClient

    return MasterClient(address)
