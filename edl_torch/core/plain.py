"""A master's status as plain values: what `edl-torch status --json` prints, and what the page shows."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from enum import Enum, IntEnum
from functools import cache
from operator import attrgetter
from typing import Any

from edl_torch.core.calls import DatasetStatus, MasterStatus, TrainerStatus
from edl_torch.core.events import Event
from edl_torch.core.measures import Measures

Plain = dict[str, Any]

_MEASURED = ("waiting_share", "mean_read_s", "mean_transform_s")
_DIGITS = (3, 6, 6)  # that the page shows
_get_measured = attrgetter(*_MEASURED)
_DERIVED: dict[type, tuple[str, ...]] = {  # properties that are shown beside the fields
    DatasetStatus: ("outcomes", "epochs_done", "total", "percent", "epoch_percent", "eta_s", "epoch_eta_s"),
    MasterStatus: _MEASURED,
    Measures: _MEASURED,
    Event: ("line",),
}
_SCALARS = frozenset((int, str, float, bool, type(None)))
_AS_IT_IS = ("session", "worker_id", "slow", "trained", "leases")
_ROW_AS_IT_IS = attrgetter(*_AS_IT_IS)
ROW = (
    *_AS_IT_IS,
    *("pace", "idle_s", "since_progress_s", "oldest_lease_s", "state"),
    *_MEASURED,
)


def plain(value: Any) -> Any:
    """Return a status, or a part of one, as values that JSON has; task types by name."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if names := _names(kind):
        return {name: plain(getattr(value, name)) for name in names}
    if kind is tuple and value and type(value[0]) not in _SCALARS:
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name if isinstance(value, IntEnum) else value.value
    return value


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """Return what is shown of the values of a dataclass; nothing of others."""
    own = (field.name for field in fields(kind)) if is_dataclass(kind) else ()
    return (*own, *_DERIVED.get(kind, ()))


def plain_frame(status: MasterStatus, most_bad: int) -> Plain:
    """Return what the page shows of a status, of each quarantine `most_bad` records.

    `trainers` are rows of the columns that `trainer_columns` names: they are most of it.
    """
    shown = {
        name: plain(getattr(status, name))
        for name in _names(MasterStatus)
        if name not in ("datasets", "trainers")
    }
    return shown | {
        "datasets": [plain(replace(d, quarantine=d.quarantine[:most_bad])) for d in status.datasets],
        "trainer_columns": ROW,
        "trainers": [_row(trainer) for trainer in status.trainers],
    }


def _row(trainer: TrainerStatus) -> tuple[Any, ...]:
    return (
        *_ROW_AS_IT_IS(trainer),
        round(trainer.pace, 2),
        round(trainer.idle_s, 1),
        round(trainer.since_progress_s, 1),
        round(trainer.oldest_lease_s, 1),
        trainer.state.value,
        *_measured(trainer.measures),
    )


def _measured(measures: Measures | None) -> tuple[float | None, ...]:
    if measures is None:
        return (None,) * len(_MEASURED)
    values = zip(_get_measured(measures), _DIGITS, strict=True)
    return tuple([None if value is None else round(value, digits) for value, digits in values])
