"""Batches that were read ahead weigh what they do when they are passed on, oldest first."""

from __future__ import annotations

import pytest
import torch

from edl_torch.data.padding import Statistics
from edl_torch.data.read_ahead import ReadAhead
from edl_torch.data.weights import Weights


def test_the_batch_that_was_passed_on_is_the_one_that_weighs() -> None:
    weights = Weights()
    ahead = ReadAhead(weights, Statistics())
    for own in (3, 0, 5):
        ahead.step(own)
    assert repr(ahead) == "<ReadAhead [3, 0, 5]>"
    assert len(ahead) == 3
    assert weights.own == 0, "none was passed on yet"
    assert [(ahead.passed_on(), weights.own) for _ in range(4)] == [
        (True, 3),
        (False, 0),
        (True, 5),
        (True, 5),
    ], "the last call only says that none is left"


def test_running_statistics_are_kept_while_a_padding_batch_is_trained_on() -> None:
    norm, statistics = torch.nn.BatchNorm1d(1), Statistics()
    statistics.watch(norm)
    ahead = ReadAhead(Weights(), statistics)
    for own in (0, 2):
        ahead.step(own)
    ahead.passed_on()
    norm(torch.tensor([[1.0], [3.0]]))
    ahead.passed_on()
    assert norm.running_mean is not None
    assert norm.running_mean.item() == 0
    norm(torch.tensor([[1.0], [3.0]]))
    ahead.clear()
    assert norm.running_mean.item() > 0


def test_another_pass_begins_with_nothing_read_ahead() -> None:
    ahead = ReadAhead(Weights(), Statistics())
    ahead.step(3)
    ahead.clear()
    assert len(ahead) == 0


def test_a_loop_that_trains_on_padding_batches_read_ahead_is_warned() -> None:
    weights = Weights()
    ahead = ReadAhead(weights, Statistics())
    ahead.step(0)
    ahead.warn_of_padding()
    ahead.passed_on()
    weights.step(0)
    with pytest.warns(UserWarning, match="got a padding batch"):
        ahead.warn_of_padding()
