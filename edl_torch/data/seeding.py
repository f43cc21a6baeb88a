"""Random augmentation that depends on the record and the epoch alone, not on workers or their number.

Seeds the generators that transforms draw from and puts them back; it does not know what a transform does.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from edl_torch.core.permutation import derive_key


class RecordSeeds:
    """Seeds by (seed, epoch, record) for Python's, numpy's and torch's CPU generators."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = -1
        self._base = 0

    @contextmanager
    def of(self, epoch: int, name: str, index: int) -> Iterator[None]:
        """Inside, random numbers are those of the record; afterwards the generators are as before."""
        seed = self._seed_of(epoch, name, index)
        python, legacy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
            torch.set_rng_state(torch_state)

    def _seed_of(self, epoch: int, name: str, index: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._base = epoch, derive_key(self._seed, epoch, "augment")
        mixed = self._base ^ (zlib.crc32(name.encode("utf-8", "surrogatepass")) << 32) ^ (index * 0x9E3779B97F4A7C15)
        mixed &= 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return mixed ^ (mixed >> 31)
