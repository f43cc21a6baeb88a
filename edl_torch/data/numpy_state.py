"""numpy's global random generator, lent to a record and put back exactly, in a few microseconds.

Copying its state out and in takes numpy some 60 µs, so the generator behind the global functions is exchanged
instead. It does not know what draws from it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.random import MT19937
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_STATE_BYTES = 624 * 4 + 4  # of numpy's mt19937_state: the key, and the position in it


class NumpyGlobals:
    """Between `seed` and `restore` the global functions draw from a generator of our own.

    What an exchange loses is the second of a pair of normal numbers, which numpy keeps beside the generator
    and hands out without moving it. So there is known to be none only while the generator stands where we
    left it without one; anywhere else its whole state is copied.
    """

    def __init__(self) -> None:
        self._ours = MT19937(0)
        self._theirs: Any = None
        self._left: bytes | None = None  # where the generator stood without such a number
        self._copy: Any = None  # the whole state, with such a number

    def seed(self, seed: int) -> None:
        """Lend a generator that begins with `seed`, in [0, 2³²)."""
        self._theirs = get_bit_generator()
        if isinstance(self._theirs, MT19937) and _state(self._theirs) != self._left:
            state = np.random.get_state(legacy=False)
            self._copy = state if state["has_gauss"] else None
        set_bit_generator(self._ours)
        np.random.seed(seed)

    def restore(self) -> None:
        """Put the generator back as it was."""
        set_bit_generator(self._theirs)
        if self._copy is not None:
            np.random.set_state(self._copy)
            self._left, self._copy = None, None
        elif isinstance(self._theirs, MT19937):
            self._left = _state(self._theirs)


def _state(generator: MT19937) -> bytes:
    return ctypes.string_at(generator.ctypes.state_address, _STATE_BYTES)
