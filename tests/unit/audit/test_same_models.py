"""When two samples are of one model: to the bit, but for how unlike processors round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edl_torch.audit.models import are_replicas, is_copy
from edl_torch.audit.reading import Seen

RNG = np.random.default_rng(5)
BEFORE = RNG.normal(size=32)
AFTER = BEFORE + RNG.normal(size=32)
FP32, BF16 = 2.0**-23, 2.0**-7


def seen(values: np.ndarray, *, eps: float = FP32, processor: str = "cpu AVX512", shape: str = "s") -> Seen:
    return Seen(
        at="token",
        steps=4,
        number=0,
        shape=shape,
        sharded=False,
        eps=eps,
        processor=processor,
        values=values.astype("<f4").tobytes(),
        sums=np.array([values.sum()], dtype="<f8").tobytes(),
        word="",
        line=1,
    )


def one_ulp(values: np.ndarray) -> np.ndarray:
    return values * (1 + FP32 * RNG.integers(-1, 2, size=values.shape))


def test_a_copy_is_equal_to_the_bit():
    assert is_copy(seen(AFTER), seen(AFTER)) is True
    assert is_copy(seen(AFTER), seen(one_ulp(AFTER) * (1 + 2 * FP32))) is False


def test_one_sum_tells_what_no_sampled_place_shows():
    other = replace(
        seen(AFTER), sums=(seen(AFTER).totals + 1.0).tobytes()
    )  # one more entry of a large table has learnt
    assert is_copy(seen(AFTER), other) is False


def test_a_copy_in_a_coarser_type_is_equal_as_far_as_that_tells():
    coarse = (AFTER.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert is_copy(seen(AFTER), seen(coarse, eps=BF16)) is True
    assert is_copy(seen(AFTER), seen(coarse * 1.1, eps=BF16)) is False


@pytest.mark.parametrize("eps", [FP32, BF16])
def test_replicas_on_one_kind_of_processor_are_equal_to_the_bit(eps):
    near = seen(AFTER * (1 + eps), eps=eps)  # two models of much the same data are as near
    assert are_replicas(seen(AFTER, eps=eps), near, seen(BEFORE, eps=eps)) is False


def test_replicas_on_unlike_processors_may_round_otherwise():
    other = seen(one_ulp(AFTER), processor="cpu NEON")
    assert are_replicas(seen(AFTER), other, seen(BEFORE)) is True


@pytest.mark.parametrize("place", [0, 31])
def test_a_small_value_counts_as_a_large_one_does(place):
    before, after = BEFORE * 1000, AFTER * 1000
    before[place], after[place] = 1e-4, 2e-4
    other = after.copy()
    other[place] = 3e-4  # far from the replica's, and nothing beside the others
    assert are_replicas(seen(after), seen(other, processor="cpu NEON"), seen(before)) is False


def test_what_cannot_be_looked_at_is_never_the_same():
    nothing = replace(seen(np.empty(0)), shape="")
    assert is_copy(nothing, nothing) is False
    assert is_copy(seen(AFTER), seen(AFTER, shape="t")) is False


def test_numbers_that_no_trainer_wrote_are_no_sample():
    with pytest.raises(ValueError, match="no float32 and float64"):
        replace(seen(AFTER), sums=b"1234567")
