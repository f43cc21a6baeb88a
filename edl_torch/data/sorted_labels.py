"""Tells of a dataset that is sorted by label and mixed only inside its shards."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl_torch.core.plan import Plan
from edl_torch.readers.base import AbstractDataReader
from edl_torch.system.user_warnings import warn_user

_FEW = 0.5  # of all classes: what a shard that mixes has more of


def warn_of_sorted_labels(reader: AbstractDataReader, plan: Plan) -> None:
    """Warn where the records of a shard, which alone are mixed, have few of the dataset's classes.

    Known of readers that have `targets`, the class of each record, as torchvision's datasets have.
    """
    spec = plan.spec
    targets = getattr(reader, "targets", None)
    if targets is None or spec.shuffle or not spec.shuffle_in_shard or len(spec.sources) != 1:
        return
    labels = _one_dimensional(targets)
    if labels is None or len(labels) != plan.size or np.any(labels[1:] < labels[:-1]):
        return
    changes = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    classes = len(changes) + 1
    in_a_shard = 1 + np.count_nonzero(changes % spec.records_per_shard) / plan.num_shards
    if in_a_shard <= _FEW * classes:
        warn_user(
            f"the records of {spec.name!r} are sorted by label and mixed only inside shards of "
            f"{spec.records_per_shard} records: a batch has some {in_a_shard:.1f} of the {classes} classes, "
            f"and models learn badly from that. Give ElasticDataLoader(reader, shuffle=True), or "
            f"DataShardService(shuffle=True), which mix all records; or shuffle the data where they lie"
        )


def _one_dimensional(targets: Any) -> Any:
    """Return the labels as an array of numbers, None where they are something else."""
    try:
        labels = np.asarray(targets)
    except ValueError:  # lists of unequal length, as of boxes
        return None
    return labels if labels.ndim == 1 and labels.dtype.kind in "iub" else None
