"""Batches of loader workers: how they cross processes, and how long they stay what they are."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edl_torch import ElasticDataLoader
from edl_torch.data.batches import transport as batch_memory
from edl_torch.data.batches.transport import (
    IN_MESSAGE_BYTES,
    BatchMemory,
    Segment,
    SharedSegment,
    packed,
    shared_segment,
    unpacked,
)

SHAPE = (4, 260, 260)


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the training loop gets it."""
    segment = shared_segment(tensor)
    assert segment is not None
    message = segment.sent(tensor)
    assert message is not None
    function, arguments = message
    return function(*arguments)


@pytest.fixture(params=["own", "shared"])
def memory(request: pytest.FixtureRequest) -> BatchMemory:
    return BatchMemory(SharedSegment) if request.param == "shared" else BatchMemory()


HOLDERS: dict[str, Any] = {
    "a view": lambda batch: batch[2:, 1],
    "an array": lambda batch: batch.numpy(),
    "an array of a view": lambda batch: batch[0].numpy()[3:],
    "a storage": lambda batch: batch.untyped_storage(),
    "another type": lambda batch: batch.view(torch.int32),
    "autograd": lambda batch: (torch.ones(260, requires_grad=True) * batch).sum(),
    "DLPack": lambda batch: torch.utils.dlpack.to_dlpack(batch),
    "a buffer": lambda batch: memoryview(batch.numpy()),
}


@pytest.mark.parametrize("is_sent", [False, True], ids=["here", "in another process"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_not_used_again_while_somebody_holds_it(holder: str, is_sent: bool) -> None:
    memory = BatchMemory(SharedSegment) if is_sent else BatchMemory()
    batch = memory.tensor(SHAPE, torch.float32).fill_(7)
    place, there = batch.data_ptr(), sent(batch) if is_sent else batch
    assert torch.equal(there, batch)
    held = HOLDERS[holder](there)
    del batch, there
    other = memory.tensor(SHAPE, torch.float32)
    assert other.data_ptr() != place
    del held
    gc.collect()
    assert memory.tensor(SHAPE, torch.float32).data_ptr() == place


@pytest.mark.parametrize("holder", ["an array", "an array of a view", "DLPack", "a buffer"])
def test_what_was_made_of_a_batch_stays_when_torch_moves_it_to_share_it(
    holder: str, memory: BatchMemory
) -> None:
    """`Queue.put(batch)` of torch.multiprocessing moves it, in a thread, to memory of its own."""
    here = memory.tensor(SHAPE, torch.float32).fill_(4)
    batch = sent(here) if shared_segment(here) is not None else here
    place, held = here.data_ptr(), HOLDERS[holder](batch)
    del here
    batch.share_memory_()
    assert batch.data_ptr() != place
    other = memory.tensor(SHAPE, torch.float32).fill_(9)
    assert other.data_ptr() != place
    found = torch.utils.dlpack.from_dlpack(held) if holder == "DLPack" else torch.from_numpy(np.asarray(held))
    assert (found == 4).all()
    del held, found, batch
    gc.collect()
    sent(BatchMemory(SharedSegment).tensor(SHAPE, torch.float32))  # the next batch
    assert memory.tensor(SHAPE, torch.float32).data_ptr() == place


def test_batches_are_on_the_cpu_wherever_tensors_are_made(memory: BatchMemory) -> None:
    with torch.device("meta"):
        batch = memory.tensor(SHAPE, torch.float32).fill_(3)
        there = batch if shared_segment(batch) is None else sent(batch)
    assert (there == 3).all()


def test_what_is_sent_too_often_is_left_to_torch() -> None:
    memory = BatchMemory(SharedSegment)
    batch = memory.tensor(SHAPE, torch.float32).fill_(3)
    segment = shared_segment(batch)
    assert segment is not None
    there = [sent(batch) for _ in range(64)]
    assert segment.sent(batch) is None
    assert torch.equal(unpacked(packed(batch)), batch)
    there.pop(17)
    assert segment.sent(batch) is not None


def test_a_batch_that_is_on_its_way_is_not_used_again() -> None:
    memory = BatchMemory(SharedSegment)
    batch = memory.tensor(SHAPE, torch.float32).fill_(5)
    place, message = batch.data_ptr(), packed(batch)
    del batch
    other = memory.tensor(SHAPE, torch.float32).fill_(6)
    assert other.data_ptr() != place
    assert (unpacked(message) == 5).all()
    assert memory.tensor(SHAPE, torch.float32).data_ptr() == place


def test_parts_that_do_not_begin_with_the_segment_are_left_to_torch() -> None:
    batch = BatchMemory(SharedSegment).tensor(SHAPE, torch.float32)
    assert shared_segment(batch[1:]) is None
    assert shared_segment(torch.empty(SHAPE)) is None
    assert shared_segment(torch.empty(0)) is None
    assert torch.equal(unpacked(packed(batch[1:])), batch[1:])
    assert torch.equal(unpacked(packed(batch[:, 1:])), batch[:, 1:])


def test_what_a_fork_has_too_is_never_given_back() -> None:
    memory = BatchMemory(SharedSegment)
    batch = memory.tensor(SHAPE, torch.float32).fill_(4)
    place, there = batch.data_ptr(), sent(batch)
    reading, writing = os.pipe()
    go_on, going_on = os.pipe()
    child = os.fork()
    if not child:
        os.read(go_on, 1)
        os.write(writing, b"same" if bool((there.numpy() == 4).all()) else b"changed")  # torch has no threads
        os._exit(0)
    del batch, there
    other = memory.tensor(SHAPE, torch.float32).fill_(9)
    os.write(going_on, b".")
    assert os.read(reading, 10) == b"same"
    os.waitpid(child, 0)
    assert other.data_ptr() != place
    for end in (reading, writing, go_on, going_on):
        os.close(end)


def test_what_another_thread_gets_during_a_fork_is_never_given_back() -> None:
    memory = BatchMemory(SharedSegment)
    batch = memory.tensor(SHAPE, torch.float32)
    place, forks, held = batch.data_ptr(), batch_memory._forks, []
    locked = threading.Event()

    def get(batch: torch.Tensor) -> None:
        with logging._lock:  # type: ignore[attr-defined]  # which a fork waits for
            locked.set()
            while batch_memory._forks == forks:
                time.sleep(0.001)
            held.append(sent(batch))

    thread = threading.Thread(target=get, args=(batch,))
    thread.start()
    locked.wait()
    child = os.fork()
    if not child:
        held.clear()  # nor does the child say that nobody needs it
        os._exit(int(not batch_memory.shared_segment(batch).is_free) + 1)  # type: ignore[union-attr]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    thread.join()
    del batch
    held.clear()
    assert memory.tensor(SHAPE, torch.float32).data_ptr() != place


def test_a_batch_after_a_fork_is_given_back() -> None:
    batch_memory._forked()
    memory = BatchMemory(SharedSegment)
    batch = memory.tensor(SHAPE, torch.float32)
    place, there = batch.data_ptr(), sent(batch)
    del batch, there
    assert memory.tensor(SHAPE, torch.float32).data_ptr() == place


def test_eight_unused_segments_are_kept_at_most(memory: BatchMemory) -> None:
    batches = [memory.tensor(SHAPE, torch.float32) for _ in range(10)]
    batches.clear()
    assert len(memory._kept) == 8


def test_another_size_takes_the_place_of_one_that_is_not_needed(memory: BatchMemory) -> None:
    for width in range(260, 280):
        memory.tensor((4, 260, width), torch.float32)
    assert len(memory._kept) == 1


def test_two_sizes_that_take_turns_are_both_kept(memory: BatchMemory) -> None:
    places = set()
    for _ in range(5):
        pair = memory.tensor(SHAPE, torch.float32), memory.tensor(SHAPE, torch.float64)
        places.add(tuple(tensor.data_ptr() for tensor in pair))
        del pair
    assert len(places) == 1


@pytest.mark.parametrize("kind", [Segment, SharedSegment])
def test_memory_goes_with_who_made_it(kind: type[Segment]) -> None:
    memory = BatchMemory(kind)
    batch = memory.tensor(SHAPE, torch.float32).fill_(3)
    kept = weakref.ref(memory._kept)
    del memory
    gc.collect()
    assert (batch == 3).all()
    assert kept() is not None
    del batch
    assert kept() is None


STEPS = st.lists(st.tuples(st.sampled_from(["make", "send", "drop here", "drop there"]), st.integers(0, 9)))


@given(STEPS)
def test_whoever_holds_a_batch_finds_in_it_what_was_written(steps: list[tuple[str, int]]) -> None:
    memory = BatchMemory(SharedSegment)
    here: list[tuple[torch.Tensor, int]] = []
    there: list[tuple[torch.Tensor, int]] = []
    for number, (step, which) in enumerate(steps):
        if step == "make":
            here.append((memory.tensor((3 + which % 2, 2), torch.int64).fill_(number), number))
        elif step == "send" and here:
            tensor, written = here[which % len(here)]
            there.append((sent(tensor), written))
        elif step.startswith("drop"):
            held = here if step == "drop here" else there
            if held:
                held.pop(which % len(held))
        assert all(bool((tensor == written).all()) for tensor, written in here + there)


class Numbered:
    """Images that are their numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((260, 300), float(index))


@pytest.mark.parametrize(
    ("method", "num_threads"),
    [
        ("fork", 2),
        ("forkserver", 0),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("fork", 0), ("spawn", 0), ("spawn", 2))),
    ],
)
def test_batches_of_a_worker_stay_what_they_are_as_long_as_the_loop_holds_them(
    method: str, num_threads: int
) -> None:
    with ElasticDataLoader(
        Numbered(),
        4,
        num_epochs=2,
        num_workers=1,
        num_threads=num_threads,
        multiprocessing_context=method,
        persistent_workers=True,
    ) as loader:
        inodes: set[tuple[int, int]] = set()
        for _epoch in loader.epochs():
            held: list[tuple[torch.Tensor, list[float]]] = []
            for number, batch in enumerate(loader):
                held.append((batch, [float(record) for record in loader.records.numbers]))
                if number % 3 == 2:
                    del held[: number % 5]
                for tensor, numbers in held:
                    assert tensor[:, 0, 0].tolist() == numbers
                    assert bool((tensor == tensor[:, :1, :1]).all())
                inodes |= mappings()
            del batch, tensor
    assert len(inodes) < 32, "32 batches, each in memory of its own"


def mappings() -> set[tuple[int, int]]:
    """The shared files that this process has mapped, by device and number."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        found = [line.split() for line in lines if "/torch_" in line or "/dev/shm" in line]
    return {(int(fields[3].replace(":", ""), 16), int(fields[4])) for fields in found}


def test_memory_that_is_lent_as_the_program_ends_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Finalizer:
        atexit = True

        def __init__(self, *arguments: Any) -> None:
            made.append(self)

    monkeypatch.setattr(weakref, "finalize", Finalizer)
    BatchMemory().tensor((4,), torch.float32)
    assert [finalizer.atexit for finalizer in made] == [False]


# A batch arrives as it was sent, whichever way its tensors take ---------------------------------------------


LARGE = IN_MESSAGE_BYTES // 8 + 1  # float64s


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


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
