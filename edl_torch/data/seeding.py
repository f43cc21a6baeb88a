"""Random augmentation that depends on the record and the epoch alone, not on workers or their number.

Seeds the generators that transforms draw from and puts them back; it does not know what a transform does.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import torch

from edl_torch.core.permutation import derive_key
from edl_torch.data.numpy_state import NumpyGlobals


class RecordSeeds:
    """Seeds by (seed, epoch, record) for Python's, numpy's and torch's CPU generators."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = -1
        self._base = 0
        self._numpy = NumpyGlobals()

    def around(self, transform: Callable[[Any], Any], epoch: int) -> Callable[[Any, tuple[str, int]], Any]:
        """`transform` as a function of a record and its place (name, index).

        Inside, random numbers are those of the record; afterwards the generators are as before.
        """

        def seeded(record: Any, place: tuple[str, int]) -> Any:
            seed = self._seed_of(epoch, *place)
            python, torch_state = random.getstate(), torch.get_rng_state()
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            self._numpy.seed(seed & 0xFFFFFFFF)
            try:
                return transform(record)
            finally:
                self._numpy.restore()
                random.setstate(python)
                torch.set_rng_state(torch_state)

        return seeded

    def _seed_of(self, epoch: int, name: str, index: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._base = epoch, derive_key(self._seed, epoch, "augment")
        source = zlib.crc32(name.encode("utf-8", "surrogatepass")) << 32
        mixed = self._base ^ source ^ (index * 0x9E3779B97F4A7C15)
        mixed &= 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return mixed ^ (mixed >> 31)
