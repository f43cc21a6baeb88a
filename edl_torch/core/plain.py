"""A master's status as plain values: what `edl-torch status --json` prints, and what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from edl_torch.core.calls import DatasetStatus, MasterStatus, QuarantinedRecord, TrainerStatus
from edl_torch.core.events import Departed, Event
from edl_torch.core.measures import Histogram, Measures
from edl_torch.core.picture import Picture

Plain = dict[str, Any]
_Taker = tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]


def _taker(kind: type, *derived: str, without: tuple[str, ...] = ()) -> _Taker:
    names = (*(field.name for field in fields(kind) if field.name not in without), *derived)
    return names, attrgetter(*names)


_MEASURED = ("waiting_share", "mean_read_s", "mean_transform_s")
_DIGITS = (3, 6, 6)  # that the page shows
_get_measured = attrgetter(*_MEASURED)
_DATASET = _taker(
    DatasetStatus,
    *("outcomes", "epochs_done", "total", "percent", "epoch_percent", "eta_s", "epoch_eta_s"),
    without=("task_type", "quarantine", "picture"),
)
_TRAINER = _taker(TrainerStatus, without=("state", "measures"))
_MASTER = _taker(
    MasterStatus,
    *_MEASURED,
    without=("datasets", "trainers", "suspended", "events", "departed", "event_counts"),
)
_EVENT = _taker(Event, "line", without=("kind",))
_DEPARTED = _taker(Departed)
_BAD = _taker(QuarantinedRecord)
_PICTURE = _taker(Picture)
_MEASURES = _taker(Measures, *_MEASURED, without=("waited", "stepped"))
_HISTOGRAM = _taker(Histogram)
_AS_IT_IS = ("session", "worker_id", "slow", "trained", "leases")
_ROW_AS_IT_IS = attrgetter(*_AS_IT_IS)
ROW = (
    *_AS_IT_IS,
    *("pace", "idle_s", "since_progress_s", "oldest_lease_s", "state"),
    *_MEASURED,
)


def _take(taker: _Taker, value: object) -> Plain:
    names, get = taker
    return dict(zip(names, get(value), strict=True))


def plain(status: MasterStatus) -> Plain:
    """Return the status as values that JSON has."""
    return _common(status, None) | {"trainers": [_trainer(trainer) for trainer in status.trainers]}


def plain_frame(status: MasterStatus, most_bad: int) -> Plain:
    """Return what the page shows of a status, of each quarantine `most_bad` records.

    `trainers` are rows of the columns that `trainer_columns` names: they are most of it.
    """
    rows = [_row(trainer) for trainer in status.trainers]
    return _common(status, most_bad) | {"trainer_columns": ROW, "trainers": rows}


def _common(status: MasterStatus, most_bad: int | None) -> Plain:
    return _take(_MASTER, status) | {
        "suspended": dict(status.suspended),
        "event_counts": dict(status.event_counts),
        "datasets": [_dataset(dataset, most_bad) for dataset in status.datasets],
        "events": [_take(_EVENT, event) | {"kind": event.kind.value} for event in status.events],
        "departed": [_take(_DEPARTED, gone) for gone in status.departed],
    }


def _dataset(dataset: DatasetStatus, most_bad: int | None) -> Plain:
    return _take(_DATASET, dataset) | {
        "task_type": dataset.task_type.name,
        "quarantine": [_take(_BAD, bad) for bad in dataset.quarantine[:most_bad]],
        "picture": None if dataset.picture is None else _take(_PICTURE, dataset.picture),
    }


def _trainer(trainer: TrainerStatus) -> Plain:
    measures: Mapping[str, Any] | None = None
    if trainer.measures is not None:
        both = {name: getattr(trainer.measures, name) for name in ("waited", "stepped")}
        measures = _take(_MEASURES, trainer.measures) | {n: _take(_HISTOGRAM, h) for n, h in both.items()}
    return _take(_TRAINER, trainer) | {"state": trainer.state.value, "measures": measures}


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
