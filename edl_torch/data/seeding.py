"""Random augmentation that depends on the record and the epoch alone, not on workers or their number.

Seeds the generators that transforms draw from and puts them back; it does not know what a transform does.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from edl_torch.core.permutation import derive_key
from edl_torch.shard import Indices

_WEYL, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


class Generators:
    """The global generators of Python, numpy and torch (CPU), lent to records and put back as they were.

    To put them back costs more than to seed them. So where it is known when somebody else draws next they
    are put back then, by that one; else after each record.
    """

    def __init__(self, *, after_each: bool) -> None:
        self._after_each = after_each
        self.lent: GeneratorStates | None = None  # how they were, while records have them

    def __reduce__(self) -> tuple[Any, ...]:
        return _generators, (self._after_each,)

    def seeded(self, transform: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
        """`transform` as a function of a record and its seed, a number in [0, 2⁶⁴)."""

        def call(record: Any, seed: int) -> Any:
            if self.lent is None:
                self.lent = GeneratorStates()
            _seed(seed)
            try:
                return transform(record)
            finally:
                if self._after_each:
                    self.put_back()

        return call

    def put_back(self) -> None:
        """Let the generators go on from where they were before the first record."""
        own, self.lent = self.lent, None
        if own is not None:
            own.restore()

    def drew_since(self, seed: int) -> bool:
        """Whether somebody has drawn since the generators were seeded by `seed`; they are so again."""
        now = GeneratorStates()
        _seed(seed)
        return now != GeneratorStates()


class GeneratorStates:
    """The states of the global generators of Python, numpy and torch (CPU) at a moment."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.get_rng_state()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratorStates):
            return NotImplemented
        (kind, key, *more), (others_kind, others_key, *others_more) = self._numpy, other._numpy
        return (
            torch.equal(self._torch, other._torch)
            and self._python == other._python
            and (kind, more) == (others_kind, others_more)
            and np.array_equal(key, others_key)
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Let the generators go on from here."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _generators(after_each: bool) -> Generators:
    return Generators(after_each=after_each)


def record_seeds(seed: int, epoch: int, records: Indices, folder: str = "") -> list[int]:
    """A seed in [0, 2⁶⁴) for each record: a function of `seed`, the epoch, the source and the number.

    Of a source's name that counts which comes after `folder`: the same data may lie elsewhere.
    """
    below = (name.removeprefix(folder) for name in records.names)
    names = [zlib.crc32(name.encode("utf-8", "surrogatepass")) << 32 for name in below]
    sources = np.array(names, np.uint64)[0 if records.sources is None else records.sources]
    base = np.uint64(derive_key(seed, epoch, "augment") & 0xFFFFFFFFFFFFFFFF)
    mixed = base ^ sources ^ (records.numbers.astype(np.uint64) * np.uint64(_WEYL))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    seeds: list[int] = (mixed ^ (mixed >> np.uint64(31))).tolist()
    return seeds
