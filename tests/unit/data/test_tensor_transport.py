"""A batch arrives as it was sent, whichever way its tensors take."""

from __future__ import annotations

import multiprocessing
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from edl_torch.data.batches import transport
from edl_torch.data.batches.transport import IN_MESSAGE_BYTES, is_small, packed, unpacked

LARGE = IN_MESSAGE_BYTES // 8 + 1  # float64s


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def echo(tensors: Any, answers: Any) -> None:
    answers.put(packed(unpacked(tensors.get(timeout=30))))
    tensors.get(timeout=30)  # stay until the answer was read: the sender keeps what is shared


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(6).view(2, 3), torch.tensor(5), torch.tensor([True, False]), torch.zeros(0, 3)),
        *(torch.rand(4).bfloat16(), torch.rand(4).half(), torch.rand(3, 2) * 1j),
        *(torch.arange(3).to(torch.uint16), torch.arange(12).view(3, 4).t(), torch.arange(100)[3:7]),
        torch.rand(LARGE).double(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_any_tensor_keeps_type_shape_and_values(tensor):
    found = unpacked(packed(tensor))
    assert found.dtype is tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)
    assert not found.fill_(0).any(), "and can be written"


def test_any_structure_keeps_its_types():
    ids = torch.arange(4)
    batch = Pair(
        ids, OrderedDict(again=ids, names=["a", "b"], dates=np.array(["2024-02-29"], "M8[D]"), none=None)
    )
    found = unpacked(packed(batch))
    assert type(found) is Pair
    assert type(found.right) is OrderedDict
    assert found.right["again"] is found.left, "one tensor in two places is one"
    assert found.right["names"] == ["a", "b"]
    assert found.right["dates"][0] == np.datetime64("2024-02-29")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_unusual_tensors_are_left_to_torch():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert type(unpacked(packed(parameter))) is torch.nn.Parameter
    assert unpacked(packed(torch.ones(3, requires_grad=True))).requires_grad
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = unpacked(packed(torch.eye(3).to_sparse()))
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    nested = unpacked(packed(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])))
    assert [part.tolist() for part in nested.unbind()] == [[1, 1], [1, 1, 1]]


def test_what_the_user_shares_stays_shared():
    """A tensor in shared memory, and a part of a larger one, are the sender's own memory at the receiver."""
    shared = torch.zeros(3).share_memory_()
    whole = torch.zeros(8)
    parts = unpacked(packed([shared, whole[2:5]]))
    for part in parts:
        part += 7
    assert shared.tolist() == [7, 7, 7]
    assert whole.tolist() == [0, 0, 7, 7, 7, 0, 0, 0]


def test_small_tensors_are_in_the_message_and_large_ones_in_shared_memory():
    small, large = torch.zeros(IN_MESSAGE_BYTES // 8).double(), torch.zeros(LARGE).double()
    message = packed([small, large])
    assert IN_MESSAGE_BYTES < len(message) < IN_MESSAGE_BYTES + 2000
    one, other = unpacked(message)
    assert not one.is_shared()
    assert other.is_shared()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_batch_crosses_processes(method):
    context = multiprocessing.get_context(method)
    tensors, answers = context.Queue(), context.Queue()
    process = context.Process(target=echo, args=(tensors, answers), daemon=True)
    process.start()
    batch = {"small": torch.arange(10), "large": torch.rand(LARGE)}
    tensors.put(packed(batch))
    found = unpacked(answers.get(timeout=60))
    tensors.put(None)
    process.join(timeout=30)
    assert torch.equal(found["small"], batch["small"])
    assert torch.equal(found["large"], batch["large"])


@pytest.mark.parametrize(("nbytes", "small"), [(0, True), (512 * 1024, True), (512 * 1024 + 1, False)])
def test_half_a_megabyte_travels_in_the_message(nbytes: int, small: bool) -> None:
    assert is_small(nbytes) is small


@pytest.mark.parametrize(("elements", "small"), [(0, False), (1, True)])
def test_a_tensor_of_a_byte_is_small_and_one_of_none_is_left_to_torch(elements: int, small: bool) -> None:
    assert transport._is_small_by_itself(torch.ones(elements, dtype=torch.uint8)) is small
