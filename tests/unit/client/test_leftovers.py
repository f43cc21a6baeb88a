"""What loops leave in gradients: one hook of a parameter has all of it."""

import weakref

import torch
from torch import nn

from edl_torch.client.leftovers import leave, leftovers
from edl_torch.trainer.batches import Batch


class Owner:
    """In the place of the `Gradients` of a session."""


def test_what_several_attempts_have_left_is_one_leftover_until_it_is_thrown_away() -> None:
    parameter, owner, batches = nn.Parameter(torch.zeros(3)), Owner(), [Batch(number) for number in range(3)]

    def attempt(batch: Batch) -> list[list[Batch]]:
        parameter.sum().backward()
        leave([parameter], weakref.ref(owner), [batch])
        return [[*left.gathered] for left in leftovers({id(parameter)}, is_reduced=False)]

    assert [attempt(batch) for batch in batches] == [[batches[:1]], [batches[:2]], [batches]]
    parameter.grad = None
    assert attempt(batches[2]) == [batches[2:]]
