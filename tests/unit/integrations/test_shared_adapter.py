"""What adapters have in common; each framework's own tests are in `tests/with_…`."""

from __future__ import annotations

import importlib
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edl_torch import ElasticDataLoader
from edl_torch.errors import ConcurrentIteration, IntegrationUnavailable, InvalidArgument
from edl_torch.integrations.adapter import (
    ModelPosition,
    check_synchronous,
    needed_by,
    read_ahead,
)


class Loader:
    """A loader that only has a position."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.position = "here"

    def state_dict(self) -> str:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def test_what_is_missing_is_named_with_its_extra() -> None:
    with (
        pytest.raises(IntegrationUnavailable, match=r"no_such_module is missing.*edl-torch\[ray\]"),
        needed_by("ray"),
    ):
        importlib.import_module("no_such_module")


def test_a_model_begins_at_the_beginning_of_its_data_or_where_its_checkpoint_is() -> None:
    loader: Any = Loader()
    position = ModelPosition(loader)
    assert position.begin()
    assert not position.begin()
    position.load("checkpoint")
    assert not position.begin()
    assert loader.loaded == [None, "checkpoint"]


def test_what_a_loop_that_was_left_has_not_learnt_comes_again_and_else_nothing() -> None:
    loader: Any = Loader()
    position = ModelPosition(loader)
    position.begin()
    position.leave()
    assert position.begin()
    position.leave()
    position.end()
    assert not position.begin()
    assert loader.loaded == [None, "here"]


def records_of(loader: ElasticDataLoader) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("lookahead", [0, 2, "manual"])
def test_a_framework_that_reads_ahead_says_which_batch_its_loop_gets(lookahead: Any) -> None:
    with ElasticDataLoader(torch.arange(20), 4, num_epochs=2, lookahead=lookahead) as loader:
        left = iter(loader)
        next(left)
        read_ahead(loader)
        assert loader.service.lookahead == "manual"
        with pytest.raises(ConcurrentIteration):
            next(left)
        batches = iter(loader)
        assert [batch.tolist()[0] for batch in islice(batches, 4)] == [0, 4, 8, 12], (
            "what was left comes again"
        )
        for _ in range(3):
            loader.passed_on()
        assert loader.weight == 4
        assert loader.progress().acknowledged == 8, "its loop has the third, and nobody the fourth"
        read_ahead(loader, lookahead)
        assert loader.service.lookahead == lookahead
        if lookahead != "manual":
            assert records_of(loader) == list(range(8, 20))
            assert records_of(loader) == list(range(20))
            assert records_of(loader) == []  # what is read ahead counts when the next pass begins
            assert loader.progress().finished


def test_a_framework_reads_on_where_a_loop_with_a_number_has_ended() -> None:
    with ElasticDataLoader(torch.arange(12), 4, num_epochs=2, lookahead=1) as loader:
        assert records_of(loader) == list(range(12))
        read_ahead(loader)
        assert [batch.tolist() for batch in islice(loader, 1)] == [[0, 1, 2, 3]]
        loader.passed_on()
        assert loader.progress().acknowledged == 12, "the last one of the first epoch was trained on"


def test_loaders_that_do_not_fit_are_refused() -> None:
    with ElasticDataLoader(range(8), 4) as loader:
        check_synchronous(loader, 1, "one model")
        with pytest.raises(InvalidArgument, match="synchronous=True"):
            check_synchronous(loader, 2, "one model on 2 ranks")
    check_synchronous(SimpleNamespace(synchronous=True), 2, "one model on 2 ranks")  # type: ignore[arg-type]
