"""What is handed from part to part has its fields alone, and what was decided stays as it is."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from edl_torch.data.collate import Collated, Envelope
from edl_torch.data.opening import ReadingOptions, _Order
from edl_torch.data.threaded_reading import Threading

THREADING = {"threads": 1, "ahead": 2, "batch_size": 3, "collate": None}


@pytest.mark.parametrize("kind", [Collated, Envelope, ReadingOptions, Threading, _Order])
def test_there_is_no_room_for_other_attributes(kind: Any) -> None:
    assert set(kind.__slots__) == {field.name for field in fields(kind)}


@pytest.mark.parametrize("value", [ReadingOptions(), Threading(**THREADING), _Order()])
def test_a_decision_is_made_by_name_and_stays(value: Any) -> None:
    first = fields(value)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(value, first, getattr(value, first))
    with pytest.raises(TypeError, match="positional"):
        type(value)(*(getattr(value, field.name) for field in fields(value)))
