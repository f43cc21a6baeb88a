"""What ranks send each other over gloo: votes, texts, lent batches, broadcasts. Each is a thread here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from edl_torch.client.peers import Ballot, BroadcastBatch, Count, Doing
from edl_torch.data.ranks import gloo, process_group
from edl_torch.data.ranks.gloo import ReliablePair
from edl_torch.data.ranks.parts_group import FRAME_BYTES, IN_STRUCTURE_BYTES, Packed, ProcessGroupParts
from edl_torch.data.ranks.process_group import ProcessGroupPeers, check_no_ranks, peers_over
from edl_torch.errors import InvalidArgument, PeerFailed
from edl_torch.shard import Slice

TIMEOUT_S = 10.0


class Job:
    """A job of `size` ranks, as `torch.distributed` would say of it in each."""

    def __init__(self) -> None:
        self.size = 1
        self.store = dist.HashStore()
        self._own = threading.local()

    @property
    def rank(self) -> int:
        return getattr(self._own, "rank", 0)

    def run(self, size: int, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns on each rank, or the error that it raises there."""
        self.size = size
        found: list[Any] = [None] * size

        def be(rank: int) -> None:
            self._own.rank = rank
            try:
                found[rank] = work(rank)
            except Exception as exc:  # noqa: BLE001  the top of a thread
                found[rank] = exc

        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a rank hangs"
        return found


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    monkeypatch.setattr(gloo, "_get_default_store", lambda: made.store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: made.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: made.size)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(made.size)))
    return made


# All ranks ----------------------------------------------------------------------------------------------


def test_votes_add_up_and_name_what_each_rank_is_at(job: Job) -> None:
    def work(rank: int) -> tuple[str, list[Count]]:
        peers = ProcessGroupPeers(timeout_s=TIMEOUT_S)
        first = peers.vote(Ballot(doing=Doing.STEP, batches=1, weight=0.5 + rank))
        second = peers.vote(Ballot(doing=Doing.END if rank == 2 else Doing.STEP, failed=rank))
        return repr(peers), [first.wait(), second.wait()]

    counts = [
        Count(doing=(Doing.STEP,) * 3, batches=3, weight=4.5),
        Count(doing=(Doing.STEP, Doing.STEP, Doing.END), failed=3),
    ]
    assert job.run(3, work) == [(f"<ProcessGroupPeers rank={rank}/3>", counts) for rank in range(3)]


def test_the_first_ranks_text_is_that_of_all(job: Job) -> None:
    def work(rank: int) -> list[str]:
        peers = ProcessGroupPeers(timeout_s=TIMEOUT_S)
        return [peers.share(text if rank == 0 else f"of {rank}") for text in ("größe", "", "x" * 3000)]

    assert job.run(3, work) == [["größe", "", "x" * 3000]] * 3


def test_a_batch_is_lent_by_the_lowest_rank_that_has_one(job: Job) -> None:
    def work(rank: int) -> list[Any]:
        peers = ProcessGroupPeers(timeout_s=TIMEOUT_S)
        lent = [
            peers.lend({"of": rank, "x": torch.full((2,), rank)} if rank >= least else None)
            for least in (1, 0)
        ]
        return [(batch["of"], batch["x"].tolist()) for batch in lent]

    assert job.run(3, work) == [[(1, [1, 1]), (0, [0, 0])]] * 3


def test_ranks_exchange_tensors_on_the_cpu_wherever_tensors_are_made(job: Job) -> None:
    def work(rank: int) -> list[Any]:
        with torch.device("meta"):
            peers = ProcessGroupPeers(timeout_s=TIMEOUT_S)
            votes = peers.vote(Ballot(doing=Doing.STEP, batches=1)).wait().batches
            lent = peers.lend({"of": rank})
            parts = ProcessGroupParts([0, 1], rank, TIMEOUT_S, pin_memory=False)
            broadcast = BroadcastBatch(batch=torch.ones(FRAME_BYTES, device="cpu"), size=1)
            batch = (parts.send(broadcast) if parts.holds else parts.receive()).batch()
            return [votes, peers.share("text"), lent, float(batch.sum())]

    assert job.run(2, work) == [[2, "text", {"of": 0}, FRAME_BYTES]] * 2


def test_a_batch_that_cannot_be_lent_is_an_error_on_all_ranks(job: Job) -> None:
    class Own:
        pass

    def work(rank: int) -> None:
        ProcessGroupPeers(timeout_s=TIMEOUT_S).lend(Own() if rank else None)

    errors = job.run(2, work)
    assert [type(error) for error in errors] == [InvalidArgument] * 2
    assert str(errors[0]) == str(errors[1])


def test_ranks_meet_again_where_others_have_met_before(job: Job) -> None:
    """A restarted job may find the store as its predecessor left it."""

    def work(rank: int) -> list[str]:
        return [ProcessGroupPeers(timeout_s=TIMEOUT_S).share(str(rank)) for _ in range(2)]

    assert job.run(2, work) == [["0", "0"]] * 2


@pytest.mark.parametrize("parts", [False, True], ids=["a vote", "a broadcast"])
def test_a_rank_that_is_gone_is_an_error(job: Job, parts: bool) -> None:
    met = threading.Barrier(2)

    def work(rank: int) -> None:
        peers = ProcessGroupPeers(timeout_s=TIMEOUT_S, parts=[[0, 1]] if parts else None)
        met.wait(TIMEOUT_S)
        if rank == 1 and peers.parts is not None:
            peers.parts.receive()
        elif rank == 1:
            peers.vote(Ballot(doing=Doing.STEP)).wait()

    _, error = job.run(2, work)
    assert isinstance(error, PeerFailed)
    assert "another rank of this job is gone or does not answer" in str(error)


def test_a_rank_that_does_not_come_is_an_error(job: Job) -> None:
    (error, _) = job.run(2, lambda rank: rank or ProcessGroupPeers(timeout_s=0.05))
    assert isinstance(error, PeerFailed)


def test_ranks_that_hold_one_model_in_parts_are_one_coordinate(job: Job) -> None:
    parts = [[0, 2], [1]]

    def work(rank: int) -> Any:
        peers = ProcessGroupPeers(timeout_s=TIMEOUT_S, parts=parts)
        assert peers.parts is not None
        return peers.coordinates, peers.size, repr(peers.parts), peers.parts.holds

    assert job.run(3, work) == [
        (2, 3, "<ProcessGroupParts 0/2>", True),
        (2, 3, "<ProcessGroupParts 0/1>", True),
        (2, 3, "<ProcessGroupParts 1/2>", False),
    ]


def test_ranks_that_have_the_whole_model_have_no_parts(job: Job) -> None:
    peers = ProcessGroupPeers()
    assert (peers.coordinates, peers.parts) == (1, None)


@pytest.mark.parametrize("own", [object(), None])
def test_the_ranks_are_those_of_the_group_or_all(
    job: Job, monkeypatch: pytest.MonkeyPatch, own: object
) -> None:
    asked: list[object] = []
    everyone = object()
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", everyone)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: asked.append(group) or [0])
    ProcessGroupPeers(own)  # type: ignore[arg-type]
    assert asked == [own or everyone]


def test_several_ranks_have_to_say_whether_they_step_together(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_no_ranks()
    job.size = 2
    with pytest.raises(InvalidArgument, match="one of 2 ranks"):
        check_no_ranks()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    check_no_ranks()


@pytest.mark.parametrize("name", ["is_initialized", "is_available"])
def test_peers_need_a_process_group(job: Job, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(dist, name, lambda: False)
    with pytest.raises(InvalidArgument, match=r"synchronous=True needs torch\.distributed"):
        ProcessGroupPeers()
    with pytest.raises(InvalidArgument, match=r"mesh=… needs torch\.distributed"):
        peers_over(None, "dp", pin_memory=False)  # type: ignore[arg-type]


# The parts of one model ---------------------------------------------------------------------------------


def carried(job: Job, broadcasts: list[BroadcastBatch], size: int = 2) -> list[list[BroadcastBatch]]:
    """What each follower gets of broadcasts that the holder sends. No rank goes before all are done."""
    done = threading.Barrier(size)

    def work(rank: int) -> list[BroadcastBatch]:
        parts = ProcessGroupParts(list(range(size)), rank, TIMEOUT_S, pin_memory=False)
        try:
            return exchanged(parts)
        finally:
            done.wait(TIMEOUT_S)

    def exchanged(parts: ProcessGroupParts) -> list[BroadcastBatch]:
        if parts.holds:
            for broadcast in broadcasts:
                assert parts.send(broadcast).batch() is broadcast.batch
            return []
        received = []
        for _ in broadcasts:
            delivery = parts.receive()
            received.append((delivery.broadcast, delivery.batch()))
        return [
            BroadcastBatch(
                batch=batch, size=broadcast.size, slices=broadcast.slices, discarded=broadcast.discarded
            )
            for broadcast, batch in received
        ]

    holders, *followers = job.run(size, work)
    assert holders == []
    return followers


def test_parcels_come_to_all_parts_as_they_were_sent(job: Job) -> None:
    slices = (Slice(epoch=1, shard=2, skip=3, limit=4), Slice(epoch=5, shard=6, skip=7, limit=8))
    sent = [
        BroadcastBatch(batch="a", size=7, slices=slices, discarded=9),
        BroadcastBatch(),
        BroadcastBatch(batch="c" * 3 * FRAME_BYTES, size=1, discarded=10),
    ]
    assert carried(job, sent, size=3) == [sent, sent]


def broadcast_of(message_bytes: int) -> BroadcastBatch:
    """One whose message, with its length in front, is so long."""
    text = "x" * (message_bytes // 2)  # longer than what pickle writes in a form of its own
    text += "x" * (message_bytes - message_of(text))
    assert message_of(text) == message_bytes
    return BroadcastBatch(batch=text, size=1)


def message_of(text: str) -> int:
    return len(Packed((text, 1, [], 0)).structure) + 8


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_message_may_be_as_long_as_its_frame(job: Job, more: int) -> None:
    broadcast = broadcast_of(FRAME_BYTES + more)
    sent = [broadcast, BroadcastBatch(batch="next", size=1)]
    assert carried(job, sent) == [sent]


@pytest.mark.parametrize("elements", [1, IN_STRUCTURE_BYTES // 4, IN_STRUCTURE_BYTES // 4 + 1, 50_000])
def test_tensors_come_as_they_were(job: Job, elements: int) -> None:
    batch = {"x": torch.arange(elements, dtype=torch.float32), "y": torch.arange(elements) > 3}
    (received,) = carried(job, [BroadcastBatch(batch=batch, size=2)] * 2)
    for broadcast in received:
        assert torch.equal(broadcast.batch["x"], batch["x"])
        assert torch.equal(broadcast.batch["y"], batch["y"])


# One pair between two ranks -----------------------------------------------------------------------------


class Work:
    """A message under way."""

    def __init__(self, waited: list[str], name: str) -> None:
        self._waited = waited
        self._name = name

    def wait(self) -> None:
        self._waited.append(self._name)


class Wire:
    """What a pair asks of gloo, noted."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int, int]] = []  # (what, bytes, tag)
        self.waited: list[str] = []
        self.works: list[weakref.ref[Work]] = []

    def _work(self, what: str, tensor: torch.Tensor, tag: int) -> Work:
        self.said.append((what, tensor.nbytes, tag))
        work = Work(self.waited, f"{what} {tag}")
        self.works.append(weakref.ref(work))
        return work

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        assert other == 1
        return self._work("send", *tensors, tag)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Work:
        assert other == 1
        return self._work("receive", *tensors, tag)


def test_a_mark_follows_what_is_sent_and_an_answer_comes_back() -> None:
    wire = Wire()
    pair = ReliablePair(wire, 1)
    pair.send([torch.zeros(5, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)])
    pair.wait()
    assert all(work() is not None for work in wire.works), "torch gives up what nobody keeps"
    pair.expect_answer()
    pair.settle()
    assert wire.said == [("send", 5, 1), ("send", 6, 2), ("send", 1, 3), ("receive", 1, 4)]
    assert wire.waited == ["receive 4"]
    assert all(work() is None for work in wire.works), "the other rank has it all"


def test_a_mark_is_waited_for_before_what_came_ahead_of_it() -> None:
    """gloo does not notice that a rank is gone whose large message has come in part."""
    wire = Wire()
    pair = ReliablePair(wire, 1)
    pair.receive([torch.zeros(5, dtype=torch.uint8)])
    pair.wait()
    pair.wait()
    assert wire.said == [("receive", 5, 1), ("receive", 1, 2)]
    assert wire.waited == ["receive 2", "receive 1"]


def test_who_is_expected_to_answer_does_so_once() -> None:
    wire = Wire()
    pair = ReliablePair(wire, 1)
    pair.receive([torch.zeros(5, dtype=torch.uint8)])
    pair.expect_to_answer()
    assert wire.waited == []
    pair.settle()
    pair.settle()
    assert wire.said[2:] == [("send", 1, 3)]


@pytest.mark.parametrize("has_accelerator", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_memory_is_pinned_where_that_was_said_and_means_something(
    pin_memory: bool, has_accelerator: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(process_group, "parts_of", lambda mesh, dp, size: [[0]])
    parts = peers_over(None, "dp", pin_memory=pin_memory).parts  # type: ignore[arg-type]
    assert parts is not None
    assert parts._pin_memory is (pin_memory and has_accelerator)


def test_what_was_lent_leaves_after_the_call(job: Job) -> None:
    def work(rank: int) -> list[int]:
        peers = ProcessGroupPeers(timeout_s=TIMEOUT_S)
        peers.lend({"of": rank} if rank == 0 else None)
        return [pair._other for pair in peers._pairs]

    assert job.run(3, work) == [[1, 2], [0], [0]]
