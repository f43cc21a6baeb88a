"""Registration of datasets: the first description makes one, later ones must fit it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from edl_torch.core.calls import Registration
from edl_torch.core.identity import data_differences, differences, identity
from edl_torch.core.permutation import MAX_SIZE
from edl_torch.core.spec import validate_spec
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset
from edl_torch.fingerprint import UNKNOWN
from edl_torch.fingerprint import check as check_fingerprint
from edl_torch.shard import DatasetSpec

BATCHES_PER_SHARD = 8
_OPTIONS = ("task_type", "num_epochs", "epoch_barrier", "max_bad_records")


def check_batch_size(batch_size: int) -> None:
    """Raise InvalidArgument for one that no dataset could fill."""
    if not 1 <= batch_size <= MAX_SIZE:
        raise InvalidArgument(f"batch_size must be 1 or more, and {MAX_SIZE} at most, not {batch_size}")


def new_spec(registration: Registration, batch_size: int) -> DatasetSpec:
    """The dataset that a first registration describes. Raises UnknownDataset when it is a name alone."""
    if registration.sources is None:
        raise UnknownDataset(
            f"the master has no dataset {registration.name!r}, and the service gives no reader and no "
            f"dataset_size: pass one of them, or start the master with --training_data"
        )
    given = _given(registration)
    given.setdefault("records_per_shard", BATCHES_PER_SHARD * batch_size)
    given.setdefault("shuffle_in_shard", True if "shuffle_window" in given else None)
    spec = DatasetSpec(**given)
    validate_spec(spec)
    return spec


def reconcile(registered: DatasetSpec, asked: Registration, *, alone: bool) -> DatasetSpec:
    """Return the registered dataset, with what `asked` may still change of it.

    The identity must agree in every field that `asked` names; a dataset made without a trainer leaves the
    in-shard shuffle and its window open for the first one, and who says nothing of it does not shuffle.
    The first known fingerprint binds it; where it agrees, sources have the names that `asked` gives them.
    Options differ freely while `alone` uses the dataset.
    Raises DatasetConflict with the differing fields.
    """
    given = _given(asked)
    check_fingerprint(given.get("fingerprint", UNKNOWN))
    if registered.shuffle_in_shard is None:
        registered = replace(
            registered,
            shuffle_in_shard=given.get("shuffle_in_shard", False),
            shuffle_window=given.get("shuffle_window", 1),
        )
    wanted = replace(registered, **given)
    old, new = identity(registered), identity(wanted)
    differing = differences(old, new)
    if not alone:
        differing += option_differences(registered, asked)
    if differing:
        what = "data or settings" if data_differences(old, new) else "settings"
        raise DatasetConflict(
            f"dataset {registered.name!r} is registered with other {what}: {'; '.join(differing)}. "
            f"Use the registered ones, or another dataset_name"
        )
    validate_spec(wanted)
    return wanted


def check_data(registered: DatasetSpec, here: DatasetSpec) -> None:
    """Raise DatasetConflict unless the data `here` are those registered."""
    differing = data_differences(identity(registered), identity(here))
    if differing:
        raise DatasetConflict(
            f"dataset {registered.name!r} is registered with other data: {'; '.join(differing)}. "
            f"Give every rank the same data"
        )


def option_differences(registered: DatasetSpec, asked: Registration) -> list[str]:
    """Return a line for each option that `asked` names and that is another one in the registered dataset."""
    return [
        f"{name}: registered {getattr(registered, name)}, asked {wanted}"
        for name, wanted in _given(asked).items()
        if name in _OPTIONS and wanted != getattr(registered, name)
    ]


def _given(registration: Registration) -> dict[str, Any]:
    values = {f.name: getattr(registration, f.name) for f in fields(registration)}
    if values["fingerprint"] == UNKNOWN:
        values["fingerprint"] = None
    return {name: value for name, value in values.items() if value is not None}
