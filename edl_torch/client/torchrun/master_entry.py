"""The entry of a job's master in the job's store, and whether that master still answers.

It must not know where entries are kept.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field

from edl_torch.errors import MasterStartError
from edl_torch.system.address import parse_address

CONNECT_S = 2.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterEntry:
    """A master's address, and what it asks its callers for; or why there is none.

    Attributes:
        address: `host:port`.
        token: that the master was given for this job alone; '' where it asks for none, or for the user's own.
        network: where a loopback address is meant; '' where the address is good anywhere.
        error: of the worker that could not start it.
    """

    address: str = ""
    token: str = field(default="", repr=False)
    network: str = ""
    error: str = ""

    @classmethod
    def of(cls, address: str, token: str = "") -> MasterEntry:
        """Of a master that listens there, seen from this machine."""
        local = all(ip.is_loopback for ip in parse_address(address).resolve())
        return cls(address=address, token=token, network=this_network() if local else "")

    @property
    def text(self) -> str:
        """The entry, as the store has it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> MasterEntry:
        """The reverse of `text`."""
        return cls(**json.loads(text))

    @property
    def answers(self) -> bool:
        """Whether a master answers there. Raises MasterStartError where this process cannot reach it."""
        return bool(self.address) and answers(self.here().address)

    def here(self) -> MasterEntry:
        """Itself, where this process can use it. Raises MasterStartError."""
        if self.error:
            raise MasterStartError(f"another worker could not start this job's master: {self.error}")
        if self.network and self.network != this_network():
            raise MasterStartError(
                f"this job's master listens on {self.address} of another node only, for the job began there "
                "alone and torchrun's --nnodes did not say that it may grow: start it again with "
                "EDL_MASTER_INSECURE=1 on all nodes, or start `edl-torch master` yourself and name it in "
                "EDL_MASTER_ADDR"
            )
        return self


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
