from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from edl_torch.data.columns import tensors_of


class Pair(NamedTuple):
    x: object
    y: object


def test_numbers_become_tensors_and_times_and_objects_stay_arrays():
    times, words = np.array([1], "M8[ms]"), np.array(["a"], dtype=object)
    found = tensors_of({"x": np.arange(3), "t": times, "s": words, "n": {"t": times}})
    assert torch.equal(found["x"], torch.arange(3))
    assert found["t"] is times
    assert found["s"] is words
    assert found["n"]["t"] is times


def test_tuples_keep_their_kind():
    times = np.array([1], "m8[s]")
    assert tensors_of((times, 5)) == (times, 5)
    pair = tensors_of(Pair(np.arange(2), 1))
    assert isinstance(pair, Pair)
    assert isinstance(pair.x, torch.Tensor)
