"""Large pages for the memory that a process has: forks of it copy 512 times fewer entries of its page table.

A process with torch and all tests has hundreds of megabytes in small pages, for which a fork and its end cost
20 ms of system time. Where the system has no such pages, nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

HUGE_BYTES = 2 << 20
MAPS = Path("/proc/self/maps")
MADV_COLLAPSE = 25  # of Linux 6.1


def use_huge_pages() -> None:
    """Move what Python's objects lie in to large pages, as far as the system has some."""
    if sys.platform != "linux" or not MAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first, after in list(_own_memory()):
        for address in range(-(-first // HUGE_BYTES) * HUGE_BYTES, after - HUGE_BYTES + 1, HUGE_BYTES):
            advise(
                address, HUGE_BYTES, MADV_COLLAPSE
            )  # of what is hardly in use it takes all, some MB in sum


def _own_memory() -> Iterator[tuple[int, int]]:
    """Where memory of no file is."""
    for line in MAPS.read_text().splitlines():
        where, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            first, after = where.split("-")
            yield int(first, 16), int(after, 16)
