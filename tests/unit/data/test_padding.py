"""A padding batch is a copy, and leaves running statistics as they were."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from edl_torch.data.loop.loader_methods import GradientMethods
from edl_torch.data.padding import PaddingBatch, Statistics
from edl_torch.data.weights import Weights
from edl_torch.errors import InvalidArgument


def test_stand_ins_are_copies_of_the_first_batch() -> None:
    padding = PaddingBatch()
    assert not padding.made
    batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    padding.keep(batch)
    padding.keep({"x": torch.ones(2)})
    batch["x"] += 5  # the loop works in place
    given = padding.batch()
    assert torch.equal(given["x"], torch.zeros(2))
    given["x"] += 1
    assert torch.equal(padding.batch()["x"], torch.zeros(2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_batches_that_count(momentum: float | None, compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=momentum))
    called = torch.compile(model, backend="aot_eager") if compiled else model
    called(torch.randn(8, 2)).sum().backward()  # compiled before it is watched
    statistics = Statistics()
    statistics.watch(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    statistics.keep()
    loss = called(torch.full((8, 2), torch.nan)).sum()
    statistics.put_back()
    loss.backward()
    called(torch.randn(8, 2))
    statistics.let_go()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    called(torch.randn(8, 2))
    statistics.let_go()
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    assert model.state_dict()["1.num_batches_tracked"] == 2


def test_a_norm_that_mixes_ranks_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(InvalidArgument, match="SyncBatchNorm"):
        Statistics().watch(model)


class Methods(GradientMethods):
    """Without a loader behind them."""

    def __init__(self) -> None:
        self._statistics = Statistics()
        self._weights = Weights()
        self.attached: list[Any] = []
        gradients = SimpleNamespace(optimizers=lambda: self.attached)
        self.service = SimpleNamespace(session=SimpleNamespace(gradients=gradients))


@pytest.mark.parametrize(
    "then", [lambda loader: loader.weigh(torch.zeros(1)), lambda loader: loader.scale_gradients()]
)
def test_running_statistics_are_put_back_where_a_padding_batch_was_passed_forward(
    then: Callable[[Methods], object],
) -> None:
    """Also by `scale_gradients`: checkpointed activations are computed again on the way back."""
    loader, norm = Methods(), nn.BatchNorm1d(1)
    loader.freeze_statistics(norm)
    loader._statistics.keep()
    norm(torch.tensor([[1.0], [3.0]]))
    assert norm.running_mean is not None
    assert norm.running_mean.item() > 0
    then(loader)
    assert norm.running_mean.item() == 0


def test_an_engine_that_scales_gradients_itself_is_refused_before_any_is_touched() -> None:
    loader = Methods()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    engine = SimpleNamespace(step=None, global_steps=0, gradient_accumulation_steps=None)
    with pytest.raises(InvalidArgument, match="DeepSpeed engine"):
        loader.scale_gradients(engine)  # type: ignore[arg-type]
    loader.attached = [engine]
    with pytest.raises(InvalidArgument, match="DeepSpeed engine"):
        loader.scale_gradients(optimizer)
