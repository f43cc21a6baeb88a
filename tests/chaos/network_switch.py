"""A switch for TAP devices, in a thread: what one host sends reaches another late, in part, or not at all.

It carries Ethernet frames between the kernel's own network stacks, so TCP meets real silence. It needs no
`tc netem`, which many kernels lack. It must not know what runs on the hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass

FRAME_BYTES = 1 << 16
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
TUNSETIFF, TUNSETCARRIER = 0x400454CA, 0x400454E2


@dataclass(frozen=True, slots=True)
class Line:
    """One direction of two hosts: frames are `delay_s` late, and each is lost with probability `loss`."""

    delay_s: float = 0.0
    loss: float = 0.0


CLEAR = Line()
BROKEN = Line(loss=1.0)


class Port:
    """Where the cable of one host is plugged in. The TAP device lives as long as this."""

    def __init__(self, device: str, mac: bytes) -> None:
        self.mac = mac
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(self.fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
        except OSError:
            self.close()
            raise

    def carry(self, plugged: bool) -> None:
        """Give the device its carrier, or take it away, as a pulled cable does."""
        fcntl.ioctl(self.fd, TUNSETCARRIER, struct.pack("i", plugged))

    def read(self) -> bytes:
        """A frame that the host has sent; nothing where there is none, or where its interface is down."""
        try:
            return os.read(self.fd, FRAME_BYTES)
        except OSError:
            return b""

    def write(self, frame: bytes) -> None:
        """Lost where the host's interface is down."""
        with contextlib.suppress(OSError):
            os.write(self.fd, frame)

    def close(self) -> None:
        os.close(self.fd)


class Switch:
    """Carries frames from `__enter__` to `__exit__`. Losses are drawn from `seed`."""

    def __init__(self, ports: dict[str, Port], *, seed: int = 0) -> None:
        self.lost: Counter[tuple[str, str]] = Counter()  # frames, by sender and receiver
        self._ports = ports
        self._by_mac = {port.mac: name for name, port in ports.items()}
        self._lines: dict[tuple[str, str], Line] = {}
        self._random = random.Random(seed)
        self._late: list[tuple[float, int, str, bytes]] = []
        self._numbers = itertools.count()
        self._awake, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def set(self, sender: str, receiver: str, line: Line) -> None:
        """From now on, in this direction alone."""
        self._lines[sender, receiver] = line

    def between(self, some: set[str], others: set[str], line: Line) -> None:
        """From now on, in both directions between these and those."""
        for one, other in itertools.product(some, others):
            self.set(one, other, line)
            self.set(other, one, line)

    def mend(self) -> None:
        """Every line is clear."""
        self._lines = {}

    def __enter__(self) -> Switch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake)
        self._thread.join(60)
        os.close(self._awake)

    # In the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._awake, selectors.EVENT_READ, None)
            for name, port in self._ports.items():
                selector.register(port.fd, selectors.EVENT_READ, name)
            while True:
                for key, _ in selector.select(self._until_due_s()):
                    if key.data is None:
                        return
                    self._take(key.data)
                self._deliver()

    def _until_due_s(self) -> float | None:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else None

    def _take(self, sender: str) -> None:
        frame = self._ports[sender].read()
        if len(frame) < 14:
            return
        known = self._by_mac.get(frame[:6])
        to_all = frame[0] & 1
        for receiver in self._ports if to_all else filter(None, [known]):
            if receiver != sender:
                self._send(sender, receiver, frame)

    def _send(self, sender: str, receiver: str, frame: bytes) -> None:
        line = self._lines.get((sender, receiver), CLEAR)
        if line.loss and self._random.random() < line.loss:
            self.lost[sender, receiver] += 1
        elif line.delay_s:
            due = time.monotonic() + line.delay_s
            heapq.heappush(self._late, (due, next(self._numbers), receiver, frame))
        else:
            self._ports[receiver].write(frame)

    def _deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, receiver, frame = heapq.heappop(self._late)
            self._ports[receiver].write(frame)
