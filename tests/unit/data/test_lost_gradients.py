"""A pass warns of batches that wait for a step of an optimizer which has no gradient of them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from edl_torch.data.lost_gradients import warn_of_lost_gradients


def service(*, unstepped: int = 4, lookahead: Any = 0, gradients: tuple[bool, ...] = (False, False)) -> Any:
    """What is asked of a service, with an optimizer for each of `gradients`."""
    optimizers = []
    for has_one in gradients:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1) if has_one else None
        optimizers.append(torch.optim.SGD([parameter], lr=0.1))
    elastic = SimpleNamespace(records_unstepped=unstepped)
    return SimpleNamespace(
        _live_session=SimpleNamespace(elastic=elastic),
        lookahead=lookahead,
        _torch_optimizers=optimizers,
        dataset_name="d",
    )


@pytest.mark.parametrize("lookahead", [0, 1, "told"])
def test_records_without_a_gradient_are_told_of(lookahead: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"4 record\(s\) of 'd' were handed out after the last optimizer\.step"
    ):
        assert warn_of_lost_gradients(service(lookahead=lookahead))


@pytest.mark.parametrize(
    "fine",
    [
        {"unstepped": 0},
        {"gradients": ()},
        {"gradients": (False, True)},
        {"gradients": (True, False)},
        {"lookahead": 2},
    ],
    ids=["all stepped", "no optimizer", "the second has one", "the first has one", "read ahead unseen"],
)
def test_others_are_not(fine: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_of_lost_gradients(service(**fine))
