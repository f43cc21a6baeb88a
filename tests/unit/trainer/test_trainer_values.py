"""The trainer's actions and facts are values: nobody changes one, and what has several fields names them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import edl_torch.trainer
from edl_torch.core.calls import NEW_PASS, Fence
from edl_torch.trainer import (
    batches,
    counting,
    foreign_loop,
    inflight,
    outbox,
    state,
    vocabulary,
)
from edl_torch.trainer.vocabulary import Evidence

MODULES = [
    importlib.import_module(f"edl_torch.trainer.{module.name}")
    for module in pkgutil.iter_modules(edl_torch.trainer.__path__)
]
VALUES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
]
STATE = {
    counting.PlainPass,
    inflight.Held,
    outbox.Report,
    state.Registered,
    batches.Batch,
    batches._InPass,
    inflight.Pass,
}
POSITIONAL = {vocabulary.Call, vocabulary.Wait, *STATE - {inflight.Held, inflight.Pass}}
NOT_ZERO: dict[Any, dict[str, Any]] = {
    state.Config: {"keeps_ledger": True},
    inflight.Pass: {"joins": True},
}


def test_there_are_values() -> None:
    assert {vocabulary.Register, foreign_loop.Reading, *STATE} < set(VALUES)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_does_not_change_unless_it_is_state_and_nothing_is_added_to_it(value: Any) -> None:
    assert value.__dataclass_params__.frozen == (value not in STATE)
    assert "__slots__" in vars(value)


@pytest.mark.parametrize("value", [value for value in VALUES if value not in POSITIONAL])
def test_several_fields_are_named(value: Any) -> None:
    assert len(fields(value)) < 2 or all(field.kw_only for field in fields(value))


@pytest.mark.parametrize("value", VALUES)
def test_a_number_that_nobody_gives_says_nothing(value: Any) -> None:
    numbers = {f.name: f.default for f in fields(value) if type(f.default) in {int, bool}}
    said = {name: default for name, default in numbers.items() if default and default != NEW_PASS}
    assert said == NOT_ZERO.get(value, {})


def test_ways_are_in_the_order_of_what_they_prove() -> None:
    assert [(way.value, way.label) for way in Evidence] == [
        (1, "step"),
        (2, "skipped"),
        (3, "unseen"),
        (4, "next"),
        (5, "token"),
        (6, "report"),
        (7, "count"),
        (8, "unstepped"),
    ]
    assert [way.exact for way in Evidence] == [True] * 6 + [False] * 2


def test_to_a_member_that_is_not_remembered_nothing_was_answered() -> None:
    registered = state.Registered()
    registered.answered(Fence(ledger="another"), asked=3, reported=4)
    assert registered.known(Fence(ledger="another")) == (0, 0)
    registered.answered(registered.fence, asked=3)
    registered.answered(registered.fence, reported=4)
    assert registered.known(registered.fence) == (3, 4)


def test_before_the_shell_tells_the_time_it_is_zero() -> None:
    assert state.State(state.Config(session="s", dataset="d", batch_size=1)).now == 0.0
