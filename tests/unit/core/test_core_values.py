"""Values that cross the door of the core: nobody changes one, and their fields are named."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import edl_torch.core
from edl_torch import shard
from edl_torch.core.calls import (
    Acknowledgement,
    ConfirmCall,
    Fence,
    FencedCall,
    LeaseCall,
    ProgressCall,
    ReportCall,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.leases import PAGE, Lease, LeaseRequest, Quota, Span
from edl_torch.core.limits import Limits
from edl_torch.core.members import Member
from edl_torch.core.status import Event

MODULES = [
    shard,
    *(
        importlib.import_module(f"edl_torch.core.{module.name}")
        for module in pkgutil.iter_modules(edl_torch.core.__path__)
    ),
]
VALUES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
]
STATE = {Lease, Member, Quota, Span}
MADE_OFTEN = {
    Acknowledgement,
    ConfirmCall,
    Fence,
    FencedCall,
    ProgressCall,
    SnapshotCall,
    LeaseCall,
    ReportCall,
    RestoreCall,
}  # not frozen
NOT_ZERO: dict[type, dict[str, Any]] = {
    shard.DatasetSpec: {"num_epochs": 1, "epoch_barrier": True, "shuffle_window": 1},
    Event: {"count": 1},
}
POSITIONAL = {LeaseRequest, Member, Quota}


@pytest.mark.parametrize("value", VALUES)
def test_values_are_frozen_but_for_state_and_for_what_is_made_with_each_batch(value: Any) -> None:
    assert value.__dataclass_params__.frozen == (value not in STATE | MADE_OFTEN)
    assert "__slots__" in vars(value)


@pytest.mark.parametrize("value", [value for value in VALUES if value not in POSITIONAL])
def test_fields_are_named(value: Any) -> None:
    assert all(field.kw_only for field in fields(value))


@pytest.mark.parametrize("value", [value for value in VALUES if value is not Limits])
def test_a_number_that_is_left_out_is_zero_as_on_the_wire(value: Any) -> None:
    numbers = {f.name: f.default for f in fields(value) if type(f.default) in {int, bool}}
    assert {name: default for name, default in numbers.items() if default} == NOT_ZERO.get(value, {})


def test_pages_of_leases_stay_what_rows_of_journals_are_numbered_by() -> None:
    assert PAGE == 16
