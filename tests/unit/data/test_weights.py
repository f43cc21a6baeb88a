"""Weighed losses and scaled gradients are those of the mean over all records."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edl_torch.data.stand_in import StandIn, freeze_statistics
from edl_torch.data.weights import Weights


def test_a_mean_loss_becomes_a_sum() -> None:
    weights = Weights()
    weights.step(3, 3)
    assert weights.weigh(torch.tensor(2.0, dtype=torch.float64)) == 6.0


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1.0])
def test_a_loss_of_a_stand_in_is_nothing_whatever_it_was(loss: float) -> None:
    weights = Weights()
    weights.step(0, 5)
    value = torch.tensor(loss, requires_grad=True)
    weighed = weights.weigh(value)
    weighed.backward()
    assert weighed == 0
    assert value.grad == 0
    assert weighed.dtype == value.dtype


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_means_over_the_records_of_the_window(ranks: int) -> None:
    weights = Weights(ranks)
    parameter = nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([6.0, 12.0])
    weights.step(2, 8)
    weights.step(0, 4)
    weights.scale([parameter, unused])
    assert torch.equal(parameter.grad, torch.tensor([6.0, 12.0]) * ranks / 12)
    assert unused.grad is None
    weights.step(1, 2)
    weights.scale([parameter])
    assert torch.equal(parameter.grad, torch.tensor([6.0, 12.0]) * ranks / 12 * ranks / 2)


def test_a_new_beginning_forgets_the_window() -> None:
    weights = Weights()
    weights.step(1, 100)
    weights.restart()
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    weights.step(2, 2)
    weights.scale([parameter])
    assert parameter.grad == 0.5


def test_stand_ins_are_copies_of_the_first_batch() -> None:
    stand_in = StandIn()
    assert not stand_in.made
    batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    stand_in.keep(batch)
    stand_in.keep({"x": torch.ones(2)})
    batch["x"] += 5  # the loop works in place
    given = stand_in.batch()
    assert torch.equal(given["x"], torch.zeros(2))
    given["x"] += 1
    assert torch.equal(stand_in.batch()["x"], torch.zeros(2))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_frozen_for_stand_ins_only(momentum: float | None) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=momentum))
    standing_in = True
    freeze_statistics(model, lambda: standing_in)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(8, 2)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    standing_in = False
    model(torch.randn(8, 2))
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    assert model.state_dict()["1.num_batches_tracked"] == 1
