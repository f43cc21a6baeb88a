"""A loader that keeps stepping hands out padding batches where it would wait for other trainers' records."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from loader_kit import session_at_once

from edl_torch import ElasticDataLoader
from edl_torch.data.loop.lockstep_pass import FIRST_WAIT_S, PaddedPass
from edl_torch.errors import ServiceClosed
from edl_torch.testing import FakeMaster


def loader_of(records: int, fake: FakeMaster, **arguments: object) -> ElasticDataLoader:
    return ElasticDataLoader(
        range(records), 4, records_per_shard=4, master_client=fake, synchronous=False, **arguments
    )


def test_a_batch_stands_in_while_another_trainer_holds_the_rest() -> None:
    fake = FakeMaster()
    weight = torch.nn.Parameter(torch.zeros(8))
    with loader_of(8, fake) as other, loader_of(8, fake) as loader:
        loader.keep_stepping()
        steps = torch.optim.SGD([weight], lr=1.0)
        loader.attach(steps)
        theirs, mine = iter(other), iter(loader)
        held = next(theirs)
        weights = []
        for _ in range(3):
            batch = next(mine)
            assert len(batch) == 4
            steps.zero_grad()
            loader.weigh(weight[batch].mean().neg()).backward()
            steps.step()
            weights.append(loader.weight)
        assert weights == [4, 0, 0]
        assert list(theirs) == []  # it is done with what it held
        assert list(mine) == []
        assert loader.service.finished
    assert weight[held].tolist() == [0.0] * 4
    assert weight.sum() == 4
    fake.outcomes["training"].check_complete(1)


def test_what_comes_back_from_another_trainer_is_read() -> None:
    fake = FakeMaster()
    with loader_of(8, fake) as loader:
        loader.keep_stepping()
        other = loader_of(8, fake)
        theirs, mine = iter(other), iter(loader)
        next(theirs)
        first = next(mine).tolist()
        assert next(mine).tolist() == first
        assert loader.weight == 0
        other.close()
        second = next(mine).tolist()
        assert loader.weight == 4
        assert sorted(first + second) == list(range(8))
        assert list(mine) == []
    fake.outcomes["training"].check_complete(1)


def test_alone_it_reads_like_any_other() -> None:
    fake = FakeMaster()
    with loader_of(10, fake, num_epochs=2) as loader:
        loader.keep_stepping()
        for _ in loader.epochs():
            assert sorted(n for batch in loader for n in batch.tolist()) == list(range(10))
    fake.outcomes["training"].check_complete(2)


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("more", [True, False])
def test_a_pass_without_a_step_settles_what_earlier_ones_left_unstepped(
    more: bool, is_over: bool, stepped: bool, padding: bool
) -> None:
    settled: list[bool] = []
    waits: list[float] = []
    looking = PaddedPass.__new__(PaddedPass)
    looking._padding = SimpleNamespace(made=padding)  # type: ignore[assignment]
    looking._stepped = stepped
    looking._passes = SimpleNamespace(  # type: ignore[assignment]
        look_for_more=lambda wait_s: waits.append(wait_s) or more,
        is_over=is_over,
        settle_stuck=lambda: settled.append(True),
    )
    looking._session = session_at_once()
    assert looking._more_to_read() is more
    assert bool(settled) == (is_over and not more and not stepped)
    assert waits == [0.0 if padding else FIRST_WAIT_S], "without a batch to pad with it can only wait"


@pytest.mark.parametrize("has_one", [True, False])
def test_a_step_is_taken_with_a_batch_or_a_padding_batch(has_one: bool) -> None:
    noted: list[object] = []
    stepping = PaddedPass.__new__(PaddedPass)
    stepping._stepped = False
    stepping._padding = SimpleNamespace(made=True, keep=noted.append)  # type: ignore[assignment]
    stepping._weights = SimpleNamespace(step=noted.append)  # type: ignore[assignment]
    stepping._passes = SimpleNamespace(is_over=False)  # type: ignore[assignment]
    stepping._session = session_at_once(hand=None)
    stepping._pull = lambda more, take: SimpleNamespace(batch="own", size=3) if has_one else None  # type: ignore[assignment, method-assign, return-value]
    stepping._pad = lambda: "padding"  # type: ignore[method-assign]
    assert stepping._step() == (("own", 3) if has_one else ("padding", 0))
    assert stepping._stepped
    assert noted == (["own", 3] if has_one else [])


def test_a_pass_sees_to_the_padding_batch_before_it() -> None:
    done: list[object] = []
    stepping = PaddedPass.__new__(PaddedPass)
    stepping._statistics = SimpleNamespace(  # type: ignore[assignment]
        let_go=lambda: done.append("lets go"), keep=lambda: done.append("keeps")
    )
    stepping._weights = SimpleNamespace(  # type: ignore[assignment]
        warn_of_padding=lambda: done.append("warns"), step=done.append
    )
    stepping._passes = SimpleNamespace(  # type: ignore[assignment]
        pad=lambda: done.append("pads")
    )
    stepping._session = session_at_once(close_pass=lambda number: done.append(f"ends {number}"))
    stepping._let_go = lambda: done.append("ends threads")  # type: ignore[method-assign]
    stepping._number, stepping._pid = 7, os.getpid()
    stepping._padding = SimpleNamespace(batch=lambda: "a copy")  # type: ignore[assignment]
    assert stepping._pad() == "a copy"
    assert done == ["pads", 0, "keeps"]
    done.clear()
    stepping._closed = False
    stepping.close()
    assert done == ["lets go", "ends 7", "ends threads"]
    done.clear()
    stepping._pid = -1
    with pytest.raises(ServiceClosed, match="was forked from"):
        stepping._request()
    assert done == ["lets go", "warns"]


def test_a_pass_begins_without_a_step() -> None:
    with loader_of(8, FakeMaster()) as loader:
        loader.keep_stepping()
        batches = iter(loader)
        assert isinstance(batches, PaddedPass)
        assert not batches._stepped
        next(batches)
        assert batches._stepped
