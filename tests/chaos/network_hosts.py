"""Hosts of one network on this machine: network namespaces with an interface each, plugged into one switch.

Nothing of the machine's own network is touched; names are unique, and everything goes with the `with` block.
Needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), `ip` of iproute2 and /dev/net/tun: `why_not` says what lacks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from network_switch import Port, Switch

# TCP doubles its patience with each silence, up to two minutes. A test has less.
SYSCTLS = {"net/ipv4/tcp_rto_max_ms": 1000, "net/ipv6/conf/all/disable_ipv6": 1}


def why_not() -> str | None:
    """Why this machine cannot have such a network; None where it can."""
    if shutil.which("ip") is None:
        return "no `ip` here: the Debian package iproute2 has it"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no access to /dev/net/tun"
    try:
        with Network("probe"):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", None) or error
        return f"network namespaces are not permitted here: {str(said).strip()}"


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace. `address` is that of its interface eth0."""

    name: str
    namespace: str
    address: str
    port: Port

    @property
    def prefix(self) -> list[str]:
        """Before a command, lets it run there, in the same process."""
        return ["ip", "netns", "exec", self.namespace]

    def pull(self) -> None:
        """The cable is out: the interface sees no carrier."""
        self.port.carry(False)

    def plug(self) -> None:
        """The cable is in again."""
        self.port.carry(True)

    def down(self) -> None:
        """The interface is switched off: its routes go."""
        ip("-n", self.namespace, "link", "set", "eth0", "down")

    def up(self) -> None:
        """The interface is switched on again."""
        ip("-n", self.namespace, "link", "set", "eth0", "up")


class Network:
    """Hosts by name, from `__enter__` to `__exit__`. What still runs on them then is killed."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        self._names = names
        self._seed = seed
        self._tag = secrets.token_hex(3)
        self._stack = ExitStack()
        self.hosts: dict[str, Host] = {}
        self.switch: Switch

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            for number, name in enumerate(self._names, start=1):
                self.hosts[name] = self._make(stack, number, name)
            ports = {name: host.port for name, host in self.hosts.items()}
            self.switch = stack.enter_context(Switch(ports, seed=self._seed))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def mend(self) -> None:
        """Lines are clear, cables plugged, interfaces up."""
        self.switch.mend()
        for host in self.hosts.values():
            host.plug()
            host.up()

    def _make(self, stack: ExitStack, number: int, name: str) -> Host:
        namespace, device = f"edl-{os.getpid()}-{self._tag}-{name}", f"edl{self._tag}{number}"
        mac = bytes([0x02, 0xED, 0x17, 0, 0, number])
        address = f"10.77.0.{number}"
        ip("netns", "add", namespace)
        stack.callback(_remove, namespace)
        port = Port(device, mac)
        stack.callback(port.close)
        ip("link", "set", device, "netns", namespace, "name", "eth0", "address", mac.hex(":"))
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "lo", "up")
        _write_sysctls(namespace)
        ip("-n", namespace, "link", "set", "eth0", "up")
        return Host(name, namespace, address, port)


def ip(*arguments: str) -> str:
    """Run `ip`. Raises CalledProcessError with what it said."""
    return _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def _write_sysctls(namespace: str) -> None:
    """Those that this kernel has."""
    lines = [
        f"if [ -w /proc/sys/{name} ]; then echo {value} > /proc/sys/{name}; fi"
        for name, value in SYSCTLS.items()
    ]
    _run(["ip", "netns", "exec", namespace, "sh", "-c", "; ".join(lines)])


def _remove(namespace: str) -> None:
    """With all processes in it."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", namespace)
