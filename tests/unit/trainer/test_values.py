"""The trainer's actions and facts are values: nobody changes one, and what has several fields names them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest

from edl_torch.core.calls import NEW_PASS
from edl_torch.trainer import actions, facts, inflight, outbox, plain, state, supply
from edl_torch.trainer.facts import Way


def values_of(module: ModuleType) -> list[Any]:
    return [v for v in vars(module).values() if is_dataclass(v) and v.__module__ == module.__name__]


FROZEN = [*values_of(actions), *values_of(facts), state.Config, plain.Reading]
NOT_ZERO: dict[Any, dict[str, Any]] = {state.Config: {"keeps_ledger": True}, supply.Pass: {"joins": True}}
CHANGING = [inflight.Held, state.Registered, supply.Pass]


@pytest.mark.parametrize("value", FROZEN)
def test_a_value_does_not_change(value: Any) -> None:
    assert value.__dataclass_params__.frozen
    assert "__slots__" in vars(value)


@pytest.mark.parametrize("value", CHANGING)
def test_nothing_is_added_to_what_changes(value: Any) -> None:
    assert "__slots__" in vars(value)


@pytest.mark.parametrize(
    "value", [*values_of(facts), state.Config, plain.Reading, inflight.Held, supply.Pass]
)
def test_several_fields_are_named(value: Any) -> None:
    assert len(fields(value)) < 2 or all(field.kw_only for field in fields(value))


@pytest.mark.parametrize("value", [*FROZEN, *CHANGING, outbox.Report])
def test_a_number_that_nobody_gives_says_nothing(value: Any) -> None:
    numbers = {f.name: f.default for f in fields(value) if type(f.default) in {int, bool}}
    said = {name: default for name, default in numbers.items() if default and default != NEW_PASS}
    assert said == NOT_ZERO.get(value, {})


def test_ways_are_in_the_order_of_what_they_prove() -> None:
    assert [(way.value, way.label) for way in Way] == [
        (1, "step"),
        (2, "next"),
        (3, "token"),
        (4, "report"),
        (5, "count"),
        (6, "unstepped"),
        (7, "unknown"),
    ]
    assert [way.exact for way in Way] == [True, True, True, True, False, False, False]
