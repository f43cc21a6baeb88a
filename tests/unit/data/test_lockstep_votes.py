"""What ranks tell each other: votes on each step, and batches for ranks that hold one model in parts."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import session_at_once

from edl_torch.client.peers import Ballot, BroadcastBatch, Count, Doing
from edl_torch.data.loop import lockstep_pass as module
from edl_torch.data.loop.lockstep_pass import PATIENCE_S, LockstepPass, PartsPass
from edl_torch.data.ranks import parts_group as parts_message
from edl_torch.data.ranks.parts_group import IN_STRUCTURE_BYTES, Packed, Unpacking
from edl_torch.errors import BadRecord, InvalidArgument


def a_pass(**parts: Any) -> Any:
    """A pass that has these parts alone."""
    made = LockstepPass.__new__(LockstepPass)
    for name, part in parts.items():
        setattr(made, f"_{name}", part)
    return made


def cast(
    *, holds: bool, rank: int, batch: object, made: bool, finished: bool, over: bool, told: bool, fails: bool
) -> Ballot:
    ballots: list[Ballot] = []

    def check() -> None:
        if fails:
            raise BadRecord("no byte of 7")

    voting = a_pass(
        lockstep=SimpleNamespace(holds_leases=holds, finished=finished),
        peers=SimpleNamespace(rank=rank, vote=ballots.append),
        session=session_at_once(trainer=SimpleNamespace(state=SimpleNamespace(check=check))),
        padding=SimpleNamespace(made=made),
        passes=SimpleNamespace(is_over=over),
        notice=SimpleNamespace(came=told),
        next_batch=lambda wait_s: batch,
    )
    voting._cast()
    (ballot,) = ballots
    return ballot


CASES = list(product([True, False], [0, 1], ["a batch", None], *[[True, False]] * 5))


def test_a_rank_votes_for_what_it_has_and_knows() -> None:
    for holds, rank, batch, made, finished, over, told, fails in CASES:
        ballot = cast(
            holds=holds,
            rank=rank,
            batch=batch,
            made=made,
            finished=finished,
            over=over,
            told=told,
            fails=fails,
        )
        has_one = holds and batch is not None
        has_none_to_pad_with = holds and batch is None and not made
        says_that_it_is_over = rank == 0 and (finished or over)
        assert ballot == Ballot(
            doing=Doing.STEP,
            batches=has_one,
            bare=has_none_to_pad_with,
            failed=fails,
            verdict=says_that_it_is_over,
            preempted=told,
        )


@pytest.mark.parametrize(("rank", "wait_s"), [(0, PATIENCE_S), (1, 0.0)])
def test_the_first_rank_waits_for_the_master_where_no_rank_has_a_batch(rank: int, wait_s: float) -> None:
    nothing = dict.fromkeys(("bare", "failed", "preempted"), 0) | {"doing": (Doing.STEP,)}
    counts = iter([Count(batches=n, verdict=0, **nothing) for n in (0, 0, 1)])  # type: ignore[arg-type]
    waits: list[float] = []
    stepping = a_pass(
        peers=SimpleNamespace(rank=rank), counted=lambda: next(counts), error=None, cast=waits.append
    )
    assert stepping._agree().batches == 1
    assert waits == [wait_s] * 2


@pytest.mark.parametrize("stepped", [True, False])
def test_a_pass_without_a_step_settles_what_earlier_ones_left(
    stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(module, "together", lambda peers, doing, settle, ask: settle())
    ending = a_pass(
        stepped=stepped,
        peers=None,
        passes=SimpleNamespace(settle_stuck=lambda: done.append("settles")),
        session=session_at_once(),
        position=SimpleNamespace(agree_on_end=lambda lockstep: done.append("ends")),
        lockstep=None,
    )
    ending._end()
    assert done == (["ends"] if stepped else ["settles", "ends"])


def test_a_holder_that_cannot_read_sends_an_empty_broadcast() -> None:
    """Its followers wait for one, and hear in the vote what is wrong."""
    sent: list[BroadcastBatch] = []

    def fails(more: Any, take: Any) -> None:
        raise BadRecord("no byte of 7")

    holder: Any = PartsPass.__new__(PartsPass)
    holder._lockstep = SimpleNamespace(finished=False)
    holder._peers = SimpleNamespace(parts=SimpleNamespace(send=sent.append))
    holder._passes = SimpleNamespace(discarded=2)
    holder._pull = fails
    with pytest.raises(BadRecord, match="no byte of 7"):
        holder._read_for_all(0.0)
    assert sent == [BroadcastBatch(discarded=2)]


def test_a_report_may_be_unanswered_while_a_step_is_computed() -> None:
    promised: list[tuple[object, int]] = []
    voting = a_pass(
        passes=SimpleNamespace(promise=lambda ticket, unanswered: promised.append((ticket, unanswered))),
        session=session_at_once(),
    )
    voting._promise("ticket")
    assert promised == [("ticket", 1)]


@pytest.mark.parametrize("has_one", [True, False])
@pytest.mark.parametrize("bare", [0, 1])
def test_a_step_is_taken_with_a_batch_or_with_one_of_another_rank(bare: int, has_one: bool) -> None:
    kept: list[object] = []
    stepping = a_pass(
        pulled=SimpleNamespace(batch="own", size=3, ticket=()) if has_one else None,
        padding=SimpleNamespace(keep=kept.append),
        peers=SimpleNamespace(lend=lambda batch: batch or "lent"),
        pad=lambda: "padding",
        session=session_at_once(deliver=lambda ticket: True),
        stepped=False,
    )
    assert stepping._take(SimpleNamespace(bare=bare)) == (("own", 3) if has_one else ("padding", 0))
    assert stepping._stepped
    assert kept == ["own"] * has_one + ["own" if has_one else "lent"] * bare


# Batches that are taken apart, and put together by another rank ---------------------------------------------


Pair = namedtuple("Pair", "x y")


@dataclass
class Declared:
    """A batch class that every rank has declared to be safe."""

    x: torch.Tensor


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def travelled(value: Any) -> Any:
    packed = Packed(value)
    unpacking = Unpacking(packed.structure, pin_memory=False)
    assert [content.shape for content in unpacking.contents] == [content.shape for content in packed.contents]
    for mine, theirs in zip(unpacking.contents, packed.contents, strict=True):
        mine.copy_(theirs)
    return unpacking.value()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.randn(64, 33),
        torch.randn(64, 33).t(),
        torch.zeros(0, 3),
        torch.tensor(7.0),
        torch.rand(3000) > 0.5,
        torch.randn(4000).to(torch.bfloat16),
        torch.randn(300, dtype=torch.complex64).conj(),
        torch.randn(2, 3, 30, 30).to(memory_format=torch.channels_last),
        torch.randn(900, requires_grad=True),
    ],
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    found = travelled(tensor)
    assert found.dtype is tensor.dtype
    assert torch.equal(found, tensor)
    assert not found.requires_grad


def test_large_tensors_travel_apart() -> None:
    small = torch.arange(IN_STRUCTURE_BYTES // 4)[: IN_STRUCTURE_BYTES // 8]
    large = torch.ones(IN_STRUCTURE_BYTES + 1, dtype=torch.uint8)
    packed = Packed([small, large])
    assert small.nbytes == IN_STRUCTURE_BYTES
    assert [content.nbytes for content in packed.contents] == [large.nbytes]
    assert packed.contents[0].data_ptr() == large.data_ptr()
    found = travelled([small, large])
    assert torch.equal(found[0], small)
    assert torch.equal(found[1], large)


def test_everything_else_arrives_too() -> None:
    value = {
        "ids": [1, 2.5, "three", b"4", None, True],
        "array": np.arange(12.0).reshape(3, 4),
        "scalar": np.int64(3),
        "ordered": OrderedDict(a=1),
        "shape": torch.Size([2, 3]),
        "dtype": torch.float16,
        ("a", "b"): {1, 2},
    }
    found = travelled(value)
    assert np.array_equal(found.pop("array"), value.pop("array"))
    assert found == value


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [1, 2.5, "s", b"b", b"", None, True, (1,), {2}]},
        np.arange(4),
        np.zeros(0),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["x", None], dtype=object),
        [np.float32(3), np.bool_(True), range(3)],
    ],
    ids=repr,
)
def test_plain_values_and_arrays_arrive(batch: Any) -> None:
    assert repr(travelled(batch)) == repr(batch)


class NewerPickler(pickle.Pickler):
    """Python 3.14's: its default protocol is 5."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None) -> None:
        super().__init__(file, 5 if protocol is None else protocol)


def test_arrays_are_sent_by_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "Pickler", NewerPickler)
    spec = importlib.util.find_spec(parts_message.__name__)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.Unpacking(module.Packed({"x": np.arange(3)}).structure, pin_memory=False).value()
    assert found["x"].tolist() == [0, 1, 2]


def test_a_tensor_that_is_there_twice_is_sent_once() -> None:
    large = torch.ones(IN_STRUCTURE_BYTES)
    first, second = travelled([large, large])
    assert first is second


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Pair(1, 2), "test_lockstep_votes.Pair"),
        (print, "builtins.print"),
        (torch.ones(3).to_sparse(), "no dense tensor"),
        (torch.nn.Parameter(torch.ones(3)), "a Parameter that is no dense tensor"),
        (lambda: 3, "lambda"),
        ([Harmful()], "mkdir"),
    ],
)
def test_what_is_not_sent_is_refused_where_it_is_made(
    value: Any, words: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"cannot be sent: they hold .*{words}.*add_safe_globals"):
        Packed({"x": value})
    assert os.listdir() == []


def test_classes_that_are_declared_to_be_safe_are_sent() -> None:
    with torch.serialization.safe_globals([Pair, Declared]):
        assert travelled(Pair(1, torch.ones(2))).x == 1
        assert travelled(Declared(torch.arange(3))).x.tolist() == [0, 1, 2]
