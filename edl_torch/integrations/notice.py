"""What is pinned up about a job's master, and whether the master still answers.

It must not know where notices hang.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from edl_torch.errors import MasterStartError
from edl_torch.rpc.address import parse_address

CONNECT_S = 2.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A master's address; or why there is none.

    Attributes:
        address: `host:port`.
        network: where a loopback address is meant; '' where the address is good anywhere.
        error: of the worker that could not start it.
    """

    address: str = ""
    network: str = ""
    error: str = ""

    @classmethod
    def of(cls, address: str) -> Notice:
        """Of a master that listens there, seen from this machine."""
        local = all(ip.is_loopback for ip in parse_address(address).resolve())
        return cls(address=address, network=this_network() if local else "")

    @property
    def text(self) -> str:
        """To be pinned up."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> Notice:
        """The reverse of `text`."""
        return cls(**json.loads(text))

    def here(self) -> Notice:
        """Itself, where this process can use it. Raises MasterStartError."""
        if self.error:
            raise MasterStartError(f"another worker could not start this job's master: {self.error}")
        if self.network and self.network != this_network():
            raise MasterStartError(
                f"this job's master listens on {self.address} of another node only: {HOW_TO_OPEN}"
            )
        return self


HOW_TO_OPEN = (
    "give all nodes EDL_MASTER_INSECURE=1 if the network between them is your own, so that it may listen to "
    "them, or start `edl-torch master` yourself and name it in EDL_MASTER_ADDR"
)


def this_network() -> str:
    """A name of what 127.0.0.1 means to this process: containers of one machine have each their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def answers(address: str) -> bool:
    """Whether something listens there. A machine that is silent gets a few seconds."""
    where = parse_address(address)
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            socket.create_connection((where.host, where.port), CONNECT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            if time.monotonic() >= deadline:
                return False
        else:
            return True
