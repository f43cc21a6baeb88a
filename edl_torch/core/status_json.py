"""A master's status as plain values: what `edl-torch status --json` prints, and what the page shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from edl_torch.core.calls import MasterStatus, TrainerStatus

Plain = dict[str, Any]
_Change = Callable[[Any], Any]

# Of a trainer's row: what stands as it is, and digits of the rest.
_AS_IT_IS = ("session", "worker_id", "slow", "trained", "leases")
_TIMES = {"pace": 2, "idle_s": 1, "since_progress_s": 1, "oldest_lease_s": 1}
_MEASURED = {"waiting_share": 3, "mean_read_s": 6, "mean_transform_s": 6}
ROW = (*_AS_IT_IS, *_TIMES, "state", *_MEASURED)
_as_it_is, _times, _measured = attrgetter(*_AS_IT_IS), attrgetter(*_TIMES), attrgetter(*_MEASURED)


def plain(record: Any) -> Plain:
    """Return a status, or a part of one, as values that JSON has: its fields and properties."""
    kind: Any = type(record)
    names, take, changes = _taker(kind)
    values = dict(zip(names, take(record), strict=True))
    for name, change in changes:
        if values[name] is not None:
            values[name] = change(values[name])
    return values


def plain_frame(status: MasterStatus, most_bad: int) -> Plain:
    """Return what the page shows of a status, of each quarantine `most_bad` records.

    `trainers` are rows of the columns that `trainer_columns` names: they are most of it.
    """
    datasets = tuple([replace(one, quarantine=one.quarantine[:most_bad]) for one in status.datasets])
    values = plain(replace(status, datasets=datasets, trainers=()))
    values |= zip(_MEASURED, _measured(status), strict=True)
    return values | {"trainer_columns": ROW, "trainers": [_row(trainer) for trainer in status.trainers]}


def _row(trainer: TrainerStatus) -> tuple[Any, ...]:
    times = map(round, _times(trainer), _TIMES.values())
    measured = zip(_measured(trainer), _MEASURED.values(), strict=True)
    shown = [None if value is None else round(value, digits) for value, digits in measured]
    return (*_as_it_is(trainer), *times, trainer.state.value, *shown)


@cache
def _taker(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[tuple[str, _Change]]]:
    """Names of what is shown of a record, what takes it, and how some of it becomes plain."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    changes = [(name, change) for name in names if (change := _change(hints[name])) is not None]
    names += [name for name, value in vars(kind).items() if isinstance(value, property)]
    return names, attrgetter(*names), changes


def _change(hint: Any) -> _Change | None:
    kind = next(iter(get_args(hint)), hint)
    if is_dataclass(kind):
        return (lambda records: [plain(record) for record in records]) if get_origin(hint) is tuple else plain
    if isinstance(kind, type) and issubclass(kind, Enum):
        return attrgetter("name" if issubclass(kind, int) else "value")
    return None
