"""Values of the pure rooms, and of what both speak of: nobody changes one, and their fields are named."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import edl_torch.core
import edl_torch.trainer
from edl_torch import shard
from edl_torch.core import calls, leases, limits, members, status
from edl_torch.trainer import batches, counting, foreign_loop, inflight, outbox, state, vocabulary

MODULES = [
    shard,
    *(
        importlib.import_module(f"{room.__name__}.{module.name}")
        for room in (edl_torch.core, edl_torch.trainer)
        for module in pkgutil.iter_modules(room.__path__)
    ),
]
VALUES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
]
STATE = {
    *(leases.Lease, leases.Quota, leases.Span, members.Member),
    *(batches.Batch, batches._InPass, counting.PlainPass, inflight.Held, inflight.Pass),
    *(outbox.Report, state.Registered),
}
MADE_OFTEN = {  # not frozen: they are made with each batch
    *(calls.Acknowledgement, calls.ConfirmCall, calls.Fence, calls.FencedCall, calls.LeaseCall),
    *(calls.ProgressCall, calls.ReportCall, calls.RestoreCall, calls.SnapshotCall),
}
POSITIONAL = {
    *(leases.LeaseRequest, leases.Quota, members.Member, vocabulary.Call, vocabulary.Wait),
    *(batches.Batch, batches._InPass, counting.PlainPass, outbox.Report, state.Registered),
}
NOT_ZERO: dict[type, dict[str, Any]] = {
    shard.DatasetSpec: {"num_epochs": 1, "epoch_barrier": True, "shuffle_window": 1, "turn": 1},
    shard.Component: {"shuffle_window": 1},
    status.Event: {"count": 1},
    state.TrainerConfig: {"keeps_ledger": True},
    inflight.Pass: {"joins": True},
}


def test_there_are_values() -> None:
    assert {vocabulary.Register, foreign_loop.Reading, *STATE, *MADE_OFTEN} < set(VALUES)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_does_not_change_unless_it_is_state_and_nothing_is_added_to_it(value: Any) -> None:
    assert value.__dataclass_params__.frozen == (value not in STATE | MADE_OFTEN)
    assert "__slots__" in vars(value)


@pytest.mark.parametrize("value", [value for value in VALUES if value not in POSITIONAL])
def test_several_fields_are_named(value: Any) -> None:
    assert len(fields(value)) < 2 or all(field.kw_only for field in fields(value))


@pytest.mark.parametrize("value", [value for value in VALUES if value is not limits.Limits])
def test_a_number_that_is_left_out_is_zero_as_on_the_wire(value: Any) -> None:
    numbers = {f.name: f.default for f in fields(value) if type(f.default) in {int, bool}}
    said = {name: default for name, default in numbers.items() if default and default != calls.NEW_PASS}
    assert said == NOT_ZERO.get(value, {})
